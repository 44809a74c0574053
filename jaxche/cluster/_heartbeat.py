"""Whether a run still moves, as told by files that its processes touch after every round."""

from __future__ import annotations

import os
import time
from pathlib import Path


class Heartbeats:
    """Watches one file a rank. The run lives as long as any of them is touched now and then.

    One rank that hangs holds up the others at the next merge, and a run that has learnt to go on without it is not
    to be ended: so it is the silence of all that counts. In an elastic run those that wait touch their files too, and
    who is silent alone hangs.

    Args:
      paths: one file a rank; they need not be there yet.
      timeout_s: how long a silence of all means a hang. It counts from now, so it has to cover the start and
        compilation.
      alone_s: how long a rank that was heard of may be silent while another is heard of. None: for ever.
    """

    def __init__(self, paths: list[Path], timeout_s: float, alone_s: float | None = None) -> None:
        self._paths, self._timeout_s, self._alone_s = paths, timeout_s, alone_s
        self._seen = [self._mark(path) for path in paths]
        self._start = time.monotonic()
        self._changed: list[float | None] = [None] * len(paths)

    def silence(self) -> str | None:
        """None while the run moves; else which rank was heard of when."""
        now = self._listen()
        if now - max((changed for changed in self._changed if changed is not None), default=self._start) < (
            self._timeout_s
        ):
            return None
        return ", ".join(
            f"rank {rank} " + ("never" if changed is None else f"{now - changed:.0f} s ago")
            for rank, changed in enumerate(self._changed)
        )

    def hung(self, run_over: bool = False) -> list[int]:
        """The ranks that are silent alone; once the run is over, all that are."""
        now = self._listen()
        heard = {rank: changed for rank, changed in enumerate(self._changed) if changed is not None}
        if self._alone_s is None or not heard:
            return []
        newest = now if run_over else max(heard.values())
        return [rank for rank, changed in heard.items() if newest - changed > self._alone_s]

    def forget(self, rank: int) -> None:
        """Another process starts in the place of this rank."""
        self._changed[rank] = None

    def _listen(self) -> float:
        # The clock of this process alone: file systems and wall clocks jump.
        now = time.monotonic()
        for rank, path in enumerate(self._paths):
            mark = self._mark(path)
            if mark != self._seen[rank]:
                self._seen[rank], self._changed[rank] = mark, now
        return now

    @staticmethod
    def _mark(path: Path) -> tuple[int, int] | None:
        try:
            status = os.stat(path)
        except OSError:
            return None
        return status.st_mtime_ns, status.st_ino
