"""The arrays of an optimizer's state by what they are: counts, keys, parameters, and what a merge must not average.

Schedules count the batches of all replicas, moments their own updates. A schedule in ``tx`` is a function of a count in
the optimizer state. On one device it counts the updates, one per batch. With several replicas it counts those of all
replicas: in a round of N steps in total and n of this replica, the count advances by N/n at each step, and after the
merge it is equal on all replicas. If gradients are averaged, the one update of the round advances it by N, and an
update of ``optax.MultiSteps`` by the batches since the last one over its number of mini-steps. Counts of moments, such
as that of Adam's bias correction, count updates.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import Literal

from jaxche.averaging import is_float
from jaxche.scaling import with_extra_args

# The counts of schedules, by the class of the state. A user's transformation with such a count keeps it in an
# optax.ScaleByScheduleState.
_SCHEDULES = {
    "AddNoiseState": ("count",),
    "InjectHyperparamsState": ("count",),
    "InjectStatefulHyperparamsState": ("count",),
    "MomoState": ("count",),
    "MultiStepsState": ("gradient_step",),
    "ScaleByAdemamixState": ("count_m2",),
    "ScaleByScheduleState": ("count",),
    "ScheduleFreeState": ("step_count",),
    "WeightDecaySchedule": ("count",),
    "WrappedScheduleState": ("count",),
}

# What accumulates gradients, by the class of the state: each replica has gathered its own number of them.
_ACCUMULATORS = {
    "AccumulateAvgUpdatesState": ("micro_step", "avg_grad"),
    "ApplyEvery": ("count", "grad_acc"),
    "MultiStepsState": ("mini_step", "acc_grads"),
}

# What an optimizer compares over many steps. It belongs together: the mean of two windows of losses, one of which has
# just ended, is neither, and that of a best loss and none yet is infinite.
_PLATEAUS = {
    "ReduceLROnPlateauState": ("best_value", "plateau_count", "scale", "cooldown_count", "count", "avg_value"),
}

# Numbers that a user gives and may change in the state.
_HYPERPARAMS = {"InjectHyperparamsState": ("hyperparams",), "InjectStatefulHyperparamsState": ("hyperparams",)}

# The parameters at the start: each step adds something to these, and nothing to the present ones.
_CENTERS = {"COCOBState": ("init_particles",), "MadgradState": ("x0",)}

# Moments of projected gradients. Each replica projects its gradients onto a subspace that it computes from them.
_SUBSPACES = {"GaLoreState": ("base_optimizer_state", "count", "projector")}

# Of threefry, and of the other generators.
_KEY_WORDS = (2, 4)


def counts_of(opt_state: Any) -> list[Any]:
    """The counts in an optimizer's state: its signed integer scalars, with or without a replica axis."""
    return [leaf for leaf in jax.tree.leaves(opt_state) if is_count(leaf)]


def select_counts(opt_state: Any, of_leaves: Sequence[Any]) -> list[Any]:
    """Those of the values for each leaf of the state that are for :func:`counts_of`."""
    return [one for one, leaf in zip(of_leaves, jax.tree.leaves(opt_state), strict=True) if is_count(leaf)]


def with_counts(opt_state: Any, counts: Sequence[Any]) -> Any:
    """The state with other counts, in the order of :func:`counts_of`."""
    left = iter(counts)
    return jax.tree.map(lambda leaf: next(left) if is_count(leaf) else leaf, opt_state)


def are_schedules(opt_state: Any) -> list[bool]:
    """Whether a schedule depends on each of :func:`counts_of`."""
    return [bool(unit) for unit in _schedule_units(opt_state)]


def are_after_several(opt_state: Any) -> list[bool]:
    """Whether each of :func:`counts_of` is of a schedule that counts updates of several batches each."""
    return [unit == "accumulated" for unit in _schedule_units(opt_state)]


def are_accumulators(opt_state: Any) -> list[bool]:
    """Whether each leaf is of gradients that an optimizer accumulates; they stay with their replica at a merge.

    The mean with a replica that has just applied its own would lose them.
    """
    return _are(_ACCUMULATORS, opt_state)


def are_plateaus(opt_state: Any) -> list[bool]:
    """Whether each leaf is of an ``optax.contrib.reduce_on_plateau``; a merge takes them from one replica."""
    return _are(_PLATEAUS, opt_state)


def are_hyperparams(opt_state: Any) -> list[bool]:
    """Whether each leaf is a number that ``optax.inject_hyperparams`` holds, such as a learning rate."""
    return _are(_HYPERPARAMS, opt_state)


def are_centers(opt_state: Any) -> list[bool]:
    """Whether each leaf is of the parameters at the start, from which an optimizer computes the next ones."""
    return _are(_CENTERS, opt_state)


def are_subspaces(opt_state: Any) -> list[bool]:
    """Whether each leaf is of moments of projected gradients, which replicas project onto different subspaces."""
    return _are(_SUBSPACES, opt_state)


def _are(fields: Mapping[str, Sequence[str]], opt_state: Any) -> list[bool]:
    """Whether each leaf is in one of these fields of a state."""
    return [bool(unit) for unit in jax.tree.leaves(_units(opt_state, fields))]


