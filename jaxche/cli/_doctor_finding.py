"""The result of one check of `jaxche doctor`."""

from __future__ import annotations

from typing import NamedTuple


class Finding(NamedTuple):
    """The result of one check; a problem if it has a ``fix``, the line to write."""

    name: str
    text: str
    fix: str = ""
