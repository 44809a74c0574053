"""The progress bar of ``fit``."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm

from jaxche.drawing import per_rank
from jaxche.reports import RoundInfo
from jaxche.training._rounds import Rounds


class Progress:
    """A bar on a terminal, else a line every ten seconds; on the leader of the group only."""

    def __init__(self, trainer: Rounds, total: int | None, enabled: bool):
        self._world_size = trainer.world_size
        enabled = enabled and trainer._group.is_leader
        terminal = enabled and sys.stderr.isatty()
        self._bar = tqdm(total=total, unit="batch", disable=not terminal, dynamic_ncols=True)
        self._lines = enabled and not terminal
        self._done, self._total, self._start = 0, total, time.perf_counter()
        self._last_line = self._start

    def update(self, info: RoundInfo, is_due: bool | None = None, is_last: bool = False) -> None:
        """Show a round; ``is_due`` is whether a line is due, None for every ten seconds."""
        self._done += info.batches
        text = f"round {info.round} epoch {info.epoch} loss {info.loss:.4f}"
        if self._world_size > 1:
            text += f" counts {per_rank(info.counts)} efficiency {info.efficiency:.0%}"
        text += "".join(f" validation {name} {value:.4g}" for name, value in info.validation.items())
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(info.batches)
        now = time.perf_counter()
        due = now - self._last_line > 10 if is_due is None else is_due
        if self._lines and (due or is_last or info.validation):
            self._last_line = now
            done = f"{self._done} batches"
            if self._total is not None:
                left = (now - self._start) / self._done * (self._total - self._done)
                done = f"{self._done}/{self._total} batches, {left:.0f} s left"
            self.write(f"{text} ({done})")

    def write(self, text: str) -> None:
        if self._lines or not self._bar.disable:
            tqdm.write(text, file=sys.stderr)

    def close(self) -> None:
        self._bar.close()
