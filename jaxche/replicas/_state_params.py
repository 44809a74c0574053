"""The parameters in an optimizer's state, as float32 copies, the iterates of ``schedule_free``, or averages.

A leaf of ``tx.init(params)`` is one if it has the shape of a parameter and is computed from that one alone. Moments
start from shapes. Rounded codes are for moments, whose errors fade: parameters in the state are averaged as they are.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import Literal

from jaxche.replicas._schedule_counts import are_centers
from jaxche.scaling import with_extra_args


def are_params(tx: optax.GradientTransformation, params: Any) -> list[bool]:
    """Whether each leaf of ``tx.init(params)``, whose arguments may be shapes, is a parameter."""
    program, leaves = jax.make_jaxpr(tx.init)(params), jax.tree.leaves(params)
    outputs = zip(inputs_of(program.jaxpr), program.out_avals, strict=True)
    return [of.bit_count() == 1 and jnp.shape(leaves[of.bit_length() - 1]) == aval.shape for of, aval in outputs]


def stepped_params(tx: optax.GradientTransformation, params: Any) -> list[str]:
    """The paths of the parameters in the state that steps are made from: those that change, and centers."""
    wide: Any = with_extra_args(tx)
    state, found = jax.eval_shape(tx.init, params), are_params(tx, params)
    if not any(found):
        return []

    def update(state: Any, params: Any, value: Any) -> Any:
        return wide.update(params, state, params, value=value)

    program = jax.make_jaxpr(update)(state, params, jax.ShapeDtypeStruct((), jnp.float32)).jaxpr
    after = program.outvars[-len(found) :]
    read = functools.reduce(operator.or_, inputs_of(program)[: -len(found)], 0)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(state)]
    moves = [bool(read >> i & 1) and x is not y for i, (x, y) in enumerate(zip(program.invars, after, strict=False))]
    stepped = map(max, are_centers(state), moves)
    return [path for path, is_param, steps in zip(paths, found, stepped, strict=True) if is_param and steps]


def inputs_of(program: Any, inputs: Sequence[int] | None = None) -> list[int]:
    """The inputs that each output of a jaxpr is computed from, as the bits of a number, at most.

    ``inputs`` are such numbers of its own inputs, if it is part of another.
    """
    inputs = [1 << i for i, _ in enumerate(program.invars)] if inputs is None else inputs
    found = dict(zip(program.invars, inputs, strict=True))

    def read(x: Any) -> int:
        return 0 if isinstance(x, Literal) else found.get(x, 0)

    for eqn in program.eqns:
        own = list(map(read, eqn.invars))
        if eqn.primitive.name == "jit":
            outputs = inputs_of(eqn.params["jaxpr"].jaxpr, own)
        else:
            outputs = [functools.reduce(operator.or_, own, 0)] * len(eqn.outvars)
        found |= zip(eqn.outvars, outputs, strict=True)
    return list(map(read, program.outvars))
