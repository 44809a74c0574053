"""Where to cut a model, so that stages on devices of different speeds take the same time."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxche.averaging import is_float
from jaxche.stages._trace import as_stage, cotangents

_REPEATS = 5


def balance_stages(costs: Sequence[float], speeds: Sequence[float]) -> list[range]:
    r"""Cut a list of layers into stages, one a device, so that the slowest stage is as fast as it can be.

    .. math:: \min_{0 = c_0 < c_1 < \dots < c_S = L} \; \max_s \frac{1}{v_s} \sum_{l = c_s}^{c_{s+1} - 1} t_l

    A pipeline moves at the pace of its slowest stage, so this is the whole of its balance. Exact, by dynamic
    programming over stages and cuts in O(S L²). Every stage gets a layer, in the order of the devices: where their
    order is free, try others.

    Args:
      costs: time t of each layer, forward and backward, in any unit, on a device of speed 1: see
        :func:`measure_costs`.
      speeds: speed v of each stage's device: 2 is twice as fast as 1.

    Returns:
      For each stage, the range of its layers.

    Raises:
      ValueError: fewer layers than stages, or a number that is not positive (a cost may be 0).

    Example:
      >>> import jaxche
      >>> jaxche.balance_stages([1, 1, 1, 1, 1, 1], speeds=[2, 1])
      [range(0, 4), range(4, 6)]
    """
    for name, values, least in (("costs", costs, 0), ("speeds", speeds, None)):
        if len(values) == 0:
            raise ValueError(f"{name} is empty; write e.g. jaxche.balance_stages([1, 1, 2], speeds=[1, 1])")
        for i, value in enumerate(values):
            if not math.isfinite(value) or value < 0 or (least is None and value == 0):
                raise ValueError(f"{name}[{i}]={value!r} must be a {'positive ' if least is None else ''}number")
    layers, stages = len(costs), len(speeds)
    if layers < stages:
        raise ValueError(
            f"costs has {layers} layers for {stages} stages of speeds={list(speeds)}; every stage needs one: leave "
            "the slowest devices out, or cut the model finer"
        )
    before = np.concatenate([[0.0], np.cumsum(np.asarray(costs, np.float64))])
    # slowest[l]: the least time of the slowest of the stages so far, if they end before layer l.
    slowest = np.full(layers + 1, np.inf)
    slowest[0] = 0.0
    choices = []
    for speed in speeds:
        own = (before[None, :] - before[:, None]) / speed  # [begin, end]
        own[np.tril_indices(layers + 1)] = np.inf  # at least one layer
        times = np.maximum(slowest[:, None], own)
        choices.append(times.argmin(axis=0))
        slowest = times.min(axis=0)
    cuts = [layers]
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1]]))
    cuts.reverse()
    return [range(begin, end) for begin, end in itertools.pairwise(cuts)]


def measure_costs(stages: Sequence[Callable[..., Any]], params: Sequence[Any], batch: Any) -> list[float]:
    """Time of the forward and backward of each stage, one after the other on the device of its parameters.

    Args:
      stages: functions as for :class:`~jaxche.Partitioned`; single layers, where they are to be cut into stages.
      params: one entry a stage.
      batch: what the first takes; of the size of the micro-batches to come.

    Returns:
      Milliseconds of each, the median of a few runs after one to compile, for :func:`balance_stages`.

    Raises:
      ValueError: not one entry of ``params`` a stage.

    Example:
      >>> import jax.numpy as jnp
      >>> params = [jnp.ones(4), jnp.ones((4, 4))]
      >>> costs = measure_costs([lambda w, x: x * w, lambda w, x: x @ w], params, jnp.ones((2, 4)))
      >>> len(costs), all(cost > 0 for cost in costs)
      (2, True)
    """
    if len(stages) != len(params):
        raise ValueError(f"params: {len(params)} entries for {len(stages)} stages; give the parameters of each stage")
    costs, x = [], batch
    for index, call in enumerate(stages):
        stage = as_stage(index, call, remat=False)
        key = jax.random.key(0)

        @jax.jit
        def both(tree: Any, x: Any, key: Any, stage: Any = stage, first: bool = index == 0) -> Any:
            # The first stage has no gradient to pass on.
            wanted = (tree,) if first else (tree, x)
            y, pull = jax.vjp(lambda tree, x=x: stage(tree, x, key), *wanted)
            ones = jax.tree.map(
                lambda leaf: jax.numpy.ones_like(leaf) if is_float(leaf) else np.zeros(leaf.shape, jax.dtypes.float0), y
            )
            return y, cotangents(pull(ones))

        times = []
        for _ in range(_REPEATS + 1):
            start = time.perf_counter()
            y, _ = jax.block_until_ready(both(params[index], x, key))
            times.append((time.perf_counter() - start) * 1e3)
        costs.append(statistics.median(times[1:]))
        x = y
    return costs
