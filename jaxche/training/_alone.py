"""What stands in for a merge where there is one replica: a plain training loop, of which only the numbers are read."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxche.distributed import gather_json
from jaxche.training._merge import Merged, one_row_each
from jaxche.training._place import Place, first, lift, spans_processes
from jaxche.training._programs import Local
from jaxche.training._scaling import Scaled, Scaling


class Alone:
    """The end of a round of a single replica; called like :class:`Merge`.

    Args:
      place: where it lives.
      scaling: scaling of the learning rate, or None.
    """

    def __init__(self, place: Place, scaling: Scaling | None):
        self._spans, self._scaling = spans_processes(place), scaling

    def __call__(self, starts: Sequence[Local], carries: Sequence[dict[str, Any]], rows: np.ndarray) -> Merged:
        (start,), (carry,) = starts, carries
        if self._spans:
            rows = one_row_each(np.stack(gather_json(rows.tolist()), axis=1))  # they stop together, and fail together
        local = Local(carry["params"], carry["opt_state"], carry["model_state"], start.outer_state)
        table = np.concatenate([rows, np.asarray(carry["not_finite"]), np.asarray(carry["sums"])], axis=1)
        if self._scaling is None:
            return Merged((local,), table, (0.0, 0.0))
        known = {name: carry[name] for name in ("noise", "scaled", "sums", "tracked", "params")}
        known |= {"progress": start.progress, "steps": np.float32(rows[0, 0])}
        noise, progress, told = _told(self._scaling, known)
        local = local._replace(noise=noise, progress=progress)
        return Merged((local,), table, (0.0, 0.0), Scaled(*np.asarray(told).tolist()))


@functools.partial(jax.jit, static_argnums=0)
def _told(scaling: Scaling, known: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Noise and progress after its steps, and what the round tells of its scaling."""
    scaled, progress = known["scaled"], known["progress"] + known["scaled"][:, 0]
    noise, tracked, params = first((known["noise"], known["tracked"], known["params"]))
    noise = scaling.watched(noise, tracked, known["sums"][0, 0], params)
    told = [noise.critical_batch_size, *(scaled[0] / known["steps"]), progress[0], noise.base_batch_size]
    return lift(noise), progress, jnp.stack(told)
