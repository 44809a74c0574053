"""Takes batches through the stages: parameters to their devices, a plan for each set of shapes, a wire, the loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxche.sharding import Device
from jaxche.stages._base import Protocol_, Wire
from jaxche.stages._checks import check_stage_params
from jaxche.stages._execute import Pace, StageResult, run_stage, run_together
from jaxche.stages._plan import Plan, make_plan
from jaxche.stages._trace import Stage, spec


class Runner:
    """Runs the stages of one process.

    Args:
      stages: all stages.
      loss: the loss.
      protocol: how stages communicate.
      seed: of the keys of stages that name ``rng``.
      local: the stages of this process.
      devices: the device of each stage, None for those of other processes.
      paces: wall times to pad tasks to, one a stage, or None.

    Attributes:
      next_step: one more than the last step that was run.
      peaks: for each stage, the most micro-batches whose activations it kept at once in that step.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        loss: Callable[[Any, Any], Any],
        protocol: Protocol_,
        seed: int,
        local: Sequence[int],
        devices: Sequence[Device | None],
        paces: Sequence[Pace] | None,
    ):
        self._stages, self._loss, self._protocol, self._seed = stages, loss, protocol, seed
        self._local, self._devices, self._paces = local, devices, paces
        self._wire: Wire | None = None
        self._specs: list[Any] = [None] * len(stages)
        self._plans: dict[Any, Plan] = {}
        self.next_step = 0
        self.peaks: tuple[int | None, ...] = (None,) * len(stages)
        self.wire()  # what cannot be reached is said at once

    def wire(self) -> Wire:
        """The wire, opened where it is not."""
        if self._wire is None:
            self._wire = self._protocol.wire(self._local, len(self._stages), self._devices)
        return self._wire

    def close(self) -> None:
        """Let go of the wire."""
        if self._wire is not None:
            self._wire.close()
            self._wire = None

    def by_stage(self, local: dict[int, Any]) -> tuple[Any, ...]:
        """One entry a stage; None for those of other processes."""
        return tuple(local.get(stage) for stage in range(len(self._stages)))

    def place(self, params: Sequence[Any]) -> dict[int, Any]:
        """This process's parameters on their devices; notes the shapes of all."""
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
        """The plan for these shapes, and the parameters where they belong."""
        placed = self.place(params)
        given = (tuple(self._specs), spec(batch))
        leaves, structure = jax.tree.flatten(given)
        key = (structure, *((leaf.shape, leaf.dtype) for leaf in leaves))
        if key not in self._plans:
            self._plans[key] = make_plan(
                self._stages,
                self._loss,
                self._protocol,
                self._seed,
                self._local,
                self._devices,
                *given,
            )
        return self._plans[key], placed

    def run(self, plan: Plan, step: int, placed: dict[int, Any], batch: Any) -> dict[int, StageResult]:
        """One step through the stages of this process."""
        results = self._run_tasks(plan, step, placed, batch)
        self.next_step = step + 1
        self.peaks = self.by_stage({stage: result.peak for stage, result in results.items()})
        return results

    def _run_tasks(self, plan: Plan, step: int, placed: dict[int, Any], batch: Any) -> dict[int, StageResult]:
        wire = self.wire()
        last = len(self._stages) - 1
        batches = {s: jax.device_put(batch, self._devices[s]) for s in self._local if s in (0, last)}
        jobs = [
            lambda s=stage: run_stage(
                plan.programs[s],
                plan.schedule[s],
                wire,
                step,
                placed[s],
                batches.get(s),
                plan.likes[s],
                None if self._paces is None else self._paces[s],
            )
            for stage in self._local
        ]
        try:
            return dict(zip(self._local, run_together(jobs, wire), strict=True))
        except BaseException:
            # What is still under way belongs to a step that never was: start the next one on a new wire.
            self.close()
            raise

    def share_loss(self, step: int, results: dict[int, StageResult]) -> Any:
        """The loss, told by the process of the last stage to all others."""
        last = len(self._stages) - 1
        if last not in results:
            return jnp.float32(self.wire().read_loss(step))
        loss = results[last].loss
        if len(results) <= last:
            self.wire().publish(step, float(loss))
        return loss
