"""Objects in a folder, by plain system calls: whole or not at all, and read to where their arrays are to lie.

obstore does the same calls in threads of its own, and reads in small pieces which it joins: for a small object the
way there and back takes longer than the file, for a large one reading takes several times as long.

A large file is not read but mapped: its arrays are the system's own copy of it, which lives as long as they do, also
when the file is taken away. A file is never written to again once it has its name, so they do not change.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import mmap
import os
import secrets
import shutil
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxche.stages._gather import write_all

# What begins at a multiple of it becomes an array of the CPU backend without another copy.
_ALIGNMENT = 64
# Reading smaller ones is no slower than mapping them.
_MAPPED_BYTES = 1 << 20
# Each holds an open file, of which a process may have some hundreds.
_MOST_MAPPED = 64


class Folder:
    """The files of one run.

    Half a file is called as obstore calls it, ``key#1``, ``key#2``, ..., which no listing shows.

    Args:
      path: the folder.
    """

    def __init__(self, path: Path):
        self._path = os.fspath(path)
        self._mapped: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()

    def create(self, key: str, buffers: Sequence[Any]) -> None:
        """Write a file that is not there.

        Raises:
          FileExistsError: there is one of this name.
          OSError: it cannot be written.
        """
        path = f"{self._path}/{key}"
        # A number of its own, whoever else writes the same key: another machine, or a process that was killed.
        half = f"{path}#{secrets.randbits(64)}"
        try:
            try:
                _write(half, buffers)
            except FileNotFoundError:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                _write(half, buffers)
            os.link(half, path)  # fails where there is such a file, and shows it whole where there is none
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(half)

    def read(self, key: str, limit: int) -> tuple[Any, int] | None:
        """A file's bytes, or the first ``limit`` of them, and its size; None where there is no such file."""
        with contextlib.suppress(FileNotFoundError), open(f"{self._path}/{key}", "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            length = min(size, limit)
            if length >= _MAPPED_BYTES and len(self._mapped) < _MOST_MAPPED:
                with contextlib.suppress(OSError):  # a file system that has no maps
                    # Private, so that a program which is given its arrays to write into may do so.
                    mapped = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY)
                    self._mapped.add(mapped)
                    return memoryview(mapped).toreadonly(), size
            room = np.empty(length + _ALIGNMENT, np.uint8)
            start = -room.ctypes.data % _ALIGNMENT
            data = room.data[start : start + length]
            done = 0
            while count := file.readinto(data[done:]):
                done += count
            return data[:done].toreadonly(), size
        return None

    def delete(self, keys: Sequence[str]) -> None:
        """Take files away; those that are gone already are no error."""
        for key in keys:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{self._path}/{key}")
        if self._mapped:
            # JAX gives back what was lent to it when Python looks for garbage, or else in the next step: to free the
            # pages of large files takes a while, which the stages need not wait for.
            gc.collect(0)

    def remove(self, folder: str) -> None:
        """Take a folder away with all that is in it."""
        shutil.rmtree(f"{self._path}/{folder}", ignore_errors=True)

    def remove_torn(self, mine: Callable[[str], bool]) -> None:
        """Delete halves of files whose names are the caller's alone."""
        folder = Path(self._path)
        for path in folder.rglob("*#*"):
            key, _, number = path.relative_to(folder).as_posix().rpartition("#")
            if number.isdecimal() and mine(key):
                path.unlink(missing_ok=True)


def _write(path: str, buffers: Sequence[Any]) -> None:
    with open(path, "xb", buffering=0) as file:
        write_all(functools.partial(os.writev, file.fileno()), buffers)
