"""Stacked layers: parameters that a scan reads one layer at a time are gathered in the scan, and not before it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from jaxche.sharding._gather import REARRANGES

# What makes a layer of what the scan has of it, as a gather of slices does.
Gather = Callable[[Any], Any]
# Primitives whose results the backward pass of a layer computes again: a gather, and what only rearranges its result.
_AGAIN = ("all_gather", *REARRANGES)
# Primitives that may as well come after the gather; those that call a jaxpr; and the one of jax.checkpoint among them.
_CASTS, _REMAT = ("convert_element_type", "copy"), "remat2"
_CALLS = ("jit", _REMAT)


def read_by_layer(jaxpr: Jaxpr, inputs: Collection[int]) -> set[int]:
    """Those of these inputs of which only scans read, one slice of the first axis in each turn."""
    numbers = {jaxpr.invars[i]: i for i in inputs}
    found = set(inputs)
    for equation in jaxpr.eqns:
        given = {i: numbers[var] for i, var in _variables(equation.invars) if var in numbers}
        if given and equation.primitive.name in _CASTS:
            numbers[equation.outvars[0]] = given[0]
            continue
        found -= {number for i, number in given.items() if i not in _layered(equation, given)}
    return found - {numbers.get(var) for _, var in _variables(jaxpr.outvars)}


def gathered_by_layer(closed: ClosedJaxpr, gathers: Mapping[int, Gather]) -> Callable[..., list[Any]]:
    """The function of a jaxpr that takes slices for some of its inputs, which are gathered in the scans that read them.

    The backward pass gathers each layer again, so that no whole layer is kept in between.
    """
    return lambda *values: _run(closed.jaxpr, closed.consts, values, gathers)


def _variables(atoms: Sequence[Any]) -> list[tuple[int, Any]]:
    return [(i, atom) for i, atom in enumerate(atoms) if not isinstance(atom, Literal)]


def _called(equation: Any) -> tuple[Jaxpr, Sequence[Any]]:
    """The jaxpr that an equation calls, and its constants."""
    jaxpr = equation.params["jaxpr"]
    return (jaxpr.jaxpr, jaxpr.consts) if isinstance(jaxpr, ClosedJaxpr) else (jaxpr, ())


def _layered(equation: Any, inputs: Collection[int]) -> set[int]:
    """Those of these inputs of an equation that :func:`read_by_layer` finds in it."""
    name = equation.primitive.name
    if name == "scan" and not _called(equation)[0].effects:  # which jax.checkpoint refuses
        return {i for i in inputs if i >= sum(_counts(equation))}
    return read_by_layer(_called(equation)[0], inputs) if name in _CALLS else set()


def _counts(equation: Any) -> tuple[int, int]:
    """How many inputs of a scan are constants, and how many are carried; the others are its slices."""

    def alike(outer: Sequence[Any], inner: Sequence[Any]) -> int:
        return sum(one.aval.ndim == other.aval.ndim for one, other in zip(outer, inner, strict=True))

    body, _ = _called(equation)
    carries = alike(equation.outvars, body.outvars)
    return alike(equation.invars, body.invars) - carries, carries


def _run(jaxpr: Jaxpr, consts: Sequence[Any], values: Sequence[Any], gathers: Mapping[int, Gather]) -> list[Any]:
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *values], strict=True))
    marked = {jaxpr.invars[i]: gather for i, gather in gathers.items()}

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else known[atom]

    for equation in jaxpr.eqns:
        own = {i: marked[var] for i, var in _variables(equation.invars) if var in marked}
        inputs = list(map(read, equation.invars))
        if own and equation.primitive.name in _CASTS:
            (known[equation.outvars[0]],), marked[equation.outvars[0]] = inputs, _cast_after(own[0], equation)
            continue
        with equation.ctx.manager:
            known |= zip(equation.outvars, _results(equation, inputs, own), strict=True)
    return list(map(read, jaxpr.outvars))


def _cast_after(gather: Gather, equation: Any) -> Gather:
    return lambda x: equation.primitive.bind(gather(x), **equation.params)


def _results(equation: Any, inputs: list[Any], gathers: Mapping[int, Gather]) -> Sequence[Any]:
    primitive, parameters = equation.primitive, equation.params
    if not gathers:
        found = primitive.bind(*inputs, **primitive.get_bind_params(parameters))
        return found if primitive.multiple_results else [found]
    if primitive.name == "scan":
        return _scan(equation, inputs, gathers)

    def call(*values: Any) -> list[Any]:
        return _run(*_called(equation), values, gathers)

    if primitive.name == _REMAT:
        call = jax.checkpoint(call, prevent_cse=parameters["prevent_cse"], policy=parameters["policy"])
    return call(*inputs)


def _scan(equation: Any, inputs: list[Any], gathers: Mapping[int, Gather]) -> list[Any]:
    (consts, carries), parameters = _counts(equation), equation.params
    body = jaxpr_as_fun(parameters["jaxpr"])

    def layer(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        values = [*inputs[:consts], *carry, *slices]
        for i, gather in gathers.items():
            values[i] = gather(values[i])
        found = body(*values)
        return list(found[:carries]), list(found[carries:])

    rest = inputs[consts:]
    layer = jax.checkpoint(layer, prevent_cse=False, policy=lambda primitive, *_, **__: primitive.name not in _AGAIN)
    how = {name: parameters[name] for name in ("length", "reverse", "unroll")}
    carry, kept = lax.scan(layer, rest[:carries], rest[carries:], **how)
    return [*carry, *kept]
