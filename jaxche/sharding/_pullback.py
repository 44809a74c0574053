"""What reverse differentiation leaves behind, rearranged for slices: residuals and gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Literal, jaxpr_as_fun

# What merely rearranges an array. Done to a gathered parameter, its result is as large as the parameter.
_REARRANGES = ("convert_element_type", "copy", "reshape", "squeeze", "transpose")


@partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["permutation"])
@dataclass(frozen=True)
class Turned:
    """An array whose axes are yet to be put in order; a pytree of one leaf.

    Attributes:
      array: the array.
      permutation: ``array.transpose(permutation)`` is meant; None: the array itself.
    """

    array: Any
    permutation: tuple[int, ...] | None = None

    def axis(self, axis: int) -> int:
        """Where an axis of what is meant is in the array."""
        return axis if self.permutation is None else self.permutation[axis]

    def upright(self) -> Any:
        """What is meant."""
        return self.array if self.permutation is None else lax.transpose(self.array, self.permutation)


def gather_twice(forward: Callable[..., Any], gather: Callable[..., Any], params: Any) -> Any:
    """``forward(gather(params))``, ``(loss, pullback, aux)``, whose pullback has parameters gathered anew.

    Residuals that are parameters, or parameters merely rearranged, are made again of the second gather. A policy for
    ``jax.checkpoint`` could do the same, but rounds all other residuals to their own precision, which the CPU compiler
    takes for work.
    """
    leaves, treedef = jax.tree.flatten(gather(params))
    closed, shapes = jax.make_jaxpr(lambda *leaves: forward(treedef.unflatten(leaves)), return_shape=True)(*leaves)
    made: dict[Any, Any] = {var: (i, ()) for i, var in enumerate(closed.jaxpr.invars)}  # of which, by what
    for equation in closed.jaxpr.eqns:
        source = equation.invars[0] if equation.invars else None
        if equation.primitive.name in _REARRANGES and not isinstance(source, Literal) and source in made:
            i, before = made[source]
            made[equation.outvars[0]] = i, (*before, equation)
    structure = jax.tree.structure(shapes)
    loss, pullback, aux = structure.unflatten(jaxpr_as_fun(closed)(*leaves))
    _, kept, _ = structure.unflatten(closed.jaxpr.outvars)
    # Not before the forward pass is done: in between, only slices are kept.
    params, loss = lax.optimization_barrier((params, loss))
    again = jax.tree.leaves(gather(params))

    def remake(var: Any, residual: Any) -> Any:
        if isinstance(var, Literal) or var not in made:
            return residual
        i, equations = made[var]
        x = again[i]
        for equation in equations:
            x = equation.primitive.bind(x, **equation.params)
        return x

    residuals, outer = jax.tree.flatten(pullback)
    pairs = zip(jax.tree.leaves(kept), residuals, strict=True)
    return loss, outer.unflatten([remake(var, residual) for var, residual in pairs]), aux


def pull_back(pullback: Callable[..., Any], cotangent: Any) -> Any:
    """Gradients as a tree of :class:`Turned`: a transposition that comes last is left to be done to slices.

    The gradient of a matrix product ends in one. Before a reduce-scatter it is the whole array that is turned; and some
    compilers then choose a slower product to spare the turn.
    """
    treedef = None

    def flat(cotangent: Any) -> list[Any]:
        nonlocal treedef
        leaves, treedef = jax.tree.flatten(pullback(cotangent)[0])
        return leaves

    closed = jax.make_jaxpr(flat)(cotangent)
    last = {
        equation.outvars[0]: equation.params["permutation"]
        for equation in closed.jaxpr.eqns
        if equation.primitive.name == "transpose"
    }
    turned = []
    for var, x in zip(closed.jaxpr.outvars, jaxpr_as_fun(closed)(cotangent), strict=True):
        permutation = None if isinstance(var, Literal) else last.get(var)
        if permutation is None:
            turned.append(Turned(x))
        else:  # undone: the compiler drops both
            undo = tuple(int(i) for i in np.argsort(permutation))
            turned.append(Turned(lax.transpose(x, undo), tuple(permutation)))
    assert treedef is not None  # make_jaxpr has called flat
    return treedef.unflatten(turned)
