"""Runs one batch through the stages of one process: the tasks of their schedule, each stage on a thread."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jaxche.stages._program import MicroBatches, PacedProgram, Saved, StageProgram
from jaxche.stages._schedule import Schedule, Task
from jaxche.stages._wire import Tag, Wire, WireClosedError


class Plan(NamedTuple):
    """Micro-batches and tasks of all stages for batches of one shape, and the programs of those of this process."""

    micro: MicroBatches
    schedule: Schedule
    programs: dict[int, StageProgram | PacedProgram]


class StageResult(NamedTuple):
    """Gradients of one stage after a step, the loss (of the last stage, else None), and the peak of micro-batches."""

    grads: Any
    loss: Any
    peak: int


def run_stages(plan: Plan, wire: Wire, step: int, params: dict[int, Any], batch: Any) -> dict[int, StageResult]:
    """One forward and backward through the stages of this process."""
    programs = plan.programs
    batches = {s: jax.device_put(batch, one.device) for s, one in programs.items() if one.is_first or one.is_last}
    results: dict[int, StageResult] = {}
    errors: list[BaseException] = []
    x64 = jax.config.read("jax_enable_x64")  # a context manager sets it for the caller's thread only

    def work(stage: int) -> None:
        program, tasks = programs[stage], plan.schedule[stage]
        try:
            with jax.enable_x64(x64):
                results[stage] = _run_stage(program, tasks, wire, step, params[stage], batches.get(stage))
        except BaseException as error:
            errors.append(error)
            close()  # ends the waits of the other stages

    def close() -> None:
        try:
            wire.close()
        except Exception as error:  # may follow from the error for which the wire is closed
            errors.append(error)

    # The caller's thread runs the last stage: a process with one stage needs no other thread.
    *others, last = programs
    threads = [threading.Thread(target=work, args=(stage,), daemon=True) for stage in others]
    for thread in threads:
        thread.start()
    work(last)
    try:
        for thread in threads:
            thread.join()
    except BaseException:  # Ctrl-C: end the waits of the other threads
        close()
        raise
    if errors:
        raise next((error for error in errors if not isinstance(error, WireClosedError)), errors[0])
    return results


def _run_stage(
    program: StageProgram | PacedProgram, tasks: Sequence[Task], wire: Wire, step: int, params: Any, batch: Any
) -> StageResult:
    """Run the tasks of one stage in order; computations are dispatched without waiting for their results."""
    stage, device = program.index, program.device
    saved: dict[int, Saved] = {}
    total, loss, peak = program.zeros(), None, 0
    for task in tasks:
        if task.kind == "F":
            tag = Tag(step, task.micro, "forward", stage - 1)
            x = None if program.is_first else wire.receive(tag, program.x, device)
            out, saved[task.micro] = program.forward(params, x, batch, step, task.micro)
            del x
            peak = max(peak, len(saved))
            if program.is_last:
                loss = out if loss is None else loss + out
            else:
                wire.send(Tag(step, task.micro, "forward", stage), out)
            del out
        else:
            tag = Tag(step, task.micro, "backward", stage + 1)
            gradient = None if program.is_last else wire.receive(tag, program.gradient, device)
            total, back = program.backward(params, batch, step, task.micro, saved.pop(task.micro), gradient, total)
            if not program.is_first:
                wire.send(Tag(step, task.micro, "backward", stage), back)
    return StageResult(program.finish(total), loss, peak)
