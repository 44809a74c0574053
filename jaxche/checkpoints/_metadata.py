"""The metadata of a checkpoint: what its writer says of it as JSON, with a checksum, and the format that it names."""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxche.checkpoints._trees import leaf_shapes
from jaxche.cluster import versions

_log = logging.getLogger("jaxche")

FORMAT = 4


class CorruptError(Exception):
    """The files of a checkpoint can be read, but have other contents than were written."""


def described(meta: Mapping[str, Any], trees: Mapping[str, Any], sums: Mapping[str, int] | None) -> dict[str, Any]:
    """Metadata with the format, the shapes of the trees, the sums of their leaves if known, and its own checksum."""
    full = {**meta, "format": FORMAT, "jaxche": versions()["jaxche"], "leaves": leaf_shapes(trees)}
    if sums is not None:
        full["checksums"] = sums
    return full | {"checksum": _checksum(full)}


def checked(meta: dict[str, Any]) -> dict[str, Any]:
    """Metadata as it was written, without its checksum; raises CorruptError if that is wrong."""
    own = {name: value for name, value in meta.items() if name != "checksum"}
    if meta.get("checksum") != _checksum(own):
        raise CorruptError("the checksum of its metadata is wrong")
    return own


def refuse_other_format(meta: Mapping[str, Any], folder: Path) -> None:
    """Raise ValueError for a checkpoint of a version of jaxche that wrote them in another way."""
    where, own, other = f"checkpoints={str(folder)!r}", versions()["jaxche"], meta["jaxche"]
    if meta["format"] != FORMAT or other.split(".")[:2] != own.split(".")[:2]:
        raise ValueError(
            f"{where} was written by jaxche {other} in format {meta['format']}, and this is {own} with format "
            f"{FORMAT}; write pip install jaxche=={other}, or give another folder"
        )
    if other != own:
        _log.warning("%s was written by jaxche %s, and this is %s", where, other, own)


def _checksum(meta: Mapping[str, Any]) -> int:
    """The checksum of metadata as JSON, without the fields that are refused by name if they are wrong."""
    value = {name: value for name, value in meta.items() if name not in ("format", "jaxche")}
    return zlib.crc32(json.dumps(json.loads(json.dumps(value)), sort_keys=True).encode())
