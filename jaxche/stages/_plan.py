"""All that is decided and compiled for one set of shapes, before anything is computed or sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jaxche.sharding import Device, batch_size
from jaxche.stages._alike import Unlike, check_places, entry_of
from jaxche.stages._base import Protocol_
from jaxche.stages._checks import check_cut
from jaxche.stages._program import Cut, StageProgram, StageSpec
from jaxche.stages._schedule import SCHEDULES, Schedule
from jaxche.stages._spmd import OneProgram
from jaxche.stages._trace import Stage, micro_spec, trace_stages

# Where a forward takes more, programs of their own were as fast or faster: scripts/bench_partitions.py --only spmd.
_MOST_FLOPS = 5e6


class Plan(NamedTuple):
    """How batches of one shape are worked off.

    Attributes:
      schedule: the tasks of all stages.
      programs: the programs of each stage of this process.
      likes: for each of them the specs of its input (None for the first) and of its output (None for the last).
      whole: the one program of all stages, in the place of those, or None.
      path: which of the two, and why.
    """

    schedule: Schedule
    programs: dict[int, StageProgram]
    likes: dict[int, tuple[Any, Any]]
    whole: OneProgram | None
    path: str


def make_plan(
    stages: Sequence[Stage],
    loss: Callable[[Any, Any], Any],
    protocol: Protocol_,
    seed: int,
    local: Sequence[int],
    devices: Sequence[Device | None],
    params: Sequence[Any],
    batch: Any,
    paced: bool,
) -> Plan:
    """Trace all stages, compile those of this process.

    Args:
      stages: the stages.
      loss: the loss.
      protocol: says how a batch is cut and in which order its parts are worked off.
      seed: of the keys.
      local: the stages of this process.
      devices: the device of each stage, None for those of other processes.
      params: spec of each stage's parameters.
      batch: spec of the batch.
      paced: whether tasks are padded to wall times, which takes programs of their own.

    Raises:
      ValueError: a batch that micro-batches do not divide, or a stage that does not accept what it is given.
    """
    cut = Cut(None, 1)
    if (size := protocol.micro_batch_size) is not None:
        examples = batch_size(batch)
        check_cut(size, examples)
        if size < examples:
            cut = Cut(size, examples // size)
    outputs = trace_stages(stages, loss, params, micro_spec(batch, cut.size))
    last = len(stages) - 1
    schedule = SCHEDULES[protocol.schedule](last + 1, cut.count)
    cutting = f"{last + 1} stages, {cut.count} micro-batch{'es' * (cut.count > 1)}"
    cutting += f" of {cut.size}, {protocol.schedule}" if cut.size else ""
    try:
        entry = _entry(protocol, stages, devices, cut, params, micro_spec(batch, cut.size), outputs, paced)
        whole = OneProgram(stages[1], entry, loss, seed, devices, cut, schedule, params[1], outputs[0], batch)
        return Plan(schedule, {}, {}, whole, f"{cutting}: one program over {last + 1} devices, all stages alike")
    except Unlike as error:
        path = f"{cutting}: programs of their own for each stage, because {error}"
    programs, likes = {}, {}
    for stage in local:
        x = outputs[stage - 1] if stage > 0 else None
        out = outputs[stage] if stage < last else None
        given = StageSpec(params[stage], x, batch if stage in (0, last) else None, out)
        own_loss = loss if stage == last else None
        programs[stage] = StageProgram(stages[stage], own_loss, seed, devices[stage], cut, given)
        likes[stage] = (x, out)
    return Plan(schedule, programs, likes, None, path)


def _entry(
    protocol: Any,
    stages: Sequence[Stage],
    devices: Sequence[Device | None],
    cut: Cut,
    params: Sequence[Any],
    batch: Any,
    outputs: Sequence[Any],
    paced: bool,
) -> tuple[int, ...]:
    """Where the one program of all stages begins to read; refused where there is none, or where it is no faster."""
    wanted = getattr(protocol, "one_program", False)
    try:
        if wanted is False:
            raise Unlike(f"{type(protocol).__name__} goes by wires")
        if cut.count == 1:
            raise Unlike("there is one micro-batch")
        if paced:
            raise Unlike("tasks are paced")
        check_places(stages, devices)
        entry = entry_of(stages, params, batch, outputs)
    except Unlike as error:
        if wanted:
            raise ValueError(
                f"one_program=True, but {error}; leave one_program out, or make all stages alike, each on a device of "
                "its own"
            ) from error
        raise
    if wanted is None and _forward_flops(stages[1], params[1], outputs[0]) > _MOST_FLOPS:
        raise Unlike("their tasks are so large that one program is no faster (one_program=True makes one all the same)")
    return entry


def _forward_flops(stage: Stage, params: Any, x: Any) -> float:
    key = jax.eval_shape(lambda: jax.random.key(0))
    found: Any = jax.jit(stage.__call__).lower(params, x, key).cost_analysis()
    return float((found or {}).get("flops", float("inf")))
