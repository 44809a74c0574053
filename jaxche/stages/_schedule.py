"""Pipeline schedules as data: for each stage, the order of its forward and backward tasks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxche.drawing import COLOURS, Bar, Lane, lanes
from jaxche.messages import brief, one_of, whole_number


class Task(NamedTuple):
    """One forward or backward of one micro-batch in one stage.

    Attributes:
      kind: ``"F"`` forward or ``"B"`` backward.
      micro: number of the micro-batch.

    Example:
      >>> Task("F", 0)
      Task(kind='F', micro=0)
    """

    kind: str
    micro: int


Schedule = tuple[tuple[Task, ...], ...]


def gpipe(stages: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards. Each stage keeps the activations of every micro-batch.

    Args:
      stages: number of stages S.
      micro_batches: number of micro-batches M.

    Returns:
      The tasks of each stage, in order.

    References:
      Huang et al., *GPipe: Efficient training of giant neural networks using pipeline parallelism*, NeurIPS 2019.

    Example:
      >>> ["".join(f"{task.kind}{task.micro} " for task in tasks) for tasks in gpipe(2, 2)]
      ['F0 F1 B0 B1 ', 'F0 F1 B0 B1 ']
    """
    stages, micro_batches = _checked(stages, micro_batches)
    tasks = tuple(Task(kind, micro) for kind in "FB" for micro in range(micro_batches))
    return (tasks,) * stages


def one_f_one_b(stages: int, micro_batches: int) -> Schedule:
    """One forward, one backward in turn. Stage s keeps the activations of at most S - s micro-batches.

    It takes as long as GPipe. The backwards are in the same order, so the gradients of both are equal bit for bit.

    Args:
      stages: number of stages S.
      micro_batches: number of micro-batches M.

    Returns:
      The tasks of each stage, in order.

    References:
      Narayanan et al., *PipeDream: Generalized pipeline parallelism for DNN training*, SOSP 2019, without flushes;
      with them it is PipeDream-Flush of *Memory-efficient pipeline-parallel DNN training*, 2021.

    Example:
      >>> ["".join(f"{task.kind}{task.micro} " for task in tasks) for tasks in one_f_one_b(2, 3)]
      ['F0 F1 B0 F2 B1 B2 ', 'F0 B0 F1 B1 F2 B2 ']
    """
    stages, micro_batches = _checked(stages, micro_batches)
    schedule = []
    for stage in range(stages):
        ahead = min(stages - 1 - stage, micro_batches)
        tasks = [Task("F", micro) for micro in range(ahead)]
        for micro in range(ahead, micro_batches):
            tasks += [Task("F", micro), Task("B", micro - ahead)]
        tasks += [Task("B", micro) for micro in range(micro_batches - ahead, micro_batches)]
        schedule.append(tuple(tasks))
    return tuple(schedule)


def _checked(stages: Any, micro_batches: Any) -> tuple[int, int]:
    stages = whole_number("stages", stages, 1, "stages=2")
    return stages, whole_number("micro_batches", micro_batches, 1, "micro_batches=8")


SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {"1f1b": one_f_one_b, "gpipe": gpipe}


class Simulation(NamedTuple):
    """The times and the memory of a schedule, as :func:`simulate_schedule` found them.

    Attributes:
      makespan: from the first task to the end of the last, in the unit of the given times.
      bubble: share of the time in which stages are idle.
      peak: for each stage, the most micro-batches whose activations it keeps at once.
      starts: for each stage, when each of its tasks begins, in the schedule's order.
      schedule: the schedule.
      forward: time of a forward task of each stage.
      backward: time of a backward task of each stage.

    Example:
      >>> simulate_schedule(gpipe(2, 1), [1, 1], [2, 2]).starts
      ((0.0, 4.0), (1.0, 2.0))
    """

    makespan: float
    bubble: float
    peak: tuple[int, ...]
    starts: tuple[tuple[float, ...], ...]
    schedule: Schedule
    forward: tuple[float, ...]
    backward: tuple[float, ...]

    def __repr__(self) -> str:
        return f"Simulation(makespan={self.makespan}, bubble={self.bubble}, peak={self.peak})"

    def draw(self, unit: str = "units of time") -> str:
        """The schedule over time as a picture: forward tasks blue, backward ones orange, the rest is the bubble.

        Args:
          unit: of the given times, e.g. ``"ms"``.

        Returns:
          An ``<svg>`` element; in a notebook: ``IPython.display.SVG(simulation.draw("ms"))``.
        """
        rows = []
        for stage, (tasks, starts) in enumerate(zip(self.schedule, self.starts, strict=True)):
            took = {"F": self.forward[stage], "B": self.backward[stage]}
            bars = [
                Bar(start, took[task.kind], COLOURS["FB".index(task.kind)], f"{task.kind}{task.micro}")
                for task, start in zip(tasks, starts, strict=True)
            ]
            rows.append(Lane(f"stage {stage}", bars))
        kept = " ".join(map(str, self.peak))
        caption = f"takes {self.makespan:g}, bubble {self.bubble:.1%}, keeps activations of {kept} micro-batches"
        return lanes(rows, unit, caption)

    def _repr_html_(self) -> str:
        return self.draw()


