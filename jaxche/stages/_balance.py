"""From layers to stages: balance their times on devices of different speeds, and put them in order."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxche.averaging import is_float
from jaxche.messages import brief
from jaxche.sharding import check_numbers
from jaxche.stages._stage import Stage, check_arrays, check_stage_params, cotangents, evaluate_stage

Node = TypeVar("Node", bound=Hashable)

_REPEATS = 5


def balance_stages(costs: Iterable[float], speeds: Iterable[float]) -> list[range]:
    r"""Cut a list of layers into stages, one a device, so that the slowest stage is as fast as possible.

    .. math:: \min_{0 = c_0 < c_1 < \dots < c_S = L} \; \max_s \frac{1}{v_s} \sum_{l = c_s}^{c_{s+1} - 1} t_l

    The slowest stage sets the time of a pipeline. The result is exact, by dynamic programming over stages and cuts in
    O(S L²). Every stage gets at least one layer, in the order of the devices. If that order is free, try others.

    Args:
      costs: time t of each layer, forward and backward, in any unit, on a device of speed 1: see
        :func:`measure_costs`.
      speeds: speed v of each stage's device: 2 is twice as fast as 1.

    Returns:
      For each stage, the range of its layers.

    Raises:
      ValueError: fewer layers than stages, or a speed that is not positive, or a negative cost.

    Example:
      >>> import jaxche
      >>> jaxche.stages.balance_stages([1, 1, 1, 1, 1, 1], speeds=[2, 1])
      [range(0, 4), range(4, 6)]
    """
    line = "write e.g. jaxche.stages.balance_stages([1, 1, 2], speeds=[1, 1])"
    found: dict[str, list[float]] = {}
    for name, values, positive in (("costs", costs, ""), ("speeds", speeds, "positive ")):
        try:
            found[name] = [float(value) for value in values]
        except (TypeError, ValueError):
            raise ValueError(f"{name}={brief(values)} must be a list of numbers; {line}") from None
        if not found[name]:
            raise ValueError(f"{name} is empty; {line}")
        for i, number in enumerate(found[name]):
            if not math.isfinite(number) or number < 0 or (positive and number == 0):
                raise ValueError(f"{name}[{i}]={number:g} must be a {positive}number")
    costs, speeds = found["costs"], found["speeds"]
    layers, stages = len(costs), len(speeds)
    if layers < stages:
        raise ValueError(
            f"costs has {layers} layers for {stages} stages of speeds={speeds}; every stage needs one: leave "
            "the slowest devices out, or cut the model finer"
        )
    before = np.concatenate([[0.0], np.cumsum(costs)])
    # slowest[l]: the least time of the slowest stage so far, if the stages end before layer l.
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
    """Measure the forward and backward of each stage, one stage after the other, on the device of its parameters.

    Args:
      stages: functions as for :class:`~jaxche.Partitioned`, or single layers to be cut into stages.
      params: one entry a stage.
      batch: input of the first stage, of the size of a micro-batch.

    Returns:
      Milliseconds of each, the median of a few runs after compilation, for :func:`balance_stages`.

    Raises:
      ValueError: ``stages`` is no list of functions, ``params`` has another number of entries, or a stage does not
        accept its input.

    Example:
      >>> import jax.numpy as jnp
      >>> params = [jnp.ones(4), jnp.ones((4, 4))]
      >>> costs = measure_costs([lambda w, x: x * w, lambda w, x: x @ w], params, jnp.ones((2, 4)))
      >>> len(costs), all(cost > 0 for cost in costs)
      (2, True)
    """
    if not isinstance(stages, Sequence):
        raise ValueError(f"stages={brief(stages)} is no list of functions; write e.g. [f0, f1] with f(params, x)")
    check_stage_params(params, len(stages))
    check_arrays(params, "params")
    check_numbers(batch)
    check_arrays(batch, "batch")
    costs, x = [], batch
    for index, (call, tree) in enumerate(zip(stages, params, strict=True)):
        here = {device for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array) for device in leaf.devices()}
        x = jax.device_put(x, *here) if len(here) == 1 else x
        stage = Stage(index, call)
        evaluate_stage(stage, tree, x, jax.random.key(0))
        cost, x = _measure(stage, tree, x)
        costs.append(cost)
    return costs


def _measure(stage: Stage, params: Any, x: Any) -> tuple[float, Any]:
    """Milliseconds of forward and backward of a stage, and its output."""

    @jax.jit
    def forward_backward(params: Any, x: Any, key: Any) -> Any:
        # Not jax.grad, which refuses complex arrays. The first stage sends no gradient.
        wanted = (params,) if stage.index == 0 else (params, x)
        y, vjp = jax.vjp(lambda params, x=x: stage(params, x, key), *wanted)
        return y, cotangents(vjp(jax.tree.map(_ones, y)))

    key, times, y = jax.random.key(0), [], None
    for _ in range(_REPEATS + 1):
        start = time.perf_counter()
        y, _ = jax.block_until_ready(forward_backward(params, x, key))
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[1:]), y


def _ones(leaf: Any) -> Any:
    """The gradient with respect to an output; arrays that are not float have none."""
    return jnp.ones_like(leaf) if is_float(leaf) else np.zeros(leaf.shape, jax.dtypes.float0)


def order_partitions(plan: Sequence[Node], partitions: Sequence[Sequence[Node]]) -> list[list[Node]]:
    """Sort partitions by the order of their nodes in a plan.

    Args:
      plan: the nodes (layers) of the model in the order they run, each once.
      partitions: the nodes of each partition, one stretch of the plan in any order.

    Returns:
      The partitions in the order in which they run, with their nodes in the order of the plan.

    Raises:
      ValueError: a node that is claimed twice, by no partition, or that is not in the plan; a partition that is
        empty, or not one stretch of the plan; arguments that are no lists of nodes.

    Example:
      >>> order_partitions(["a", "b", "c", "d"], [["c", "d"], ["a", "b"]])
      [['a', 'b'], ['c', 'd']]
    """
    line = "write e.g. jaxche.order_partitions(['a', 'b', 'c'], [['c'], ['a', 'b']])"
    try:
        plan = list(plan)
        set(plan)
    except TypeError:
        raise ValueError(f"plan={brief(plan)} must be a list of nodes such as names; {line}") from None
    try:
        partitions = [list(nodes) for nodes in partitions]
        set().union(*partitions)
    except TypeError:
        raise ValueError(f"partitions={brief(partitions)} must be lists of nodes of the plan; {line}") from None
    position: dict[Node, int] = {}
    for i, node in enumerate(plan):
        if node in position:
            raise ValueError(f"plan has node {node!r} twice; give each layer a name of its own")
        position[node] = i
    if not partitions:
        raise ValueError("partitions is empty; write e.g. partitions=[['a', 'b'], ['c', 'd']]")
    owner: dict[Node, int] = {}
    for p, nodes in enumerate(partitions):
        if len(nodes) == 0:
            raise ValueError(f"partitions[{p}] is empty; give it at least one node of the plan, or leave it out")
        for node in nodes:
            if node not in position:
                raise ValueError(f"partitions[{p}] claims {node!r}, which is not in the plan {list(plan)!r}")
            if node in owner:
                where = f"partitions[{owner[node]}] and partitions[{p}]" if owner[node] != p else f"partitions[{p}]"
                raise ValueError(f"node {node!r} is claimed twice, by {where}; leave it in one place")
            owner[node] = p
    for node in plan:
        if node not in owner:
            raise ValueError(f"node {node!r} is claimed by no partition; add it to one of the {len(partitions)}")
    ordered = [sorted(nodes, key=position.__getitem__) for nodes in partitions]
    for p, nodes in enumerate(ordered):
        for before, after in itertools.pairwise(nodes):
            if position[after] != position[before] + 1:
                between = plan[position[before] + 1]
                raise ValueError(
                    f"partitions[{p}] is interleaved with partitions[{owner[between]}]: node {between!r} runs between "
                    f"its {before!r} and {after!r}; a partition must be one stretch of the plan"
                )
    return sorted(ordered, key=lambda nodes: position[nodes[0]])
