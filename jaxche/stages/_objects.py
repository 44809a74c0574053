"""Objects of a run in a folder, a bucket or memory: written once and whole, polled for, deleted.

Buckets are accessed with obstore, folders with system calls. obstore makes the same calls in threads, which takes
longer than a small file, and reads in pieces that it joins, which takes several times as long for a large file.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import logging
import mmap
import os
import secrets
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from jaxche.distributed import aligned
from jaxche.stages._buffers import write_all

_log = logging.getLogger("jaxche")

# Polling delays a reader by at most a twentieth of the time that it has waited.
_FIRST_WAIT_S, _MAX_WAIT_S, _WAIT_GROWTH = 0.00005, 0.1, 1.05
# A longer wait is logged.
_LATE_S = 30.0
# Smaller objects are written in one request; S3 takes no more than 5 GiB in one.
_MULTIPART_BYTES = 64 * 1024 * 1024
# Reading smaller files is as fast as mapping them.
_MAPPED_BYTES = 1 << 20
# Each mapped file is an open file, of which a process may have some hundreds.
_MAX_MAPPED = 64
_MEMORY_LOCK = threading.Lock()


def open_objects(url: str, run: str, options: Mapping[str, Any]) -> Objects:
    """The objects of a run at a URL, after a test of the store, to which ``options`` go."""
    probe(url, options, f"{run}/probe")
    store = open_store(url, options)
    import obstore.store

    return (Folder if isinstance(store, obstore.store.LocalStore) else Objects)(store, url, run)


def polls(
    timeout_s: float, pause: Callable[[float], None], first_s: float, most_s: float, growth: float
) -> Iterator[bool]:
    """Yield for each attempt until the time is over, with growing pauses; true once, if the wait is to be logged."""
    began, wait_s, is_logged = time.monotonic(), first_s, False
    while (waited_s := time.monotonic() - began) <= timeout_s:
        yield waited_s > _LATE_S and not is_logged
        is_logged = waited_s > _LATE_S
        pause(wait_s)
        wait_s = min(wait_s * growth, most_s)
    yield False


class Objects:
    """The objects of one run in an obstore store. Keys begin with ``run``; ``where`` is the URL in errors."""

    is_local = False  # whether objects are written by system calls and not by requests to a server

    def __init__(self, store: Any, where: str, run: str):
        self._store, self._where, self._run = store, where, run

    def __str__(self) -> str:
        return f"{self._where} (run {self._run})"

    def within(self, folder: str) -> Objects:
        """The objects in a folder of these."""
        return type(self)(self._store, self._where, f"{self._run}/{folder}")

    def folders(self) -> list[str]:
        """Names of the folders that hold objects."""
        with self._named("listing", self._run):
            found = self._store.list_with_delimiter(self._run)["common_prefixes"]
        return sorted(path.rpartition("/")[2] for path in found)

    def remove(self, folder: str) -> None:
        """Delete a folder with all objects in it, including partially written files."""
        self.delete(self.names(folder))

    def create(self, key: str, buffers: Sequence[Any]) -> None:
        """Write a new object atomically, unless it exists with an equal first buffer, which implies equal content."""
        head = bytes(buffers[0])
        if self._create(key, buffers, len(head)) not in (None, head):
            raise ValueError(
                f"{key} in {self} was written before with other content: two writers use one run, or a run of this "
                "name ended early, or a stage started again does not compute the same twice. Use another "
                'DataStore(run="..."), or delete the old run'
            )

    def agree(self, key: str, text: str) -> None:
        """Write what all processes must have equal, or raise ValueError if it differs from what is written."""
        there = self._create(key, [text.encode()], max(1000, len(text.encode()) + 1))
        if there not in (None, text.encode()):
            raise ValueError(
                f"{self} was begun with {there.decode(errors='replace')}, this process has {text}: start all its "
                'processes alike, or begin another DataStore(run="..."), in jaxche train another --store'
            )

    def _create(self, key: str, buffers: Sequence[Any], limit: int) -> bytes | None:
        """Write a new object atomically. If it exists, return its bytes, at most the first ``limit``."""
        with self._named("writing", key), contextlib.suppress(FileExistsError):
            self._write(key, buffers)
            return None
        found = self.read(key, limit)
        return bytes(found[0]) if found else None  # its reader may have deleted it between the two requests

    def replace(self, key: str, buffers: Sequence[Any]) -> None:
        """Write an object atomically, also over an existing one."""
        large = sum(len(part) for part in buffers) > _MULTIPART_BYTES
        with self._named("writing", key):
            self._store.put(self._path(key), buffers, use_multipart=large, chunk_size=_MULTIPART_BYTES)

    def read(self, key: str, limit: int) -> tuple[Any, int] | None:
        """The bytes of an object, at most the first ``limit``, and its size; None if there is no such object."""
        with self._named("reading", key), contextlib.suppress(FileNotFoundError):
            return self._read(key, limit)
        return None

    def wait(self, key: str, limit: int, timeout_s: float, pause: Callable[[float], None]) -> tuple[Any, int]:
        """:meth:`read`, once the object exists. ``pause`` sleeps between two polls, and may raise to end the wait."""
        for waits_long in polls(timeout_s, pause, _FIRST_WAIT_S, _MAX_WAIT_S, _WAIT_GROWTH):
            if (found := self.read(key, limit)) is not None:
                return found
            if waits_long:
                _log.warning("still waiting for %s in %s, for up to %g s", key, self, timeout_s)
        raise TimeoutError(key)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; missing ones are no error."""
        keys = list(keys)
        if keys:
            with self._named("deleting", self._path(keys[0])):
                self._delete(keys)

    def names(self, folder: str) -> list[str]:
        """Keys of the objects in a folder of the run, in order."""
        with self._named("listing", folder):
            found = [entry["path"] for chunk in self._store.list(self._path(folder)) for entry in chunk]
        # NFS keeps a deleted file that is still mapped, under a hidden name.
        return sorted(path[len(self._run) + 1 :] for path in found if not path.rpartition("/")[2].startswith("."))

    def remove_partial(self, is_mine: Callable[[str], bool]) -> None:
        """Delete what killed processes left partially written, of keys that only the caller writes."""

    def _write(self, key: str, buffers: Sequence[Any]) -> None:
        """Write a new object atomically; raises FileExistsError if it exists."""
        from obstore.exceptions import AlreadyExistsError

        try:
            self._store.put(self._path(key), buffers, mode="create", use_multipart=False)
        except AlreadyExistsError as error:
            raise FileExistsError(key) from error

    def _read(self, key: str, limit: int) -> tuple[Any, int]:
        """The bytes of an object, at most the first ``limit``, and its size; FileNotFoundError if there is none."""
        found = self._store.get(self._path(key))
        size = found.meta["size"]
        if size <= limit:
            return found.bytes(), size
        return self._store.get_range(self._path(key), start=0, end=limit), size

    def _delete(self, keys: Sequence[str]) -> None:
        paths = [self._path(key) for key in keys]
        try:
            self._store.delete(paths)
        except FileNotFoundError:
            # Google's store raises for a missing object, and obstore then skips the rest.
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    self._store.delete(path)

    def _path(self, key: str) -> str:
        return f"{self._run}/{key}"

    @contextlib.contextmanager
    def _named(self, doing: str, key: str):
        """Turn errors of the store into a ConnectionError that says what failed and where."""
        from obstore.exceptions import BaseError

        try:
            yield
        except (BaseError, OSError) as error:
            raise ConnectionError(f"{doing} {key} in {self} failed: {_first_line(error)}") from error


