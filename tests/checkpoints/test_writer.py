"""Saves that leave no checkpoint: what the log says of them."""

import re

import pytest

from jaxche.checkpoints import CheckpointWriter
from jaxche.distributed import Group


@pytest.mark.parametrize(
    ("missing", "reason", "advice"),
    [
        ("", "a process ended before it had written its part", ""),
        ("File too large", "File too large", " Make space there, or keep fewer"),
    ],
)
def test_only_a_full_disk_asks_for_space(tmp_path, caplog, missing, reason, advice):
    writer = CheckpointWriter(Group(), tmp_path, keep=3)
    writer.open()
    writer.missing, writer._abandoned = missing, 4
    assert writer.discard_abandoned(4)
    writer.close(None)
    text = (
        f"checkpoint 4 is missing: {reason} in {tmp_path}. Training continues, and the next save tries again.{advice}"
    )
    assert re.search(re.escape(text) + ("" if advice else "$"), caplog.text.strip())
