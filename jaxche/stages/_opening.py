"""Finds the store behind a URL, and tries whether a run can live in it, before anything depends on it."""

from __future__ import annotations

import contextlib
import importlib
import os
import uuid
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from jaxche.stages._objects import Objects, first_line

_PROBE = b"jaxche was here"
# A store in memory lives as long as its process, so that wires opened one after the other find the same objects.
_memories: dict[str, Any] = {}


def open_objects(url: str, run: str, options: Mapping[str, Any]) -> Objects:
    """The objects of a run at a URL, after a trial that they can be written, read and taken away.

    Args:
      url: a folder, or the URL of a bucket or of a folder.
      run: name of the run, the first part of every key.
      options: what obstore takes for this kind of URL, such as credentials.

    Raises:
      ImportError: obstore is not installed.
      ValueError: the URL or an option is not known.
      ConnectionError: the store cannot be used; says what was tried.
    """
    trial = {"retry_config": {"max_retries": 1, "retry_timeout": timedelta(seconds=10)}}
    _probe(_open(url, {**trial, **options}), url, run)
    return Objects(_open(url, options), url, run)


def _open(url: str, options: Mapping[str, Any]) -> Any:
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
            return _memories.setdefault(url, obstore.store.MemoryStore())
        if scheme == "file":
            return obstore.store.LocalStore.from_url(url, mkdir=True)
        return obstore.store.from_url(url, **options)
    except OSError as error:
        raise ConnectionError(f"DataStore cannot use {url}: making the folder failed: {error}") from error
    except (BaseError, ValueError, TypeError) as error:
        raise ValueError(
            f"url={url!r} with these options names no store ({first_line(error)}): write a folder, "
            '"s3://bucket/path", "gs://bucket/path" or "memory://name"'
        ) from error


def _probe(store: Any, url: str, run: str) -> None:
    """Refuse a store that cannot be written, read or emptied, or that overwrites what it should only create."""
    from obstore.exceptions import AlreadyExistsError, BaseError

    key, tried = f"{run}/probe-{uuid.uuid4().hex}", "writing"
    try:
        store.put(key, _PROBE, mode="create", use_multipart=False)
        tried = "reading"
        read = bytes(store.get(key).bytes())
        tried = "writing once more"
        with contextlib.suppress(AlreadyExistsError):
            store.put(key, _PROBE, mode="create", use_multipart=False)
            raise BaseError("it does not honour conditional writes, so two writers would not notice each other")
        tried = "deleting"
        store.delete(key)
        if read != _PROBE:
            raise BaseError(f"read {read!r} where {_PROBE!r} was written")
    except (BaseError, OSError, ValueError, NotImplementedError) as error:
        raise ConnectionError(
            f"DataStore cannot use {url}: {tried} {key} failed: {first_line(error)}. Check that it exists and may be "
            "written; credentials come from the environment, or as options={...}"
        ) from error
