"""Runs batches through the stages of one process: a plan for each set of shapes, the tasks of a schedule, the loss."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxche.sharding import Device
from jaxche.stages._program import MicroBatches, Saved, StageProgram, StageSpec
from jaxche.stages._schedule import SCHEDULES, Schedule
from jaxche.stages._stage import Stage, check_stage_params, spec, trace_stages
from jaxche.stages._wire import StageProtocol, Tag, Wire, WireClosedError


class Pace(NamedTuple):
    """Wall times in ms to which the tasks of a stage are padded, to simulate a device of known speed.

    Attributes:
      forward_ms: of a forward task.
      backward_ms: of a backward task.

    Example:
      >>> Pace(forward_ms=4.0, backward_ms=8.0).backward_ms
      8.0
    """

    forward_ms: float
    backward_ms: float


class Plan(NamedTuple):
    """Micro-batches and tasks of all stages for batches of one shape, and the programs of those of this process."""

    micro: MicroBatches
    schedule: Schedule
    programs: dict[int, StageProgram]


class StageResult(NamedTuple):
    """Gradients of one stage after a step, the loss (of the last stage, else None), and the peak of micro-batches."""

    grads: Any
    loss: Any
    peak: int


class Runner:
    """Runs the stages ``local`` of one process, in ascending order; ``devices`` has None for those of others.

    ``next_step`` is one more than the last step that was run, and ``peaks`` has for each stage the most micro-batches
    whose activations it kept at once in that step.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        loss: Callable[[Any, Any], Any],
        protocol: StageProtocol,
        seed: int,
        local: Sequence[int],
        devices: Sequence[Device | None],
        paces: Sequence[Pace] | None,
    ):
        self._stages, self._loss, self._protocol, self._seed = stages, loss, protocol, seed
        self._local, self._devices, self._paces = local, devices, paces or [None] * len(stages)
        self._wire: Wire | None = None
        self._specs: list[Any] = [None] * len(stages)
        self._plans: dict[Any, Plan] = {}
        self.next_step = 0
        self.peaks: tuple[int | None, ...] = (None,) * len(stages)
        self.wire()  # fail now if the other processes or the store cannot be reached

    def wire(self) -> Wire:
        """The wire, opened if it is not open."""
        if self._wire is None:
            self._wire = self._protocol.wire(self._local, len(self._stages), self._devices)
        return self._wire

    def close(self) -> None:
        """Close the wire."""
        if self._wire is not None:
            self._wire.close()
            self._wire = None

    def by_stage(self, local: Sequence[Any]) -> tuple[Any, ...]:
        """One entry a stage, from those of the stages of this process; None for the others."""
        entries: list[Any] = [None] * len(self._stages)
        for stage, entry in zip(self._local, local, strict=True):
            entries[stage] = entry
        return tuple(entries)

    def place(self, params: Sequence[Any]) -> dict[int, Any]:
        """The parameters of this process on their devices; records the shapes of all."""
        check_stage_params(params, len(self._stages))
        placed = {stage: jax.device_put(params[stage], self._devices[stage]) for stage in self._local}
        for stage, tree in enumerate(params):
            if stage in placed:
                self._specs[stage] = spec(placed[stage])
            elif tree is not None:
                self._specs[stage] = spec(tree)
            elif self._specs[stage] is None:
                raise ValueError(
                    f"params[{stage}] is None, and the shapes of that stage of another process are not known here; "
                    f"call model.init(params, tx) with all parameters first, or give their jax.ShapeDtypeStruct"
                )
        return placed

    def prepare(self, params: Sequence[Any], batch: Any) -> tuple[Plan, dict[int, Any]]:
        """The plan for these shapes, and the parameters on their devices."""
        placed = self.place(params)
        given = (tuple(self._specs), spec(batch))
        leaves, structure = jax.tree.flatten(given)
        key = (structure, *leaves)
        if key not in self._plans:
            self._plans[key] = self._compile(*given)
        return self._plans[key], placed

    def run(self, plan: Plan, step: int, placed: dict[int, Any], batch: Any) -> list[StageResult]:
        """Run one forward and backward through the stages of this process."""
        wire, last = self.wire(), len(self._stages) - 1
        batches = {s: jax.device_put(batch, self._devices[s]) for s in self._local if s in (0, last)}
        jobs = [lambda s=s: self._run_stage(s, plan, wire, step, placed[s], batches.get(s)) for s in self._local]
        try:
            results = _run_threads(jobs, wire)
        except BaseException:
            # The wire may hold trees of the step that failed: the next step opens a new one.
            self.close()
            raise
        self.next_step = step + 1
        self.peaks = self.by_stage([result.peak for result in results])
        return results

    def broadcast_loss(self, step: int, results: Sequence[StageResult]) -> Any:
        """The loss, which the process of the last stage publishes to all others."""
        loss = results[-1].loss
        if loss is None:
            return jnp.float32(self.wire().read_loss(step))
        if len(results) < len(self._stages):
            self.wire().publish(step, float(loss))
        return loss

    def _compile(self, params: Sequence[Any], batch: Any) -> Plan:
        """Trace all stages and compile those of this process, from specs of parameters and batch."""
        micro = MicroBatches.of(batch, self._protocol.micro_batch_size)
        outputs = trace_stages(self._stages, self._loss, params, micro.spec(batch))
        last = len(self._stages) - 1
        programs = {}
        for stage in self._local:
            x = outputs[stage - 1] if stage > 0 else None
            out = outputs[stage] if stage < last else None
            given = StageSpec(params[stage], x, batch if stage in (0, last) else None, out)
            loss = self._loss if stage == last else None
            programs[stage] = StageProgram(self._stages[stage], loss, self._seed, self._devices[stage], micro, given)
        return Plan(micro, SCHEDULES[self._protocol.schedule](last + 1, micro.count), programs)

    def _run_stage(self, stage: int, plan: Plan, wire: Wire, step: int, params: Any, batch: Any) -> StageResult:
        """Run the tasks of one stage in order; computations are dispatched without waiting for their results."""
        program, device, pace = plan.programs[stage], self._devices[stage], self._paces[stage]
        saved: dict[int, Saved] = {}
        total, loss, peak = program.zeros(), None, 0
        for task in plan.schedule[stage]:
            if task.kind == "F":
                tag = Tag(step, task.micro, "forward", stage - 1)
                x = None if program.is_first else wire.receive(tag, program.x, device)
                start = _ready(pace, (x, params, batch))
                out, saved[task.micro] = program.forward(params, x, batch, step, task.micro)
                del x
                peak = max(peak, len(saved))
                _pad(pace and pace.forward_ms, start, out)
                if program.is_last:
                    loss = out if loss is None else loss + out
                else:
                    wire.send(Tag(step, task.micro, "forward", stage), out)
                del out
            else:
                tag = Tag(step, task.micro, "backward", stage + 1)
                gradient = None if program.is_last else wire.receive(tag, program.gradient, device)
                start = _ready(pace, gradient)
                total, back = program.backward(params, batch, step, task.micro, saved.pop(task.micro), gradient, total)
                _pad(pace and pace.backward_ms, start, (total, back))
                if not program.is_first:
                    wire.send(Tag(step, task.micro, "backward", stage), back)
        return StageResult(program.finish(total), loss, peak)


def _run_threads(jobs: Sequence[Callable[[], Any]], wire: Wire) -> list[Any]:
    """Run one job a stage in parallel. If one fails, close the wire, which ends the waits of the others, and raise."""
    results: list[Any] = [None] * len(jobs)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            results[number] = jobs[number]()
        except BaseException as error:
            errors.append(error)
            wire.close()

    # The caller's thread runs the last job: a process with one stage needs no other thread.
    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(len(jobs) - 1)]
    for thread in threads:
        thread.start()
    work(len(jobs) - 1)
    try:
        for thread in threads:
            thread.join()
    except BaseException:  # Ctrl-C: end the waits of the other threads
        wire.close()
        raise
    if errors:
        raise next((error for error in errors if not isinstance(error, WireClosedError)), errors[0])
    return results


def _ready(pace: Pace | None, inputs: Any) -> float:
    if pace is not None:
        jax.block_until_ready(inputs)
    return time.perf_counter()


def _pad(pace_ms: float | None, start: float, outputs: Any) -> None:
    if pace_ms is not None:
        jax.block_until_ready(outputs)
        time.sleep(max(0.0, start + pace_ms / 1e3 - time.perf_counter()))
