"""Hooks of ``fit``: checkpoints, progress, reports to the launcher and callbacks extend its loop."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from tqdm import tqdm

from jaxche.data import EPOCH_SIZE
from jaxche.distributed import RESTART, PeerLostError
from jaxche.messages import brief, per_rank
from jaxche.replicas import LocalState, free
from jaxche.reports import Every, History, Logger, Reached, RoundInfo
from jaxche.training._ema import with_ema_values
from jaxche.training._evaluate import MetricProgram, evaluate
from jaxche.training._plan import End
from jaxche.training._rounds import Rounds
from jaxche.training._state import Stop, TrainerState

_log = logging.getLogger("jaxche")

Callback = Callable[[TrainerState, RoundInfo], Any]


@dataclass
class Run:
    """The values that a fit carries from round to round."""

    state: TrainerState  # after the last round
    data: Any
    size: int  # batches in an epoch
    end: End
    history: History = field(default_factory=History)
    # The state before the last round, which may have failed on another process; kept in elastic runs.
    previous: TrainerState | None = None
    donates: bool = False  # whether rounds take the arrays of the state
    settles: bool = False  # whether what follows each round waits for its merge
    is_lost: bool = False  # whether a failed round has taken them
    hooks: Sequence[Hook] = ()  # in the order of their calls
    before: Reached = field(init=False)  # how far the run was before the last round

    def __post_init__(self) -> None:
        self.before = self.state.reached

    @property
    def is_done(self) -> bool:
        """Whether training has reached its end."""
        return self.end.is_reached(self.state)

    @property
    def batches_left(self) -> int | None:
        """Batches to the end, as far as they are known; None in a stream, or if only examples or time are limited."""
        state, left = self.state, []
        if self.end.epochs is not None and self.size != EPOCH_SIZE:
            pending = sum(stop - start for _, start, stop in state.pending_batches)
            left.append((self.end.epochs - state.epoch) * self.size - state.cursor + pending)
        if self.end.steps is not None:
            left.append(self.end.steps - state.steps)
        return min(left, default=None)

    @property
    def has_last_record(self) -> bool:
        """Whether the history ends with the last round of the state; a damaged file may lack it."""
        return bool(self.history) and self.history[-1].round == self.state.round - 1

    def is_due(self, every: Every) -> bool:
        """Whether something is due after the last round; equal in all processes."""
        return every.is_due(self.before, self.state.reached)

    def advance(self, state: TrainerState, info: RoundInfo, keeps: bool) -> None:
        """Take the state and the record of a round; ``keeps`` is whether the state before it may be needed again."""
        self.before, self.previous, self.state = self.state.reached, self.state if keeps else None, state
        self.history.append(info)


class Hook:
    """Extends a fit; by default every method does nothing. All processes call the same hooks in the same order."""

    def on_start(self, run: Run) -> None:
        """Called before the first round."""

    def on_round(self, run: Run, info: RoundInfo) -> bool:
        """Called after each round; a true result asks to stop training.

        A hook may replace the last entry of ``run.history``; later hooks get the new one as ``info``.
        """
        return False

    def on_admission(self) -> None:
        """Called before processes are admitted to an elastic run."""

    def on_membership(self, run: Run, shrunk: bool) -> None:
        """Called after processes were lost (``shrunk``) or admitted."""

    def on_stop(self, run: Run, preempted: bool = False) -> None:
        """Called when training stops before its end."""

    def on_end(self, run: Run) -> None:
        """Called after the last round, unless training was interrupted, was preempted or failed."""


class EvaluationHook(Hook):
    """Evaluates the merged parameters on validation data, and puts the results into the record of the round."""

    def __init__(self, trainer: Rounds, data: Any, program: MetricProgram, metrics: Any, every: Every):
        self._trainer, self._data, self._program, self._metrics = trainer, data, program, metrics
        self._every, self._missed = every, False

    def on_round(self, run: Run, info: RoundInfo) -> bool:
        if self._missed or run.is_due(self._every) or run.is_done or info.stop == Stop.ASKED:
            self._evaluate(run)
        return False

    def on_membership(self, run: Run, shrunk: bool) -> None:
        # Some processes may have finished an evaluation that others have not.
        self._missed = shrunk

    def on_end(self, run: Run) -> None:
        if run.has_last_record and not run.history[-1].validation:
            self._evaluate(run)

    def _evaluate(self, run: Run) -> None:
        try:
            state = with_ema_values(self._trainer._engine, run.state)
            found = evaluate(self._trainer, state, self._data, self._program, self._metrics)
        except PeerLostError as error:
            if not self._trainer._group.elastic:
                raise
            _log.warning("the evaluation after round %s failed: %s", run.history[-1].round, error)
        else:
            run.history[-1] = replace(run.history[-1], validation=found)
            self._missed = False


class DonationHook(Hook):
    """Frees the arrays of the state that a fit was given, once it needs them no more."""

    def __init__(self, given: TrainerState):
        self._given: Sequence[LocalState] = given.local_states
        self._rounds = 0

    def on_round(self, run: Run, info: RoundInfo) -> bool:
        self._rounds += 1
        # A merge that runs beside the next round begins at the state before it, and an elastic run may repeat a round.
        if self._rounds > 1 or (run.state.in_flight is None and run.previous is None):
            self._free(run)
        return False

    def on_stop(self, run: Run, preempted: bool = False) -> None:
        self._free(run)

    def on_end(self, run: Run) -> None:
        self._free(run)

    def _free(self, run: Run) -> None:
        given, self._given = self._given, ()
        kept = [run.state] if run.previous is None else [run.state, run.previous]
        if given:
            free(given, [local for state in kept for local in state.local_states])


class ProgressHook(Hook):
    """Shows a bar on a terminal, else a line as often as ``every``, or every ten seconds; on the leader only."""

    def __init__(self, trainer: Rounds, enabled: bool, every: Every | None):
        self._trainer, self._enabled, self._every = trainer, enabled, every
        self._bar: tqdm | None = None
        self._prints = False  # lines in place of a bar

    def on_start(self, run: Run) -> None:
        enabled = self._enabled and self._trainer._group.is_leader
        terminal = enabled and sys.stderr.isatty()
        self._total, self._prints = run.batches_left, enabled and not terminal
        self._bar = tqdm(total=self._total, unit="batch", disable=not terminal, dynamic_ncols=True)
        self._done, self._timed = 0, None
        self._last_line = time.perf_counter()

    def on_membership(self, run: Run, shrunk: bool) -> None:
        if self._bar is not None:  # else it has not started
            self._bar.close()
            self.on_start(run)

    def on_round(self, run: Run, info: RoundInfo) -> bool:
        assert self._bar is not None, "on_start comes first"
        self._done += info.batches
        text = f"round {info.round} epoch {info.epoch} loss {info.loss:.4f}"
        if self._trainer.world_size > 1:
            text += f" counts {per_rank(info.counts)} efficiency {info.efficiency:.0%}"
        text += "".join(f" validation {name} {value:.4g}" for name, value in info.validation.items())
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(info.batches)
        now = time.perf_counter()
        is_due = now - self._last_line > 10 if self._every is None else run.is_due(self._every)
        if self._prints and (is_due or run.is_done or info.validation):
            self._last_line = now
            done = f"{self._done} batches"
            if self._total is not None:
                done = f"{self._done}/{self._total} batches"
                if self._timed is not None:
                    start, before = self._timed
                    left = (now - start) / (self._done - before) * (self._total - self._done)
                    done += f", {left:.0f} s left"
            tqdm.write(f"{text} ({done})", file=sys.stderr)
        self._timed = self._timed or (now, self._done)  # the first round compiles
        return False

    def close(self) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()


class LauncherHook(Hook):
    """Reports each round to the launcher: a heartbeat, and an event for each local rank."""

    def __init__(self, trainer: Rounds):
        self._trainer = trainer

    def on_round(self, run: Run, info: RoundInfo) -> bool:
        watchdog, engine = self._trainer._group.watchdog, self._trainer._engine
        watchdog.heartbeat()
        # An elastic run renumbers its ranks; the launcher keeps the numbers of the start.
        ranks = {place: engine.order[place] for place in engine.ranks}
        watchdog.write_events(
            json.dumps(event(info, place, rank, engine.merged_bytes)) for place, rank in ranks.items()
        )
        return False


class CallbackHook(Hook):
    """Calls the callbacks of the user."""

    def __init__(self, callbacks: Sequence[Callback], every: Every | None, is_leader: bool):
        self._callbacks, self._every, self._is_leader = callbacks, every, is_leader
        self._logged: RoundInfo | None = None

    def on_start(self, run: Run) -> None:
        self._logged = run.history[-1] if run.history else None  # of a run that was resumed

    def on_round(self, run: Run, info: RoundInfo) -> bool:
        logs = self._every is None or run.is_due(self._every) or info.validation or run.is_done or info.stop
        self._logged = info if logs else self._logged
        called = {i: one for i, one in enumerate(self._callbacks) if logs or not isinstance(one, Logger)}
        answers = {i: callback(run.state, info) for i, callback in called.items()}  # call all, even after a true result
        stops = [i for i, answer in answers.items() if _is_true(i, answer)]
        if stops and not (run.is_done or info.stop) and self._is_leader:
            _log.warning("callbacks[%s] returned true after round %s, and training ends", stops[0], info.round)
        return bool(stops)

    def on_end(self, run: Run) -> None:
        # A callback has stopped the run after a round that was not due, or before its evaluation.
        if run.history and self._logged is not run.history[-1]:
            for callback in self._callbacks:
                if isinstance(callback, Logger):
                    callback(run.state, run.history[-1])


def _is_true(i: int, answer: Any) -> bool:
    """Whether the result of a callback is true; refuses one that may not be meant to end training."""
    try:
        is_true = bool(answer)
    except Exception:
        is_true = None
    if is_true is None or (is_true and not (isinstance(answer, bool) or getattr(answer, "dtype", None) == np.bool_)):
        raise ValueError(
            f"callbacks[{i}] returned {brief(answer)}, which is neither True nor False; a true result stops training: "
            "write return True for that, e.g. return bool((values < limit).all()), and leave it out to go on"
        )
    return is_true


def event(info: RoundInfo, place: int, rank: int, merged_bytes: int) -> dict[str, Any]:
    """The event of one round for a rank; ``place`` is its number among the present ranks."""
    return {
        "time": round(time.time(), 3),
        "event": "round",
        "rank": rank,
        "round": info.round,
        "epoch": info.epoch,
        "steps": info.counts[place],
        "compute_ms": round(info.wall_ms[place], 3),
        "wait_ms": round(info.wait_ms[place], 3),
        "merge_ms": round(info.sync_ms, 3),
        "merged_bytes": merged_bytes,
        "restart": int(os.environ.get(RESTART, 0)),
    }
