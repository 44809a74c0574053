"""The record of a run that is saved: a line for each round, beside the checkpoints."""

from __future__ import annotations

from pathlib import Path

from jaxche.distributed import Group
from jaxche.reports import History, RoundInfo, read_record, warn_of_damage


class Record:
    """Written by process 0, read by all.

    Args:
      group: the processes of the run.
      folder: of the checkpoints.
    """

    def __init__(self, group: Group, folder: Path):
        self._group = group
        self._file = folder / "history.jsonl"

    def add(self, info: RoundInfo) -> None:
        """Write the line of a round."""
        if self._group.process_index == 0:
            with self._file.open("a", encoding="utf8") as file:
                file.write(History([info]).to_json())

    def cut(self, rounds: int) -> History:
        """Keep the first so many rounds, and read them; what came after them is done again.

        Lines that cannot be read cost their rounds in the record, and nothing else. All processes make this call.
        """
        data = self._file.read_bytes() if self._file.exists() else b""
        record, kept = read_record(data), History()
        for info in record.rounds:
            # The first round need not be number 0.
            if (kept[-1].round if kept else -1) < info.round < rounds:
                kept.append(info)
        self._group.barrier()  # all have read it
        if self._group.process_index == 0:
            warn_of_damage(str(self._file), record)
            if (text := kept.to_json().encode()) != data:
                part = self._file.with_suffix(".part")
                part.write_bytes(text)
                part.replace(self._file)
        return kept
