"""Heartbeats of ranks: files that they touch after every round."""

from __future__ import annotations

import os
import time
from pathlib import Path


class Heartbeats:
    """Watches the heartbeat file of each rank.

    A rank that hangs stops the others at the next merge, so ``timeout_s`` applies to the last heartbeat of any rank. In
    an elastic run waiting ranks touch their files too, so ``rank_timeout_s`` applies to each rank.
    """

    def __init__(self, paths: list[Path], timeout_s: float, rank_timeout_s: float | None = None) -> None:
        self._paths, self._timeout_s, self._rank_timeout_s = paths, timeout_s, rank_timeout_s
        self._seen = [self._mark(path) for path in paths]
        self._start = time.monotonic()
        self._changed: list[float | None] = [None] * len(paths)

    def hang_report(self) -> str | None:
        """The age of each rank's last heartbeat, if all are older than the timeout; else None."""
        now = self._poll()
        newest = max((changed for changed in self._changed if changed is not None), default=self._start)
        if now - newest < self._timeout_s:
            return None
        return ", ".join(
            f"rank {rank} " + ("never" if changed is None else f"{now - changed:.0f} s ago")
            for rank, changed in enumerate(self._changed)
        )

    def hung(self, run_over: bool = False) -> list[int]:
        """Ranks without a recent heartbeat while others have one; after the end of the run all such ranks."""
        now = self._poll()
        beating = {rank: changed for rank, changed in enumerate(self._changed) if changed is not None}
        if self._rank_timeout_s is None or not beating:
            return []
        newest = now if run_over else max(beating.values())
        return [rank for rank, changed in beating.items() if newest - changed > self._rank_timeout_s]

    def has(self, rank: int) -> bool:
        """Whether a rank has had a heartbeat since it was started."""
        self._poll()
        return self._changed[rank] is not None

    def forget(self, rank: int) -> None:
        """Reset a rank for its replacement."""
        self._changed[rank] = None

    def _poll(self) -> float:
        # The monotonic clock of this process: file systems and wall clocks jump.
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
