"""The progress bar of ``fit``."""

from __future__ import annotations

import sys
import time

import jax
from tqdm import tqdm

from jaxche.drawing import per_rank
from jaxche.reports import RoundInfo
from jaxche.training._rounds import Rounds
from jaxche.training._stream import EPOCH_SIZE


class Progress:
    """A bar on a terminal, else a line every ten seconds; on process 0 only."""

    def __init__(self, trainer: Rounds, size: int, begin: tuple[int, int], last_epoch: int, enabled: bool):
        # Of a stream the number of batches is not known.
        total = None if size == EPOCH_SIZE else (last_epoch - begin[0]) * size - begin[1]
        self._world_size = trainer.world_size
        enabled = enabled and jax.process_index() == 0
        terminal = enabled and sys.stderr.isatty()
        self._bar = tqdm(total=total, unit="batch", disable=not terminal, dynamic_ncols=True)
        self._lines = enabled and not terminal
        self._done, self._total, self._start = 0, total, time.perf_counter()
        self._last_line = self._start

    def update(self, info: RoundInfo) -> None:
        self._done += info.batches
        text = f"round {info.round} epoch {info.epoch} loss {info.loss:.4f}"
        if self._world_size > 1:
            text += f" counts {per_rank(info.counts)} efficiency {info.efficiency:.0%}"
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(info.batches)
        now = time.perf_counter()
        if self._lines and (now - self._last_line > 10 or self._done == self._total):
            self._last_line = now
            if self._total is None:
                self.write(f"{text} ({self._done} batches)")
                return
            left = (now - self._start) / self._done * (self._total - self._done)
            self.write(f"{text} ({self._done}/{self._total} batches, {left:.0f} s left)")

    def write(self, text: str) -> None:
        if self._lines or not self._bar.disable:
            tqdm.write(text, file=sys.stderr)

    def close(self) -> None:
        self._bar.close()
