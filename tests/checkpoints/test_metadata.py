"""Metadata of checkpoints: its checksum is that of what JSON returns, and another format is refused by name."""

import json
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxche.checkpoints._metadata import CorruptError, checked, described, refuse_other_format

META = {"b": (1, 2), "a": {1: 0.1, "c": None}}
FOLDER = Path("runs/first")


def test_the_checksum_is_that_of_what_can_be_read_again():
    full = described(META, {"params": jnp.zeros((3, 2))}, {"params/value": 5})
    again = json.loads(json.dumps(full))
    assert checked(again)["leaves"] == {"params/value": "float32[3,2]"}
    assert checked(again)["checksums"] == {"params/value": 5}
    assert checked(again | {"format": 2})["format"] == 2  # is refused by name
    for wrong in ({"b": [1, 3]}, {"leaves": {}}, {"checksum": 0}):
        with pytest.raises(CorruptError, match="the checksum of its metadata is wrong"):
            checked(again | wrong)
    assert "checksums" not in described(META, {}, None)


def test_another_format_or_version_is_refused(caplog):
    full = described(META, {}, None)
    refuse_other_format(full, FOLDER)
    assert not caplog.records
    version = full["jaxche"]
    with pytest.raises(
        ValueError, match=rf"was written by jaxche {version} in format 1, and this is .* another folder"
    ):
        refuse_other_format(full | {"format": 1}, FOLDER)
    with pytest.raises(ValueError, match=r"was written by jaxche 99.0.0 in format .*pip install jaxche==99.0.0"):
        refuse_other_format(full | {"jaxche": "99.0.0"}, FOLDER)
    refuse_other_format(full | {"jaxche": version + ".post1"}, FOLDER)
    assert f"was written by jaxche {version}.post1, and this is {version}" in caplog.text
