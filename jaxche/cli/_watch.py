"""A callback that prints rounds and evaluates at the end of every epoch, on a clock that stops for it."""

from __future__ import annotations

import time
from typing import Any

import jax

from jaxche.cli._report import metric_text, metric_title, round_line
from jaxche.cli._tasks import Task
from jaxche.training import ReplicaState, RoundInfo, Trainer

# Rounds of `sync` are single batches: their lines would say nothing, very fast.
_SYNC_GAP_S, _GAP_S = 1.0, 0.1


def barrier(name: str) -> None:
    """All processes meet here."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)


def say(text: str) -> None:
    """Prints a line, once in a run of many processes."""
    if jax.process_index() == 0:
        print(text, flush=True)


class Watch:
    """Called by ``trainer.fit`` after every round.

    Only rank 0 evaluates; the others wait for it, so that the next round starts everywhere at once.

    Args:
      trainer: whose rounds these are.
      task: evaluates.
      epochs: how many there will be.
    """

    def __init__(self, trainer: Trainer, task: Task, epochs: int):
        self._trainer, self._task, self._epochs = trainer, task, epochs
        self._gap_s = _SYNC_GAP_S if trainer.policy == "sync" and trainer.world_size > 1 else _GAP_S
        self._epoch, self._paused, self._spoke = 0, 0.0, float("-inf")
        self.curve: list[dict[str, float]] = []
        barrier("start")
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Training time so far."""
        return time.perf_counter() - self._start - self._paused

    def __call__(self, state: ReplicaState, info: RoundInfo) -> None:
        now = time.perf_counter()
        if now - self._spoke >= self._gap_s:
            self._spoke = now
            say(round_line(info))
        if state.epoch > self._epoch:
            self._epoch = state.epoch
            self._evaluate(state)

    def _evaluate(self, state: ReplicaState) -> None:
        seconds, began = self.seconds, time.perf_counter()
        if jax.process_index() == 0:
            test = self.measure(state)
            self.curve.append({"epoch": state.epoch, "seconds": seconds} | test)
            metric = self._task.metric
            shown = f"{metric_title(metric)} {metric_text(metric, test[metric])}"
            say(f"epoch {state.epoch} of {self._epochs}: {shown} after {seconds:.1f} s")
        barrier("evaluated")
        self._paused += time.perf_counter() - began

    def measure(self, state: ReplicaState) -> dict[str, Any]:
        """The held-out metrics of a state's merged parameters."""
        return self._task.evaluate(self._trainer.params(state), self._trainer.model_state(state))
