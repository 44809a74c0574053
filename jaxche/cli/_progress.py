"""A callback of `jaxche train`: prints rounds, evaluates each epoch, and saves the history and the training time."""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path

import jax
from jax.experimental import multihost_utils

from jaxche.cli._result import MAX_RANKS, metric_text, metric_title, percent
from jaxche.cli._tasks import Task
from jaxche.drawing import per_rank
from jaxche.reports import History, RoundInfo
from jaxche.training import Trainer, TrainerState

_log = logging.getLogger("jaxche")

# Seconds between two printed rounds. A round of `sync` is one batch, so fewer of them are printed.
_SYNC_GAP_S, _GAP_S = 1.0, 0.1


def barrier(name: str) -> None:
    """Waits until all processes have called this."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def print_once(text: str) -> None:
    """Prints a line on process 0."""
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
    """Callback of ``trainer.fit``; rank 0 evaluates while the other ranks wait at a barrier.

    With ``resumable`` it saves the training time in ``seconds.txt`` for a later start.
    """

    def __init__(self, trainer: Trainer, task: Task, epochs: int, folder: Path, resumable: bool):
        self._trainer, self._task, self._epochs = trainer, task, epochs
        self._gap_s = _SYNC_GAP_S if trainer.policy == "sync" and trainer.world_size > 1 else _GAP_S
        self._history_path = folder / "history.jsonl"
        self._seconds_path = folder / "seconds.txt" if resumable else None
        self._epoch, self._next_round, self._last_print = 0, None, float("-inf")
        self._evaluated_round: int | None = None
        # Training time by the number of the round, without evaluation; on rank 0 also of earlier starts.
        self.seconds: dict[int, float] = {}
        if self._seconds_path and jax.process_index() == 0:
            self.seconds = _read_seconds(self._seconds_path)
        # Test metrics of the last evaluation, and of each epoch since this start, on rank 0.
        self.test: dict[str, float] = {}
        self.curve: list[dict[str, float]] = []
        barrier("start")
        self._last_time = time.perf_counter()

    def __call__(self, state: TrainerState, info: RoundInfo) -> None:
        now = time.perf_counter()
        if self._next_round is None:
            self._epoch = info.epoch
        # The time before the first round of a resumed run includes reading the checkpoint.
        resumed = self._next_round is None and info.round > 0
        self.seconds[info.round] = info.period_ms / 1e3 if resumed else now - self._last_time
        self._last_time = now
        self._save(info)
        if now - self._last_print >= self._gap_s:
            self._last_print = now
            print_once(round_line(info))
        if state.epoch > self._epoch:
            self._evaluate(state)

    def finish(self, state: TrainerState) -> None:
        """Evaluates the final state, unless the last round did."""
        if state.round != self._evaluated_round:
            self._evaluate(state)

    def _save(self, info: RoundInfo) -> None:
        rewound, self._next_round = info.round != self._next_round, info.round + 1
        if jax.process_index() != 0:
            return
        self._history_path.parent.mkdir(parents=True, exist_ok=True)
        if rewound:  # this round and later ones run again: remove their lines
            before = (
                History.from_json(self._history_path, skip_damaged=True) if self._history_path.exists() else History()
            )
            History(one for one in before if one.round < info.round).to_json(self._history_path)
            if self._seconds_path:
                known = (self.seconds.get(number, math.nan) for number in range(info.round))
                self._seconds_path.write_text("".join(map(_seconds_line, known)), encoding="utf8")
        _append(self._history_path, History([info]).to_json())
        if self._seconds_path:
            _append(self._seconds_path, _seconds_line(self.seconds[info.round]))

    def _evaluate(self, state: TrainerState) -> None:
        self._epoch, self._evaluated_round = state.epoch, state.round
        began = time.perf_counter()
        if jax.process_index() == 0:
            seconds = sum(taken for number, taken in self.seconds.items() if number < state.round)
            self.test = self._task.evaluate(self._trainer.params(state), self._trainer.model_state(state))
            self.curve.append({"epoch": state.epoch, "seconds": seconds} | self.test)
            metric = self._task.metric
            shown = f"{metric_title(metric)} {metric_text(metric, self.test[metric])}"
            print_once(f"epoch {state.epoch} of {self._epochs}: {shown} after {seconds:.1f} s")
        barrier("evaluated")
        self._last_time += time.perf_counter() - began


def _append(path: Path, line: str) -> None:
    with path.open("a", encoding="utf8") as file:
        file.write(line)


def _seconds_line(seconds: float) -> str:
    return f"{seconds!r}\n"


def _read_seconds(path: Path) -> dict[int, float]:
    """Training time by number of the round, up to the first damaged line: it may hold several rounds."""
    found: dict[int, float] = {}
    *lines, _ = path.read_bytes().split(b"\n") if path.exists() else [b""]  # the last line may be incomplete
    for number, line in enumerate(lines):
        try:
            found[number] = float(line)
        except ValueError:
            _log.warning("%s: line %s is damaged; later rounds count with their own period", path, number + 1)
            break
    return {number: seconds for number, seconds in found.items() if math.isfinite(seconds)}