class Folder(Objects):
    """The objects of one run in a folder, written, read and deleted by system calls."""

    # A partially written file has the name that obstore gives it, key#1, which no listing shows. A complete file never
    # changes. Large files are mapped: their arrays are the pages of the file, and stay valid after it is deleted.

    is_local = True

    def __init__(self, store: Any, where: str, run: str):
        super().__init__(store, where, run)
        self._folder = os.fspath(store.prefix / run)
        self._mapped: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()

    def remove(self, folder: str) -> None:
        shutil.rmtree(f"{self._folder}/{folder}", ignore_errors=True)

    def remove_partial(self, is_mine: Callable[[str], bool]) -> None:
        folder = Path(self._folder)
        for path in folder.rglob("*#*"):
            key, _, number = path.relative_to(folder).as_posix().rpartition("#")
            if number.isdecimal() and is_mine(key):
                path.unlink(missing_ok=True)

    def _write(self, key: str, buffers: Sequence[Any]) -> None:
        path = f"{self._folder}/{key}"
        # A random number, because other machines or killed processes may write the same key.
        partial = f"{path}#{secrets.randbits(64)}"
        try:
            try:
                _write_file(partial, buffers)
            except FileNotFoundError:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                _write_file(partial, buffers)
            os.link(partial, path)  # atomic, and fails if the file exists
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(partial)

    def _read(self, key: str, limit: int) -> tuple[Any, int]:
        with open(f"{self._folder}/{key}", "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            length = min(size, limit)
            if length >= _MAPPED_BYTES and len(self._mapped) < _MAX_MAPPED:
                with contextlib.suppress(OSError):  # a file system without mmap
                    # Copy-on-write, because a program may be given the arrays as donated buffers.
                    mapped = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY)
                    self._mapped.add(mapped)
                    return memoryview(mapped).toreadonly(), size
            data, done = aligned(length).data, 0
            while count := file.readinto(data[done:]):
                done += count
            return data[:done].toreadonly(), size

    def _delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{self._folder}/{key}")
        if self._mapped:
            # JAX releases borrowed buffers in a garbage collection, or else in the next step, where unmapping large
            # files would delay the stages.
            gc.collect(0)