def simulate_schedule(schedule: Schedule, forward: Sequence[float], backward: Sequence[float]) -> Simulation:
    r"""Simulate a schedule with communication that takes no time.

    With S equal stages and M micro-batches GPipe and 1F1B take (M + S - 1)/M times their work, and

    .. math:: \mathrm{bubble} = \frac{S - 1}{M + S - 1}

    Args:
      schedule: the tasks of each stage.
      forward: time of a forward task of each stage.
      backward: time of a backward task of each stage.

    Returns:
      A :class:`Simulation`, which a notebook draws as a Gantt chart.

    Raises:
      ValueError: other numbers of times than stages; or the schedule deadlocks, with the tasks at which stages wait.

    Example:
      >>> simulate_schedule(one_f_one_b(2, 3), [1, 1], [2, 2])
      Simulation(makespan=12.0, bubble=0.25, peak=(2, 1))
    """
    rows = schedule if isinstance(schedule, Sequence) else [None]
    if not all(isinstance(row, Sequence) and all(isinstance(task, Task) for task in row) for row in rows):
        raise ValueError(
            f"schedule={brief(schedule)} must be the tasks of each stage; write e.g. jaxche.stages.gpipe(2, 8)"
        )
    took = {
        "F": _checked_times("forward", forward, len(schedule)),
        "B": _checked_times("backward", backward, len(schedule)),
    }
    last = len(schedule) - 1
    # When each task ends; a task that needs no other begins at 0.
    done: dict[tuple[str, int, int] | None, float] = {None: 0.0}
    clock, kept, peak = [0.0] * len(schedule), [0] * len(schedule), [0] * len(schedule)
    starts: list[list[float]] = [[] for _ in schedule]

    def needs(stage: int, task: Task) -> tuple[str, int, int] | None:
        if task.kind == "F":
            return ("F", task.micro, stage - 1) if stage > 0 else None
        return ("B", task.micro, stage + 1) if stage < last else ("F", task.micro, stage)

    moved = True
    while moved:
        moved = False
        for stage, tasks in enumerate(schedule):
            for task in tasks[len(starts[stage]) :]:
                need = needs(stage, task)
                if need not in done:
                    break
                begin = max(clock[stage], done[need])
                starts[stage].append(begin)
                clock[stage] = begin + took[task.kind][stage]
                done[(task.kind, task.micro, stage)] = clock[stage]
                kept[stage] += 1 if task.kind == "F" else -1
                peak[stage] = max(peak[stage], kept[stage])
                moved = True
    stuck = {s: tasks[len(starts[s])] for s, tasks in enumerate(schedule) if len(starts[s]) < len(tasks)}
    if stuck:
        waits = ", ".join(f"stage {stage} at {task.kind}{task.micro}" for stage, task in stuck.items())
        raise ValueError(f"schedule: deadlock, the stages wait for each other ({waits})")
    work = sum(took[task.kind][stage] for stage, tasks in enumerate(schedule) for task in tasks)
    makespan = max(clock, default=0.0)
    bubble = 1 - work / (makespan * len(schedule)) if makespan else 0.0
    return Simulation(makespan, bubble, tuple(peak), tuple(map(tuple, starts)), schedule, took["F"], took["B"])


def _checked_times(name: str, times: Any, n_stages: int) -> tuple[float, ...]:
    """One time a stage, as floats."""
    try:
        found = tuple(float(time) for time in times)
    except (TypeError, ValueError):
        found = (math.nan,)
    if not all(0 <= time < math.inf for time in found):
        raise ValueError(f"{name}={brief(times)} must be a list of finite times of at least 0, e.g. {name}=[1.0, 2.0]")
    if len(found) != n_stages:
        raise ValueError(f"{name} has {len(found)} times for {n_stages} stages; give one a stage")
    return found


def checked_micro_batch_size(size: Any, schedule: Any) -> int | None:
    """The size as a Python int, or None; refuses one below 1 and an unknown schedule."""
    if size is not None:
        size = whole_number("micro_batch_size", size, 1, "micro_batch_size=8")
    one_of("schedule", schedule, SCHEDULES)
    return size
