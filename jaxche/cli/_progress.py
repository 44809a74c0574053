"""A callback of `jaxche train`: prints rounds and evaluations, and writes each round to the history file."""

from __future__ import annotations

import time
from pathlib import Path

import jax

from jaxche.checkpoints import MetricsLog
from jaxche.cli._result import MAX_RANKS, metric_text, metric_title, percent
from jaxche.cli._tasks import Task
from jaxche.distributed import process_group
from jaxche.messages import per_rank
from jaxche.reports import History, RoundInfo
from jaxche.training import Trainer, TrainerState

# Seconds between two printed rounds. A round of `sync` is one batch, so fewer of them are printed.
_SYNC_GAP_S, _GAP_S = 1.0, 0.1


def print_once(text: str) -> None:
    """Print a line on process 0."""
    if jax.process_index() == 0:
        print(text, flush=True)


def round_header(world_size: int) -> str:
    """The header of :func:`round_line`."""
    merged = f"  {'wait ms':>15}  {'sync ms':>7}  {'efficiency':>10}" if world_size > 1 else ""
    return f"{'round':>6}  {'epoch':>5}  {'batches':>15}  {'loss':>7}{merged}"


def round_line(info: RoundInfo) -> str:
    """One round as a line."""
    line = f"{info.round:6d}  {info.epoch + 1:5d}  {per_rank(info.counts, most=MAX_RANKS):>15}  {info.loss:7.4f}"
    if len(info.counts) == 1:
        return line
    return f"{line}  {per_rank(info.wait_ms, most=MAX_RANKS):>15}  {info.sync_ms:7.1f}  {percent(info.efficiency):>10}"


class Progress:
    """Callback of ``trainer.fit``: process 0 prints, and writes ``history.jsonl``, which `jaxche report` can read."""

    def __init__(self, trainer: Trainer, task: Task, epochs: int, folder: Path):
        self._task, self._epochs = task, epochs
        self._gap_s = _SYNC_GAP_S if trainer.policy == "sync" and trainer.world_size > 1 else _GAP_S
        if jax.process_index() == 0:
            folder.mkdir(parents=True, exist_ok=True)
        # The rounds on file; those of an earlier start are read before the first one of this start.
        self._log, self._history = MetricsLog(process_group(), folder), History()
        self._last_print = float("-inf")

    def __call__(self, state: TrainerState, info: RoundInfo) -> None:
        if not self._history or info.round <= self._history[-1].round:  # a run that resumes repeats its last rounds
            self._history = self._log.truncate(info.round)
        self._history.append(info)
        self._log.append(info)
        if jax.process_index() != 0:
            return
        now = time.perf_counter()
        if now - self._last_print >= self._gap_s:
            self._last_print = now
            print_once(round_line(info))
        if info.validation:
            metric = self._task.metric
            shown = f"{metric_title(metric)} {metric_text(metric, info.validation[metric])}"
            print_once(f"epoch {info.epoch + 1} of {self._epochs}: {shown} after {self._history.seconds:.1f} s")
