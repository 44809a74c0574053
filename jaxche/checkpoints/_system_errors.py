"""What errors of the system, and of the libraries that read and write, say about a disk and about this process."""

from __future__ import annotations

import errno
import os
import re

from jaxche.messages import causes

# A full disk, a file above the limit of its size, and a full quota.
_NO_SPACE = frozenset({errno.ENOSPC, errno.EFBIG, errno.EDQUOT})
# Too many open files, too little memory, and no permission.
_OWN = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM})
# TensorStore has the number of the system's error in its text only.
_CODE = re.compile(r"os_error_code='(\d+)'")
# JAX has no class for a device without memory, only this word.
_NO_DEVICE_MEMORY = "RESOURCE_EXHAUSTED"


def no_space(error: BaseException | None) -> str | None:
    """The system's message if an error, of the system or of a library that writes, is due to a full disk; else None."""
    for one in causes(error):
        if found := _NO_SPACE.intersection(_codes(one)):
            return os.strerror(min(found))
    return None


def is_of_process(error: BaseException | None) -> bool:
    """Whether an error says that this process cannot read now, and nothing about the files that it reads."""
    return any(
        isinstance(one, MemoryError) or _OWN.intersection(_codes(one)) or _NO_DEVICE_MEMORY in str(one)
        for one in causes(error)
    )


def _codes(error: BaseException) -> list[int | None]:
    """The numbers of the system's errors."""
    return [error.errno] if isinstance(error, OSError) else [int(code) for code in _CODE.findall(str(error))]