def _write_file(path: str, buffers: Sequence[Any]) -> None:
    with open(path, "xb", buffering=0) as file:
        write_all(functools.partial(os.writev, file.fileno()), buffers)


def _first_line(error: BaseException) -> str:
    """The message of an error without the dump of nested Rust errors that follows it."""
    return str(error).strip().split("\n")[0] or type(error).__name__


@functools.cache
def _memory_store(url: str) -> Any:
    """The store of a ``memory://`` URL, one in the process, so that successive wires find the same objects."""
    import obstore.store

    return obstore.store.MemoryStore()


def open_store(url: str, options: Mapping[str, Any]) -> Any:
    """The obstore store of a URL; ImportError without the packages that stages need for it."""
    try:
        import obstore.store
        from obstore.exceptions import BaseError

        importlib.import_module("xxhash")  # for checksums; if it is missing, fail now and not in the first step
    except ImportError as error:
        raise ImportError('DataStore needs obstore and xxhash: pip install "jaxche[store]"') from error
    try:
        if "://" not in url:
            return obstore.store.LocalStore(os.path.abspath(os.path.expanduser(url)), mkdir=True)
        scheme = url.split("://")[0]
        if scheme == "memory":
            with _MEMORY_LOCK:  # concurrent calls of a cached function may compute it twice
                return _memory_store(url)
        if scheme == "file":
            return obstore.store.LocalStore.from_url(url, mkdir=True)
        return obstore.store.from_url(url, **options)
    except OSError as error:
        raise ConnectionError(f"DataStore cannot use {url}: making the folder failed: {error}") from error
    except (BaseError, ValueError, TypeError) as error:
        raise ValueError(
            f"url={url!r} with these options names no store ({_first_line(error)}): write a folder, "
            '"s3://bucket/path", "gs://bucket/path" or "memory://name"'
        ) from error


def probe(url: str, options: Mapping[str, Any], name: str, sizes: Sequence[int] = (16,)) -> list[tuple[float, float]]:
    """Write, read and delete an object of each size; returns the seconds that writing and reading took."""
    from obstore.exceptions import AlreadyExistsError, BaseError

    # A request that fails is sent once more.
    store = open_store(url, {"retry_config": {"max_retries": 1, "retry_timeout": timedelta(seconds=10)}, **options})
    key, tried, times = f"{name}-{secrets.token_hex(16)}", "", []
    try:
        for size in sizes:
            tried, data, start = "writing", secrets.token_bytes(size), time.perf_counter()
            store.put(key, data, mode="create", use_multipart=False)
            tried, written = "reading", time.perf_counter()
            read = bytes(store.get(key).bytes())
            times.append((written - start, time.perf_counter() - written))
            if read != data:
                raise BaseError("other bytes came back")
            tried = "writing once more"
            with contextlib.suppress(AlreadyExistsError):
                store.put(key, b"", mode="create", use_multipart=False)
                raise BaseError(
                    "it ignores conditional writes, so two writers would not notice each other; S3 and GCS have them"
                )
            tried = "deleting"
            store.delete(key)
    except (BaseError, OSError, ValueError, NotImplementedError) as error:  # the last: no conditional writes
        if tried not in ("writing", "deleting"):
            with contextlib.suppress(BaseError, OSError):
                store.delete(key)
        raise ConnectionError(
            f"DataStore cannot use {url}: {tried} {key} failed: {_first_line(error)}. Check that it exists and may be "
            "written; credentials come from the environment, or as options={...}"
        ) from error
    return times
