"""A folder that all processes of a run can write, and that is the same one for all."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import jax

from jaxche.distributed._group import gather_json, members, raise_everywhere

# Between a file's making and its being seen on other machines, and from one look to the next.
_VISIBLE_S, _LOOK_S = 10.0, 0.2
_WHAT = "the preparation of checkpoints"


def shared_folder(path: str | os.PathLike[str]) -> Path:
    """The folder, made where it is missing. All processes of a run make this call.

    Raises:
      ValueError: it cannot be written, or other processes have another one under its name.
    """
    folder, error = Path(path).expanduser().resolve(), None
    try:
        _refuse_unwritable(folder)
    except ValueError as e:
        error = e
    raise_everywhere(error, jax.process_index(), _WHAT)
    if len(members()) > 1:
        _refuse_own(folder)
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


def _refuse_own(folder: Path) -> None:
    """Refuse a folder that only some have: processes that write there would wait for each other's files."""
    first = members()[0]
    error, sign = None, folder / f".shared-{gather_json(os.urandom(6).hex())[0]}"
    try:
        if jax.process_index() == first:
            sign.touch()
    except OSError as e:
        error = e
    gather_json(None)
    if error is None and not _appears(sign):
        error = ValueError(
            f"checkpoints={str(folder)!r} is not the folder that process {first} has under that name; give one that "
            "all machines share, as a mount of a file server"
        )
    try:
        raise_everywhere(error, jax.process_index(), _WHAT)
    finally:
        if jax.process_index() == first:
            sign.unlink(missing_ok=True)


def _appears(sign: Path) -> bool:
    """Whether a file is there, or comes soon: file servers let others see a new one some seconds later."""
    deadline = time.monotonic() + _VISIBLE_S
    while not sign.exists():
        if time.monotonic() > deadline:
            return False
        os.listdir(sign.parent)  # NFS then looks anew
        time.sleep(_LOOK_S)
    return True
