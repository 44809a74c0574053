"""Objects of one run in a folder or a bucket: written once and whole, waited for, taken away."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxche.stages._folder import Folder

# A reader is late by at most a twentieth of the time it has waited.
_FIRST_WAIT_S, _LONGEST_WAIT_S, _WAIT_GROWTH = 0.00005, 0.1, 1.05
# One request carries what is smaller; S3 takes no more than 5 GiB in one.
_MULTIPART_BYTES = 64 * 1024 * 1024


def first_line(error: BaseException) -> str:
    """What went wrong, without the dump of nested Rust errors that follows it."""
    return str(error).strip().split("\n")[0] or type(error).__name__


def _is_folder(store: Any) -> bool:
    import obstore.store

    return isinstance(store, obstore.store.LocalStore)


class Objects:
    """Objects of one run.

    Args:
      store: an obstore store.
      where: its URL, for errors.
      run: name of the run, put before every key.
    """

    def __init__(self, store: Any, where: str, run: str):
        self._store, self._where, self._run = store, where, run
        self._folder = Folder(store.prefix / run) if _is_folder(store) else None

    def __str__(self) -> str:
        return f"{self._where} (run {self._run})"

    @property
    def is_near(self) -> bool:
        """Whether an object is written by system calls of this machine, and not by requests to another."""
        return self._folder is not None

    def within(self, folder: str) -> Objects:
        """The objects of a folder of these."""
        return Objects(self._store, self._where, f"{self._run}/{folder}")

    def folders(self) -> list[str]:
        """Names of the folders that hold objects."""
        with self._named("listing", self._run):
            found = self._store.list_with_delimiter(self._run)["common_prefixes"]
        return sorted(path.rpartition("/")[2] for path in found)

    def remove(self, folder: str) -> None:
        """Take a folder away with all that is in it, also what was half written."""
        if self._folder is not None:
            self._folder.remove(folder)
        else:
            self.delete(self.names(folder))

    def create(self, key: str, buffers: Sequence[Any]) -> None:
        """Write an object that is not there, whole or not at all; one that is there with equal bytes is left alone.

        Args:
          key: its name.
          buffers: its bytes, one buffer after the other. Equal first buffers must mean equal objects.

        Raises:
          ValueError: there is an object of this name with other content.
        """
        from obstore.exceptions import AlreadyExistsError

        path, head = self._path(key), bytes(buffers[0])
        with self._named("writing", key):
            try:
                if self._folder is not None:
                    self._folder.create(key, buffers)
                else:
                    self._store.put(path, buffers, mode="create", use_multipart=False)
                return
            except (AlreadyExistsError, FileExistsError):
                pass
            try:
                found = bytes(self._store.get_range(path, start=0, end=len(head)))
            except FileNotFoundError:
                return  # its reader has it, and took it away between the two requests
        if found != head:
            raise ValueError(
                f"{key} in {self} was written before with other content: two writers use one run, or a run of this "
                "name ended early, or a stage started again does not compute the same twice. Use another "
                'DataStore(run="..."), or delete the old run'
            )

    def agree(self, key: str, text: str) -> None:
        """Write down what all processes of a run must have alike, or compare with what is written.

        Raises:
          ValueError: another process, or this run before, has another text; shows both.
        """
        from obstore.exceptions import AlreadyExistsError

        with self._named("writing", key):
            try:
                self._store.put(self._path(key), text.encode(), mode="create", use_multipart=False)
                return
            except AlreadyExistsError:
                pass
        found = self.read(key, 1000)
        there = bytes(found[0]).decode(errors="replace") if found else text
        if there != text:
            raise ValueError(
                f"{self} was begun with {there}, this process has {text}: start all its processes alike, or begin "
                'another DataStore(run="...")'
            )

    def replace(self, key: str, buffers: Sequence[Any]) -> None:
        """Write an object whole or not at all, in the place of any that is there."""
        large = sum(len(part) for part in buffers) > _MULTIPART_BYTES
        with self._named("writing", key):
            self._store.put(self._path(key), buffers, use_multipart=large, chunk_size=_MULTIPART_BYTES)

    def read(self, key: str, limit: int) -> tuple[Any, int] | None:
        """The bytes of an object, or the first ``limit`` of them where it is longer, and its size.

        Returns:
          A buffer and the object's size, or None where there is no such object.
        """
        with self._named("reading", key), contextlib.suppress(FileNotFoundError):
            if self._folder is not None:
                return self._folder.read(key, limit)
            found = self._store.get(self._path(key))
            size = found.meta["size"]
            if size <= limit:
                return found.bytes(), size
            return self._store.get_range(self._path(key), start=0, end=limit), size
        return None

    def wait(self, key: str, limit: int, timeout_s: float, pause: Callable[[float], None]) -> tuple[Any, int]:
        """As :meth:`read`, once the object is there.

        Args:
          key: its name.
          limit: the most bytes to read.
          timeout_s: seconds to wait.
          pause: called with the seconds to sleep between two looks; may raise to end the wait.

        Raises:
          TimeoutError: it did not come in time.
        """
        deadline, wait_s = time.monotonic() + timeout_s, _FIRST_WAIT_S
        while (found := self.read(key, limit)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(key)
            pause(wait_s)
            wait_s = min(wait_s * _WAIT_GROWTH, _LONGEST_WAIT_S)
        return found

    def delete(self, keys: Iterable[str]) -> None:
        """Take objects away; those that are gone already are no error."""
        keys = list(keys)
        if not keys:
            return
        with self._named("deleting", self._path(keys[0])):
            if self._folder is not None:
                self._folder.delete(keys)
                return
            paths = [self._path(key) for key in keys]
            try:
                self._store.delete(paths)
            except FileNotFoundError:
                # Google's store minds, and obstore leaves it at that.
                for path in paths:
                    with contextlib.suppress(FileNotFoundError):
                        self._store.delete(path)

    def names(self, folder: str) -> list[str]:
        """Keys of the objects in a folder of the run, in order."""
        with self._named("listing", folder):
            found = [entry["path"] for chunk in self._store.list(self._path(folder)) for entry in chunk]
        # NFS keeps a file that is deleted while it is mapped under a hidden name.
        return sorted(path[len(self._run) + 1 :] for path in found if not path.rpartition("/")[2].startswith("."))

    def remove_torn(self, mine: Callable[[str], bool]) -> None:
        """Delete what processes that were killed had half written.

        Only a folder has such files.

        Args:
          mine: whether nobody but the caller writes an object of this name.
        """
        if self._folder is not None:
            self._folder.remove_torn(mine)

    def _path(self, key: str) -> str:
        return f"{self._run}/{key}"

    @contextlib.contextmanager
    def _named(self, doing: str, key: str):
        """Say in an error of the store what was tried, and where."""
        from obstore.exceptions import BaseError

        try:
            yield
        except FileNotFoundError:
            raise
        except (BaseError, OSError) as error:
            raise ConnectionError(f"{doing} {key} in {self} failed: {first_line(error)}") from error
