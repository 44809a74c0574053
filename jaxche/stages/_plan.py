"""All that is decided and compiled for one set of shapes, before anything is computed or sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxche.sharding import Device, batch_size
from jaxche.stages._base import Protocol_
from jaxche.stages._checks import check_cut
from jaxche.stages._program import Cut, StageProgram, StageSpec
from jaxche.stages._schedule import SCHEDULES, Schedule
from jaxche.stages._trace import Stage, micro_spec, trace_stages


class Plan(NamedTuple):
    """How batches of one shape are worked off.

    Attributes:
      schedule: the tasks of all stages.
      programs: the programs of each stage of this process.
      likes: for each of them the specs of its input (None for the first) and of its output (None for the last).
      path: the number of stages and micro-batches, and the schedule.
    """

    schedule: Schedule
    programs: dict[int, StageProgram]
    likes: dict[int, tuple[Any, Any]]
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
    path = f"{last + 1} stages, {cut.count} micro-batch{'es' * (cut.count > 1)}"
    path += f" of {cut.size}, {protocol.schedule}" if cut.size else ""
    programs, likes = {}, {}
    for stage in local:
        x = outputs[stage - 1] if stage > 0 else None
        out = outputs[stage] if stage < last else None
        given = StageSpec(params[stage], x, batch if stage in (0, last) else None, out)
        own_loss = loss if stage == last else None
        programs[stage] = StageProgram(stages[stage], own_loss, seed, devices[stage], cut, given)
        likes[stage] = (x, out)
    return Plan(schedule, programs, likes, path)
