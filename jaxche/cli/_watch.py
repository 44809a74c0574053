"""A callback that prints rounds and evaluates at the end of every epoch, on a clock that stops for it."""

from __future__ import annotations

import time
from pathlib import Path

import jax

from jaxche.cli._report import metric_text, metric_title, round_line
from jaxche.cli._tasks import Task
from jaxche.training import History, ReplicaState, RoundInfo, Trainer

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
    """Called by ``trainer.fit`` after every round: prints, evaluates, and on rank 0 keeps the record on file.

    Only rank 0 evaluates; the others wait for it, so that the next round starts everywhere at once.

    Args:
      trainer: whose rounds these are.
      task: evaluates.
      epochs: how many there will be.
      folder: for ``history.jsonl``, a line as soon as a round is over.
      goes_on: whether a later start may go on from here: it finds the clock in ``seconds.txt``.

    Attributes:
      seconds: training time of each round by its number, without evaluation; on rank 0 also of earlier starts.
      test: the held-out metrics of the last evaluation, on rank 0.
      curve: those at the end of each epoch since this start, with ``epoch`` and ``seconds``.
    """

    def __init__(self, trainer: Trainer, task: Task, epochs: int, folder: Path, goes_on: bool):
        self._trainer, self._task, self._epochs = trainer, task, epochs
        self._gap_s = _SYNC_GAP_S if trainer.policy == "sync" and trainer.world_size > 1 else _GAP_S
        self._record, self._clock = folder / "history.jsonl", folder / "seconds.txt" if goes_on else None
        self._epoch, self._next, self._spoke = 0, None, float("-inf")
        self._evaluated: int | None = None
        self.seconds: dict[int, float] = {}
        if self._clock and jax.process_index() == 0:
            self.seconds = dict(enumerate(map(float, _lines(self._clock))))
        self.test: dict[str, float] = {}
        self.curve: list[dict[str, float]] = []
        barrier("start")
        self._last = time.perf_counter()

    def __call__(self, state: ReplicaState, info: RoundInfo) -> None:
        now = time.perf_counter()
        if self._next is None:
            self._epoch = info.epoch
        # Before the first round of a later start a checkpoint was read, which is no training.
        resumed = self._next is None and info.round > 0
        self.seconds[info.round] = info.period_ms / 1e3 if resumed else now - self._last
        self._last = now
        self._keep(info)
        if now - self._spoke >= self._gap_s:
            self._spoke = now
            say(round_line(info))
        if state.epoch > self._epoch:
            self._evaluate(state)

    def finish(self, state: ReplicaState) -> None:
        """Evaluates the last state, unless that was done: a run may go on from its end, or stop within an epoch."""
        if state.round != self._evaluated:
            self._evaluate(state)

    def _keep(self, info: RoundInfo) -> None:
        anew, self._next = info.round != self._next, info.round + 1
        if jax.process_index() != 0:
            return
        self._record.parent.mkdir(parents=True, exist_ok=True)
        _put(self._record, info.round, History([info]).to_json(), anew)
        if self._clock:
            _put(self._clock, info.round, f"{self.seconds[info.round]!r}\n", anew)

    def _evaluate(self, state: ReplicaState) -> None:
        self._epoch, self._evaluated = state.epoch, state.round
        began = time.perf_counter()
        if jax.process_index() == 0:
            seconds = sum(taken for number, taken in self.seconds.items() if number < state.round)
            self.test = self._task.evaluate(self._trainer.params(state), self._trainer.model_state(state))
            self.curve.append({"epoch": state.epoch, "seconds": seconds} | self.test)
            metric = self._task.metric
            shown = f"{metric_title(metric)} {metric_text(metric, self.test[metric])}"
            say(f"epoch {state.epoch} of {self._epochs}: {shown} after {seconds:.1f} s")
        barrier("evaluated")
        self._last += time.perf_counter() - began


def _put(path: Path, number: int, line: str, anew: bool) -> None:
    """Makes a line that of round ``number``; ``anew`` where rounds are made again, and what is there of them goes."""
    if anew:
        path.write_text("".join(_lines(path)[:number]), encoding="utf8")
    with path.open("a", encoding="utf8") as file:
        file.write(line)


def _lines(path: Path) -> list[str]:
    """The lines of a file, but for one that a dying process did not finish."""
    text = path.read_text(encoding="utf8") if path.exists() else ""
    return [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
