"""A lock on a folder: one run at a time writes there."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import time
from pathlib import Path

_log = logging.getLogger("jaxche")

# A run that ends may still write its last checkpoint, and file servers keep the lock of a lost machine for a while.
_WAIT_S, _POLL_S = 60.0, 0.5
_IS_LOCKED = (errno.EACCES, errno.EAGAIN)


class FolderLock:
    """A lock of this process on a folder, which ends with the process.

    It is a POSIX record lock: unlike that of ``flock``, it is not inherited by processes that this one forks, and file
    servers know it. Where there are none, nothing is locked. Two runs of one process do not exclude each other.
    """

    def __init__(self, folder: Path):
        self._folder, self._file = folder, folder / ".lock"
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Lock the folder, or wait until its lock is released; ValueError if that takes too long."""
        if self.try_acquire():
            return
        holder = self._holder()
        text = "checkpoints=%r is in use by %s; waiting up to %.0f s for its end"
        _log.warning(text, str(self._folder), holder, _WAIT_S)
        for _ in range(int(_WAIT_S / _POLL_S)):
            time.sleep(_POLL_S)
            if self.try_acquire():
                return
        raise ValueError(
            f"checkpoints={str(self._folder)!r} is in use by {holder}, which trains and saves there; end that run, or "
            "give this one a folder of its own, e.g. checkpoints='runs/second'"
        )

    def try_acquire(self) -> bool:
        """Whether no other process had the lock; this process has it then, if the file system has locks."""
        if self._descriptor is not None:
            return True
        try:
            import fcntl

            descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o666)
        except (ImportError, OSError):  # of a system without these locks, or a full disk
            return True
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            return error.errno not in _IS_LOCKED
        if not self._is_file(descriptor):  # the run before has removed it meanwhile
            os.close(descriptor)
            return self.try_acquire()
        self._descriptor = descriptor
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        return True

    def _is_file(self, descriptor: int) -> bool:
        """Whether the name of the file is still that of the open one."""
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self._file))
        except FileNotFoundError:
            return False

    def _holder(self) -> str:
        """The process that has the lock."""
        text = ""
        with contextlib.suppress(OSError):
            text = self._file.read_text()
        return text or "another process"

    def release(self) -> None:
        """Release the lock, if this process has it."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):  # the run has ended, whatever happens to this file
                self._file.unlink()
            os.close(self._descriptor)
            self._descriptor = None
