"""A folder that all members of a group share and can write."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from jaxche.distributed import Group

# Until other machines see a new file, and between two checks.
_VISIBLE_S, _POLL_S = 10.0, 0.2
_PLACE = "the check of the checkpoints folder"


def shared_folder(group: Group, path: str | os.PathLike[str]) -> Path:
    """The folder that all members share, created if it is missing; all of them make this call."""
    folder = Path(path).expanduser().resolve()
    with group.errors_everywhere(group.process_index, _PLACE):
        _refuse_unwritable(folder)
    if len(group.members) > 1:
        _refuse_not_shared(group, folder)
    return folder


def _refuse_unwritable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".writable-"):
            pass
    except OSError as error:
        raise ValueError(
            f"checkpoints={os.fspath(folder)!r} cannot be written ({error.strerror}); give a folder that can, e.g. "
            "checkpoints='runs/first'"
        ) from None


def _refuse_not_shared(group: Group, folder: Path) -> None:
    """Refuse a folder that is local to a machine: processes that write there would wait for each other's files."""
    sign = folder / f".shared-{group.broadcast(os.urandom(6).hex())}"
    with group.errors_everywhere(group.process_index, _PLACE):
        if group.is_first:
            sign.touch()
    try:
        with group.errors_everywhere(group.process_index, _PLACE):
            if not _appears(sign):
                raise ValueError(
                    f"checkpoints={str(folder)!r} is not the folder that process {group.members[0]} has under that "
                    "name; give one that all machines share, as a mount of a file server"
                )
    finally:
        if group.is_first:
            sign.unlink(missing_ok=True)


def _appears(sign: Path) -> bool:
    """Whether a file exists, or does so soon: file servers show a new file to other machines some seconds later."""
    deadline = time.monotonic() + _VISIBLE_S
    while not sign.exists():
        if time.monotonic() > deadline:
            return False
        os.listdir(sign.parent)  # makes NFS read the folder again
        time.sleep(_POLL_S)
    return True
