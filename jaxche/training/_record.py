"""The record of a run that is saved: a line for each round, beside the checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import jax

from jaxche.training._agree import gather_json
from jaxche.training._history import History
from jaxche.training._state import RoundInfo


class Record:
    """Written by process 0, read by all.

    Args:
      folder: of the checkpoints.
    """

    def __init__(self, folder: Path):
        self._file = folder / "history.jsonl"

    def add(self, info: RoundInfo) -> None:
        """Write the line of a round."""
        if jax.process_index() == 0:
            with self._file.open("a", encoding="utf8") as file:
                file.write(History([info]).to_json())

    def cut(self, rounds: int) -> History:
        """Keep the first so many rounds, and read them; what came after them is done again.

        All processes make this call.
        """
        text = self._file.read_text(encoding="utf8") if self._file.exists() else ""
        lines, last = [], -1
        for line in text.splitlines(keepends=True):
            # A line that a dying process did not finish has no end. The first round need not be number 0.
            if line.endswith("\n") and last < (number := json.loads(line)["round"]) < rounds:
                lines, last = [*lines, line], number
        kept = "".join(lines)
        gather_json(None)  # all have read it
        if jax.process_index() == 0 and kept != text:
            part = self._file.with_suffix(".part")
            part.write_text(kept, encoding="utf8")
            part.replace(self._file)
        return History.from_json(kept)
