"""A schedule in lockstep: what every stage does in each tick, what reaches it, and how much it has to keep."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jaxche.stages._schedule import Schedule, simulate_schedule

IDLE = -1  # no micro-batch


class Part(NamedTuple):
    """Ticks that follow one another.

    Attributes:
      forwards: whether any stage goes forward in them.
      backwards: whether any goes backward.
      rows: int32 ``[ticks, 4, stages]``: the task (0 none, 1 forward, 2 backward), its micro-batch, and the
        micro-batches whose activation and whose gradient come at the end of the tick, or ``IDLE``.
    """

    forwards: bool
    backwards: bool
    rows: np.ndarray


class Ticks(NamedTuple):
    """What one program needs to know of a schedule.

    Attributes:
      parts: at most three: only forwards, both, only backwards.
      inputs: slots for activations that came, the most that any stage needs.
      kept: slots for what backwards need.
      gradients: slots for gradients that came.
    """

    parts: tuple[Part, ...]
    inputs: int
    kept: int
    gradients: int


def make_ticks(schedule: Schedule, keeps_inputs: bool) -> Ticks:
    """Lay a schedule out on a clock on which every task takes one tick.

    Args:
      schedule: the tasks of each stage.
      keeps_inputs: whether a backward reads its forward's input.

    Example:
      >>> from jaxche.stages import gpipe, one_f_one_b
      >>> [len(part.rows) for part in make_ticks(gpipe(2, 4), False).parts]
      [5, 5]
      >>> make_ticks(gpipe(2, 4), False).kept, make_ticks(one_f_one_b(2, 4), False).kept
      (4, 2)
    """
    last, micros = len(schedule) - 1, max(task.micro for task in schedule[0]) + 1
    simulated = simulate_schedule(schedule, [1] * (last + 1), [1] * (last + 1))
    rows = np.full((round(simulated.makespan), 4, last + 1), IDLE, np.int32)
    rows[:, 0] = 0
    when = {}
    for stage, (tasks, starts) in enumerate(zip(schedule, simulated.starts, strict=True)):
        for task, start in zip(tasks, starts, strict=True):
            tick = when[task.kind, stage, task.micro] = round(start)
            rows[tick, :2, stage] = "FB".index(task.kind) + 1, task.micro
            if task.kind == "F" and stage < last:
                rows[tick, 2, stage + 1] = task.micro
            if task.kind == "B" and stage > 0:
                rows[tick, 3, stage - 1] = task.micro

    def times(kind: str, stage: int) -> list[int]:
        return [when[kind, stage, micro] for micro in range(micros)]

    used = "B" if keeps_inputs else "F"
    stages = range(last + 1)
    # The last stage makes its gradient itself, of the loss, when it goes forward.
    made = [times("B", stage + 1) if stage < last else times("F", stage) for stage in stages]
    return Ticks(
        tuple(_parts(rows)),
        max(_room(times("F", stage - 1), times(used, stage)) for stage in stages[1:]),
        max(_room(times("F", stage), times("B", stage)) for stage in stages),
        max(_room(made[stage], times("B", stage)) for stage in stages),
    )


def _room(begins: Sequence[int], ends: Sequence[int]) -> int:
    """The most micro-batches that are there at once; they come and go in the order of their numbers."""
    return max(sum(begin < end for begin in begins[micro:]) for micro, end in enumerate(ends))


def _parts(rows: np.ndarray) -> Iterable[Part]:
    forwards, backwards = ((rows[:, 0] == kind).any(axis=1) for kind in (1, 2))
    begin = int(np.argmax(backwards))  # before it there are only forwards
    end = len(rows) - int(np.argmax(forwards[::-1]))  # after it only backwards
    cuts = sorted({0, min(begin, end), max(begin, end), len(rows)})
    for first, after in itertools.pairwise(cuts):
        yield Part(bool(forwards[first:after].any()), bool(backwards[first:after].any()), rows[first:after])
