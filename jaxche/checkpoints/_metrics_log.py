"""The record of a run on file: a line for each round, beside the checkpoints, also while the disk is full."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

from jaxche.checkpoints._system_errors import no_space
from jaxche.distributed import Group
from jaxche.reports import History, RoundInfo, read_record, warn_of_damage

_log = logging.getLogger("jaxche")


class MetricsLog:
    """The rounds of a run as JSON lines beside its checkpoints, written by the leader and read by all."""

    def __init__(self, group: Group, folder: Path):
        self._group = group
        self._file = folder / "history.jsonl"
        self._unwritten = b""
        if self._file.is_dir():
            raise ValueError(f"{self._file} is a folder, and not the record of a run; give another folder")

    def append(self, info: RoundInfo) -> None:
        """Write the line of a round; while the disk is full it is kept, and written with a later one."""
        if self._group.is_leader:
            was_full = bool(self._unwritten)
            self._unwritten += History([info]).to_json().encode()
            self.flush(warns=not was_full)

    def flush(self, warns: bool = True) -> None:
        """Write the lines that are not on file yet."""
        if not self._unwritten:
            return
        size = self._file.stat().st_size if self._file.exists() else 0
        try:
            with self._file.open("ab") as file:
                file.write(self._unwritten)
        except OSError as error:
            if not (reason := no_space(error)):
                raise
            with contextlib.suppress(OSError):
                os.truncate(self._file, size)
            if warns:
                lines = self._unwritten.count(b"\n")
                _log.warning("%s: %s; its last %d rounds are not on file yet", self._file, reason, lines)
            return
        self._unwritten = b""

    def truncate(self, rounds: int) -> History:
        """Keep and return the rounds before this number, because later ones are repeated; all processes call it."""
        data = self._file.read_bytes() if self._file.exists() else b""
        record, kept = read_record(data), History()
        for info in record.rounds:
            # The first round need not be number 0.
            if (kept[-1].round if kept else -1) < info.round < rounds:
                kept.append(info)
        self._group.barrier()  # all have read the file
        if self._group.is_leader:
            warn_of_damage(str(self._file), record)
            self._unwritten = b""
            if (text := kept.to_json().encode()) != data and data.startswith(text):
                os.truncate(self._file, len(text))  # needs no space on the disk
            elif text != data:
                part = self._file.with_suffix(".part")
                part.write_bytes(text)
                part.replace(self._file)
        return kept
