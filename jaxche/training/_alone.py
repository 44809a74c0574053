"""What stands in for a merge where there is one replica: a plain training loop, of which only the numbers are read."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxche.distributed import Group
from jaxche.training._merge import Merged, one_row_each
from jaxche.training._place import Place, first, lift, spans_processes
from jaxche.training._programs import Carry, Local
from jaxche.training._scaling import Scaled, Scaling


class Alone:
    """The end of a round of a single replica; called like :class:`Merge`.

    Args:
      group: the processes of the run.
      place: where it lives.
      scaling: scaling of the learning rate, or None.
    """

    def __init__(self, group: Group, place: Place, scaling: Scaling | None):
        self._group = group
        self._spans, self._scaling = spans_processes(place), scaling

    def __call__(self, starts: Sequence[Local], carries: Sequence[Carry], rows: np.ndarray) -> Merged:
        (start,), (carry,) = starts, carries
        if self._spans:
            rows = one_row_each(
                np.stack(self._group.all_gather(rows.tolist()), axis=1)
            )  # they stop together, and fail together
        local = Local(carry.params, carry.opt_state, carry.model_state, start.outer_state)
        table = np.concatenate([rows, np.asarray(carry.not_finite), np.asarray(carry.sums)], axis=1)
        if self._scaling is None:
            return Merged((local,), table, (0.0, 0.0))
        # Without what the next state takes as it is.
        told_of = carry._replace(opt_state=None, model_state=None)
        noise, progress, told = _told(self._scaling, told_of, start.progress, np.float32(rows[0, 0]))
        local = local._replace(noise=noise, progress=progress)
        return Merged((local,), table, (0.0, 0.0), Scaled(*np.asarray(told).tolist()))


@functools.partial(jax.jit, static_argnums=0)
def _told(scaling: Scaling, carry: Carry, progress: Any, steps: Any) -> tuple[Any, Any, Any]:
    """Noise and progress after its steps, and what the round tells of its scaling."""
    progress = progress + carry.scaled[:, 0]
    noise, tracked, params = first((carry.noise, carry.tracked, carry.params))
    noise = scaling.watched(noise, tracked, carry.sums[0, 0], params)
    told = [noise.critical_batch_size, *(carry.scaled[0] / steps), progress[0], noise.base_batch_size]
    return lift(noise), progress, jnp.stack(told)
