"""Whether all stages compute the same, so that one program can be all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from jaxche.sharding import Device
from jaxche.stages._trace import Stage, cotangents

# Parameters that say nothing about values: what an inner function is called, and how it would be differentiated, which
# here has happened already.
_UNREAD = {"name", "jvp_jaxpr_fun", "jvp_jaxpr_thunk", "fwd_jaxpr_thunk", "bwd"}


class Unlike(Exception):
    """Why stages do not compute the same."""


def entry_of(stages: Sequence[Stage], params: Sequence[Any], batch: Any, outputs: Sequence[Any]) -> tuple[int, ...]:
    """Which leaves of the batch are to the first stage what its input is to each other.

    Stages are alike if their forwards and backwards are the same operations on arrays of the same shapes and dtypes,
    wherever their functions were written; the first may take its input out of a larger batch.

    Args:
      stages: the stages.
      params: spec of each one's parameters.
      batch: spec of a micro-batch.
      outputs: spec of what each gives.

    Raises:
      Unlike: they are not; says which one.
    """
    second = stages[1]
    for stage in stages[1:]:
        if outputs[stage.index] != outputs[0]:
            raise Unlike(f"{stage.name} gives other shapes than {stages[0].name}")
    for stage in stages:
        if params[stage.index] != params[1]:
            raise Unlike(f"{stage.name} has other parameters than {second.name}")
        if stage.remat != second.remat:
            raise Unlike(f"{stage.name} has another remat than {second.name}")
    x = jax.tree.leaves(outputs[0])
    leaves = jax.tree.leaves(batch)
    wanted = _gradient(second, params[1], outputs[0], range(len(x)))
    for stage in stages[2:]:
        if stage.call is not second.call and not _equal(
            _gradient(stage, params[1], outputs[0], range(len(x))), wanted, range(len(wanted.jaxpr.invars))
        ):
            raise Unlike(f"{stage.name} computes something else than {second.name}")
    entry = _leaves_read(stages[0], params[0], batch)
    if [leaves[i] for i in entry] != x:
        raise Unlike(f"{stages[0].name} reads something else of the batch than what {second.name} takes")
    first = _gradient(stages[0], params[0], batch, entry)
    begin = len(jax.tree.leaves(params[0]))
    # Inputs in the order of the second: parameters, what is read, the key.
    order = [*range(begin), *(begin + i for i in entry), begin + len(leaves)]
    if not _equal(first, wanted, order):
        raise Unlike(f"{stages[0].name} computes something else than {second.name}")
    return entry


def check_places(stages: Sequence[Stage], devices: Sequence[Device | None]) -> None:
    """One program spans devices of one kind and of this process, each once.

    Raises:
      Unlike: these are not so.
    """
    if None in devices:
        raise Unlike("some stages are in other processes")
    if len(stages) == 1:
        raise Unlike("there is one stage")
    if len(set(devices)) < len(devices):
        raise Unlike("a device holds several stages")
    if len({(device.platform, device.device_kind) for device in devices if device is not None}) > 1:
        raise Unlike("the devices are of different kinds")


def _leaves_read(stage: Stage, params: Any, batch: Any) -> tuple[int, ...]:
    key = jax.eval_shape(lambda: jax.random.key(0))
    made = jax.make_jaxpr(stage.__call__)(params, batch, key).jaxpr
    begin = len(jax.tree.leaves(params))
    given = made.invars[begin:-1]
    read = {id(v) for eqn in made.eqns for v in eqn.invars} | {id(v) for v in made.outvars}
    return tuple(i for i, var in enumerate(given) if id(var) in read)


def _gradient(stage: Stage, params: Any, x: Any, by: Sequence[int]) -> ClosedJaxpr:
    """The operations of a stage's forward and of its backward to its parameters and to some leaves of its input."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    leaves, structure = jax.tree.flatten(x)

    def both(params: Any, leaves: list[Any], key: Any) -> Any:
        def call(params: Any, some: list[Any]) -> Any:
            given = dict(enumerate(leaves)) | dict(zip(by, some, strict=True))
            return stage(params, jax.tree.unflatten(structure, [given[i] for i in range(len(leaves))]), key)

        y, pull = jax.vjp(call, params, [leaves[i] for i in by])
        ones = jax.tree.map(
            lambda y, g: np.zeros(y.shape, jax.dtypes.float0) if g is None else jax.numpy.ones_like(g), y, cotangents(y)
        )
        return y, cotangents(pull(ones))

    made = jax.make_jaxpr(both)(params, leaves, key)
    if made.effects:
        raise Unlike(f"{stage.name} has effects beside what it gives")
    return made


def _equal(a: ClosedJaxpr, b: ClosedJaxpr, order: Sequence[int]) -> bool:
    """Whether two programs are the same operations, the inputs of one being those of the other in some order."""
    names = dict(zip(b.jaxpr.invars, (a.jaxpr.invars[i] for i in order), strict=True))
    same = all(x.aval == y.aval for x, y in names.items())
    return same and _values(a.consts, b.consts) and _equal_within(a.jaxpr, b.jaxpr, names)


def _equal_within(a: Jaxpr, b: Jaxpr, names: dict[Any, Any]) -> bool:
    names = names | dict(zip(b.constvars, a.constvars, strict=True))

    def same(x: Any, y: Any) -> bool:
        if isinstance(x, Literal) or isinstance(y, Literal):
            literals = isinstance(x, Literal) and isinstance(y, Literal)
            return literals and x.aval == y.aval and _values(x.val, y.val)
        return names[y] is x

    def all_same(xs: Sequence[Any], ys: Sequence[Any]) -> bool:
        return len(xs) == len(ys) and all(map(same, xs, ys))

    if len(a.eqns) != len(b.eqns):
        return False
    for e, f in zip(a.eqns, b.eqns, strict=True):
        if e.primitive is not f.primitive or not all_same(e.invars, f.invars) or not _values(e.params, f.params):
            return False
        if [v.aval for v in e.outvars] != [v.aval for v in f.outvars]:
            return False
        names |= dict(zip(f.outvars, e.outvars, strict=True))
    return all_same(a.outvars, b.outvars)


def _values(a: Any, b: Any) -> bool:
    """Whether two parameters of operations are the same; what cannot be compared is not."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, ClosedJaxpr):
        sizes = len(a.jaxpr.invars) == len(b.jaxpr.invars) and len(a.consts) == len(b.consts)
        return sizes and _equal(a, b, range(len(a.jaxpr.invars)))
    if isinstance(a, Jaxpr):
        sizes = len(a.invars) == len(b.invars) and len(a.constvars) == len(b.constvars)
        return sizes and _equal_within(a, b, dict(zip(b.invars, a.invars, strict=True)))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_values(a[k], b[k]) for k in a if k not in _UNREAD)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_values, a, b))
    if isinstance(a, (np.ndarray, jax.Array)):
        return a.dtype == b.dtype and np.array_equal(a, b)
    return bool(a == b)
