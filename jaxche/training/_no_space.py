"""Errors for want of space on a disk, from the system and from the libraries that write."""

from __future__ import annotations

import errno
import os
import re

# A full disk, a file above the limit of its size, and a full quota.
_ERRNOS = frozenset({errno.ENOSPC, errno.EFBIG, errno.EDQUOT})
# TensorStore has the number of the system's error in its text only.
_CODE = re.compile(r"os_error_code='(\d+)'")


def no_space(error: BaseException | None) -> str | None:
    """The system's message if an error, or one of its causes, is for want of space; else None."""
    while error is not None:
        codes = [error.errno] if isinstance(error, OSError) else map(int, _CODE.findall(str(error)))
        if found := _ERRNOS.intersection(codes):
            return os.strerror(min(found))
        error = error.__cause__ or error.__context__
    return None
