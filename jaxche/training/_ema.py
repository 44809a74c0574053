"""The moving averages of the replicas of this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from jaxche.averaging import ema_step, ema_values
from jaxche.replicas import LocalState, Placement
from jaxche.training._engine import Engine
from jaxche.training._stages import StagedPlacement
from jaxche.training._state import TrainerState


def with_ema_step(engine: Engine, local_states: Sequence[LocalState], weight: float) -> tuple[LocalState, ...]:
    """The local states whose averages have taken in their parameters with this weight."""
    stepped = []
    for _, placement, local in engine.here(local_states):
        made = [_step(*trees, weight) for _, *trees in _stages(placement, local)]
        stepped.append(local._replace(ema=tuple(made) if _is_staged(placement) else made[0]))
        stepped[-1].views = local.views  # which have no averages
    return tuple(stepped)


def with_ema_values(engine: Engine, state: TrainerState) -> TrainerState:
    """The state with the averages in place of parameters and model state, if it has any."""
    if not jax.tree.leaves(state.local_states[0].ema):
        return state
    state, local_states = state.merged(), []
    engine.lay_out(state.local_states)
    for _, placement, local in engine.here(state.local_states):
        made = []
        for one, *trees in _stages(placement, local):
            params, model_state = _values(*trees)
            made.append(one.move({"params": params, "model_state": model_state}))
        params = tuple(one["params"] for one in made) if _is_staged(placement) else made[0]["params"]
        local_states.append(local._replace(params=params, model_state=made[0]["model_state"]))
    return replace(state, local_states=tuple(local_states))


def _is_staged(placement: Any) -> bool:
    return isinstance(placement, StagedPlacement)


def _stages(placement: Any, local: LocalState) -> list[tuple[Placement, Any, Any]]:
    """Placement, average and averaged trees of each stage of a replica; of one stage if it has none."""
    if not _is_staged(placement):
        return [(placement, local.ema, (local.params, local.model_state))]
    stages = zip(placement.by_stage, local.ema, local.params, strict=True)
    return [(one, ema, (params, None)) for one, ema, params in stages]


_step, _values = jax.jit(ema_step), jax.jit(ema_values)