def add_steps(count: Any, steps: Any) -> Any:
    """A count after further steps, or fewer if it began again; it stays at the largest number, as in optax."""
    most, steps = jnp.iinfo(count.dtype).max, steps.astype(count.dtype)
    return jnp.where(count > most - jnp.maximum(steps, 0), most, count + steps)


def update_in_round(
    update: Callable[[Any], tuple[Any, Any]], opt_state: Any, start: Sequence[Any], stride: Any
) -> tuple[Any, Any]:
    """``update(opt_state) -> (params, opt_state)`` within a round: schedules see the steps of all replicas.

    ``start`` are :func:`counts_of` the state at the start of the round, and ``stride`` is the number of steps of all
    replicas per step of this one; None if no schedule needs them. In the state itself a count still counts own steps.
    """
    if stride is None:
        return update(opt_state)
    scheduled, own = are_schedules(opt_state), counts_of(opt_state)
    seen = [
        add_steps(first, jnp.round((count - first).astype(jnp.float32) * stride)) if is_schedule else count
        for count, first, is_schedule in zip(own, start, scheduled, strict=True)
    ]
    params, updated = update(with_counts(opt_state, seen))
    counts = [
        count + new - old if is_schedule else new
        for count, old, new, is_schedule in zip(own, seen, counts_of(updated), scheduled, strict=True)
    ]
    return params, with_counts(updated, counts)


def advance_by_batches(batches: Any, before: Any, after: Any, accumulated: Any) -> tuple[Any, Any]:
    """The state after an update with gradients of several batches, and the batches then pending in ``MultiSteps``."""
    batches, accumulated = (jnp.asarray(n).astype(jnp.int32) for n in (batches, accumulated))
    per_step = jnp.int32(0)
    if (old := _accumulation(before)) is not None and (new := _accumulation(after)) is not None:
        updates, n_steps = new.gradient_step - old.gradient_step, old.mini_step + 1
        # A state that the user gave, or one of local steps, has made its mini-steps from at least a batch each.
        accumulated = jnp.maximum(accumulated, old.mini_step)
        # A mini-step that MultiSteps skips does not count.
        accumulated = accumulated + jnp.where((updates > 0) | (new.mini_step != old.mini_step), batches, 0)
        per_step = accumulated // n_steps
        accumulated = accumulated - updates * n_steps * per_step
    increments = {"update": batches, "accumulated": per_step}
    found = zip(counts_of(before), counts_of(after), _schedule_units(before), strict=True)
    counts = [add_steps(a, (b - a) * increments[unit].astype(a.dtype)) if unit else b for a, b, unit in found]
    return with_counts(after, counts), accumulated


def is_count(leaf: Any) -> bool:
    """Whether an array in an optimizer's state is a count."""
    # The size first: it rules out most arrays, and sooner.
    return getattr(leaf, "size", 0) == 1 and jnp.issubdtype(getattr(leaf, "dtype", object), jnp.signedinteger)


def is_merged(leaf: Any) -> bool:
    """Whether a merge of optimizer states takes the mean of an array, or its vote; others stay with their replica."""
    return is_float(leaf) or is_count(leaf) or leaf.dtype == bool


def are_keys(opt_state: Any) -> list[bool]:
    """Whether each array of an optimizer's state is a random key, typed or as the words of one."""
    return [
        jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        or (leaf.dtype == jnp.uint32 and leaf.ndim > 0 and leaf.shape[-1] in _KEY_WORDS)
        for leaf in jax.tree.leaves(opt_state)
    ]


def _is_accumulation(node: Any) -> bool:
    return isinstance(node, optax.MultiStepsState)


def _accumulation(opt_state: Any) -> Any:
    """The state of the first ``MultiSteps`` of an optimizer, or None."""
    return next(filter(_is_accumulation, jax.tree.leaves(opt_state, is_leaf=_is_accumulation)), None)


def _schedule_units(opt_state: Any) -> list[str]:
    """The unit of each of :func:`counts_of`: "update", "accumulated", or "" without a schedule."""
    return select_counts(opt_state, jax.tree.leaves(_units(opt_state, _SCHEDULES)))


def _units(tree: Any, fields: Mapping[str, Sequence[str]], unit: str = "update") -> Any:
    """The tree with a unit for each leaf in these fields of these classes, and "" for every other leaf."""

    def is_found(node: Any) -> bool:
        return isinstance(node, tuple) and type(node).__name__ in fields

    def units(node: Any) -> Any:
        if not is_found(node):
            return ""
        inner = "accumulated" if _is_accumulation(node) else unit
        parts = {
            name: jax.tree.map(lambda _: inner, part)
            if name in fields[type(node).__name__]
            else _units(part, fields, inner)
            for name, part in node._asdict().items()
        }
        return node._replace(**parts)

    return jax.tree.map(units, tree, is_leaf=is_found)


def are_params(tx: optax.GradientTransformation, params: Any) -> list[bool]:
    """Whether each leaf of ``tx.init(params)``, whose arguments may be shapes, is a parameter.

    As float32 copies, the iterates of ``schedule_free``, or averages are: it has the shape of a parameter and is
    computed from that one alone, and moments start from shapes. Rounded codes are for moments, whose errors fade:
    parameters in the state are averaged as they are.
    """
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
