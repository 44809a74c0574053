"""Works off a schedule: each stage of this process in a thread of its own, dispatching without waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jaxche.stages._base import Tag, Wire, WireClosedError
from jaxche.stages._program import Kept, StageProgram
from jaxche.stages._schedule import Task
from jaxche.stages._trace import cotangents


class Pace(NamedTuple):
    """Wall times in ms to which a stage's tasks are padded: devices of known speeds for measurements.

    Attributes:
      forward_ms: of a forward task.
      backward_ms: of a backward task.

    Example:
      >>> Pace(forward_ms=4.0, backward_ms=8.0).backward_ms
      8.0
    """

    forward_ms: float
    backward_ms: float


class StageResult(NamedTuple):
    """What one stage has after a step.

    Attributes:
      grads: gradients of its parameters.
      loss: of the batch, from the last stage, else None.
      peak: the most micro-batches whose activations it kept at once.
    """

    grads: Any
    loss: Any
    peak: int


def run_stage(
    program: StageProgram,
    tasks: Sequence[Task],
    wire: Wire,
    step: int,
    params: Any,
    batch: Any,
    like: tuple[Any, Any],
    pace: Pace | None = None,
) -> StageResult:
    """Work off one stage's tasks.

    Args:
      program: its compiled programs.
      tasks: its part of the schedule.
      wire: carries what it exchanges with its neighbours.
      step: number of the step.
      params: its parameters, on its device.
      batch: the whole batch on its device for the first and the last stage, else None.
      like: specs of its input (None for the first) and of its output (None for the last).
      pace: wall times to pad its tasks to.
    """
    stage, device = program.stage, program.device
    like_x, like_gradient = like[0], cotangents(like[1])
    kept: dict[int, Kept] = {}
    total, loss, peak = program.zeros(), None, 0
    for task in tasks:
        if task.kind == "F":
            x = None if program.is_first else wire.receive(Tag(step, task.micro, "forward", stage - 1), like_x, device)
            began = _ready(pace, (x, params, batch))
            out, kept[task.micro] = program.forward(params, x, batch, step, task.micro)
            del x
            peak = max(peak, len(kept))
            _pad(pace and pace.forward_ms, began, out)
            if program.is_last:
                loss = out if loss is None else loss + out
            else:
                wire.send(Tag(step, task.micro, "forward", stage), out)
            del out
        else:
            tag = Tag(step, task.micro, "backward", stage + 1)
            gradient = None if program.is_last else wire.receive(tag, like_gradient, device)
            began = _ready(pace, gradient)
            total, back = program.backward(params, batch, step, task.micro, kept.pop(task.micro), gradient, total)
            _pad(pace and pace.backward_ms, began, (total, back))
            if not program.is_first:
                wire.send(Tag(step, task.micro, "backward", stage), back)
    return StageResult(program.finish(total), loss, peak)


def run_together(jobs: Sequence[Callable[[], Any]], wire: Wire) -> list[Any]:
    """Run the jobs of several stages side by side; if one fails, the wire is closed, so that none waits for ever.

    Returns:
      What each returned.

    Raises:
      Exception: what the first to fail raised.
    """
    results: list[Any] = [None] * len(jobs)
    errors: list[BaseException] = []

    def work(place: int) -> None:
        try:
            results[place] = jobs[place]()
        except BaseException as error:
            errors.append(error)
            wire.close()

    # The caller's thread takes the last: with one stage in this process there is no other thread at all.
    threads = [threading.Thread(target=work, args=(place,), daemon=True) for place in range(len(jobs) - 1)]
    for thread in threads:
        thread.start()
    work(len(jobs) - 1)
    try:
        for thread in threads:
            thread.join()
    except BaseException:  # Ctrl-C: the others must not wait on
        wire.close()
        raise
    if errors:
        raise next((error for error in errors if not isinstance(error, WireClosedError)), errors[0])
    return results


def _ready(pace: Pace | None, inputs: Any) -> float:
    if pace is not None:
        jax.block_until_ready(inputs)
    return time.perf_counter()


def _pad(pace_ms: float | None, began: float, outputs: Any) -> None:
    if pace_ms is not None:
        jax.block_until_ready(outputs)
        time.sleep(max(0.0, began + pace_ms / 1e3 - time.perf_counter()))
