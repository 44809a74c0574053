"""The compiled programs of a replica's local steps, and the state, constants and carry of a round."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jaxche.averaging import add_weighted, is_float, zero_sums
from jaxche.replicas._compilation import Compilations
from jaxche.replicas._opt_state import are_schedules, counts_of, update_in_round
from jaxche.replicas._packing import SMALL_BYTES, Deferred, Packed, Packing, marked, with_large, without_large
from jaxche.replicas._placement import TREES, DevicePlacement, Placement, add_replica_axis, drop_replica_axis
from jaxche.replicas._scaling import MergeScale, Scaling
from jaxche.replicas._table import Columns
from jaxche.scaling import with_extra_args
from jaxche.sharding import Loss, as_loss, batch_size, mean_of


def all_finite(tree: Any) -> Any:
    """Whether every number of the tree is finite."""
    # x - x is 0 if x is finite and else NaN; this sum is three times as fast as all(isfinite(x)).
    sums = [jnp.abs(jnp.sum(x - x)).astype(jnp.float32) for x in jax.tree.leaves(tree) if is_float(x)]
    return jnp.sum(jnp.stack([jnp.float32(0), *sums])) == 0


def stayed_finite(before: Any, after: Any) -> Any:
    """Whether every finite number is still finite; a state may start with an infinite best value."""

    def compared() -> Any:
        pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
        # Where a mark stands for an array it has fewer axes.
        finite = [(jnp.broadcast_to(jnp.isfinite(old), new.shape), new) for old, new in pairs if is_float(new)]
        flags = [(jnp.isfinite(new) | ~known).all() for known, new in finite]
        return jnp.all(jnp.stack([jnp.bool_(True), *flags]))

    return lax.cond(all_finite(after), lambda: jnp.bool_(True), compared)


def non_finite_flag(finite: Any) -> Any:
    """The column ``not_finite`` of one replica, ``[1, 1]``: 1 if a number is not finite."""
    return 1 - jnp.float32(finite)[None, None]


class Steps(NamedTuple):
    """The compiled steps of a round; ``step(constants, carry, batch)`` returns ``(carry, loss)`` and any outputs."""

    measuring: Any  # those that measure the gradient noise
    plain: Any  # those that do not; the same program without scaling, or if all steps measure


class Views(NamedTuple):
    """Trees with all replicas of a mesh, ``[R, ...]``. To make them from rows takes Python some 10 µs an array."""

    replica_mesh: Any
    trees: dict[str, Any]


class _Trees(NamedTuple):
    params: Any
    opt_state: Any
    model_state: Any
    outer_state: Any
    noise: Any = None
    progress: Any = None
    residual: Any = None
    ema: Any = None


class LocalState(_Trees):
    """The state of one replica between rounds; each leaf has a leading axis of 1, its row of the ``[R, ...]`` view.

    ``noise`` and ``progress`` are None unless learning rates are scaled, ``residual`` unless a merge sends codes, and
    ``ema`` unless the parameters and the model state have a moving average.
    After a merge it has the views whose row it is; a state that is made from it has none. ``params`` and ``opt_state``
    may be given as :class:`Deferred` trees.
    """

    views: Views | None = None

    @property
    def params(self) -> Any:
        return self[0].tree if isinstance(self[0], Deferred) else self[0]

    @property
    def opt_state(self) -> Any:
        return self[1].tree if isinstance(self[1], Deferred) else self[1]

    @property
    def counts(self) -> list[Any]:
        """The counts in the optimizer's state."""
        packed = self[1].packed if isinstance(self[1], Deferred) else None
        return counts_of(self.opt_state if packed is None else packed)

    def _asdict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._fields}

    @property
    def arrays(self) -> Iterator[Any]:
        """All arrays that it holds on devices, packed or not, and its views."""
        for tree in (*self, self.views and self.views.trees):
            for leaf in jax.tree.leaves(tree.made if isinstance(tree, Deferred) else tree):
                if isinstance(leaf, jax.Array) and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
                    yield leaf

    def packed(self, packings: Mapping[str, Packing]) -> dict[str, Packed]:
        """The trees that have a packing, packed."""
        given, found = dict(zip(self._fields, self, strict=True)), {}
        for name, packing in packings.items():
            known = given[name].packed_by(packing) if isinstance(given[name], Deferred) else None
            found[name] = packing.pack(getattr(self, name)) if known is None else known
        return found


# A node of its own: in a tuple, a deferred tree would be a leaf.
jax.tree_util.register_pytree_with_keys(
    LocalState,
    lambda local: ([(jax.tree_util.GetAttrKey(name), tree) for name, tree in local._asdict().items()], None),
    lambda _, trees: LocalState(*trees),
)


def free(states: Sequence[LocalState], kept: Sequence[LocalState]) -> None:
    """Delete the arrays of these states, except for buffers that those to keep share."""
    shared = {buffer for local in kept for array in local.arrays for buffer in _buffers(array)}
    arrays = [array for local in states for array in local.arrays if not array.is_deleted()]
    for array in [array for array in arrays if shared.isdisjoint(_buffers(array))]:
        array.delete()


def _buffers(array: jax.Array) -> list[tuple[Any, int]]:
    return [(shard.device, shard.data.unsafe_buffer_pointer()) for shard in array.addressable_shards]


class Constants(NamedTuple):
    """The inputs that all steps of a round share; fields that the settings do not need are None."""

    # To dispatch an array in the carry costs ten times as much.

    frozen: Any = ()  # arrays of the loss function
    # If gradients are averaged: the parameters they are computed at.
    params: Any = None
    # If a schedule needs them: the optimizer's counts at the start, and the steps of all replicas per own step.
    counts: Any = None
    stride: Any = None
    # Scaling: the preconditioner, the scale of the merge, and progress and noise scale at the start.
    preconditioner: Any = None
    merge_scale: MergeScale | None = None
    progress: Any = None
    noise: Any = None


class Carry(NamedTuple):
    """The carry of the steps of a round; fields that the settings do not need are None."""

    model_state: Any
    # The number of the next batch, for its random key.
    index: Any
    # With the :class:`Columns` of the loss function.
    sums: Any
    # If parameters are averaged: those of the replica.
    params: Any = None
    opt_state: Any = None
    # If gradients are averaged: their sum, weighted by examples, or by the weights of the loss.
    grads: Any = None
    # Scaling: sums for the noise estimate, gains and learning rate factors, and the noise scale of a single replica.
    tracked: Any = None
    scaled: Any = None
    noise: Any = None
    # At the end of a round: 1 if a number became NaN or infinite.
    not_finite: Any = None

    @property
    def measured(self) -> dict[str, Any]:
        """The fields that a merge reads, beside the trees of which it takes the mean."""
        found = {name: getattr(self, name) for name in ("sums", "not_finite", "tracked", "scaled")}
        return {name: tree for name, tree in found.items() if tree is not None}


class Programs(Protocol):
    """The programs of a replica."""

    def begin(
        self, local: LocalState, index: Any, merge_scale: MergeScale, takes: Sequence[str] = ()
    ) -> tuple[Constants, Carry]:
        """The constants and the carry of a round; the carry is a copy, so that ``local`` stays valid.

        Of the trees that it ``takes`` it has the large arrays themselves, which the steps delete.
        """
        ...

    def lower(self, start: Constants, carry: Carry, batch: Any) -> Callable[[], Steps]:
        """Trace the steps for batches of these shapes; the function that it returns compiles them, in any thread."""
        ...

    def marked(self, local: LocalState, takes: Sequence[str]) -> LocalState:
        """The local state for :meth:`finish`, if the steps delete large arrays of these trees."""
        ...

    def finish(self, local: LocalState, carry: Carry) -> Carry:
        """The carry at the end of a round from ``local``, with ``not_finite`` unless the merge computes it."""
        ...

    def idle(self, local: LocalState, carry: Carry) -> Carry:
        """The carry at the end of a round without steps; not a collective, so one process may call it alone."""
        ...


class FrozenArrays:
    """A loss function in one signature, and the arrays of its pytree: those of a ``jax.tree_util.Partial``.

    Called with ``(params, model_state, batch, rng)`` it is ``as_loss(loss_fn)``. Arrays in a closure become constants
    of each compiled program, which are copied into every one of them; inputs are not. ``outputs`` as for ``as_loss``.
    """

    def __init__(self, loss_fn: Callable[..., Any], outputs: bool = False):
        self._outputs = outputs
        self._loss: Loss = as_loss(loss_fn, outputs)
        self._leaves, self._treedef = jax.tree.flatten(loss_fn)
        self._places = [i for i, leaf in enumerate(self._leaves) if isinstance(leaf, (jax.Array, np.ndarray))]
        self.arrays = tuple(self._leaves[i] for i in self._places)
        self._placed: dict[Any, tuple[Any, ...]] = {}

    def __call__(self, params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
        return self._loss(params, model_state, batch, rng)

    def put(self, placement: Placement) -> tuple[Any, ...]:
        """The arrays on the devices of a replica, once for all its programs."""
        devices = tuple(placement.devices.flat)
        if devices not in self._placed:
            self._placed[devices] = placement.put_whole(self.arrays)
        return self._placed[devices]

    def with_arrays(self, params: Any, inputs: tuple[Sequence[Any], Any], batch: Any, rng: Any) -> Any:
        """The loss with other arrays in their places; ``inputs`` are those arrays and the model state."""
        arrays, model_state = inputs
        if not self._places:  # the given object, of which a pytree may not have everything
            return self._loss(params, model_state, batch, rng)
        leaves = list(self._leaves)
        for i, array in zip(self._places, arrays, strict=True):
            leaves[i] = array
        return as_loss(jax.tree.unflatten(self._treedef, leaves), self._outputs)(params, model_state, batch, rng)


class LocalPrograms:
    """The compiled programs of a replica's local steps.

    ``begin`` copies the state, so that steps can donate their buffers and the last good state stays valid after an
    error. With ``average="gradients"`` a step adds its gradient, weighted by examples or by the weight of the loss, to
    an accumulator; else it updates the replica's parameters. With ``scaling``, ``tx`` is already wrapped. Trees with a
    packing are packed between rounds: ``begin`` takes and ``finish`` returns their packed form. A sum of gradients with
    a packing is always packed.
    """

    def __init__(
        self,
        placement: Placement,
        loss: FrozenArrays,
        tx: optax.GradientTransformation,
        average: str,
        seed: int,
        columns: Columns,
        scaling: Scaling | None,
        solo: bool,
        packed: Mapping[str, Packing],
    ):
        self._placement, self._loss, self._seed, self._solo = placement, loss, seed, solo
        self._packings = dict(packed)
        self._grads_packing = self._packings.pop("grads", None)
        self._objective = placement.value_and_grad(loss.with_arrays)
        self._tx: Any = with_extra_args(tx)
        self._columns, self._scaling = columns, scaling
        self._average = average
        # The programs are of a copy without them: they and the arrays on the devices end with their last user then, and
        # not when Python next looks for cycles, which knows nothing of the memory of devices.
        traced = copy.copy(self)
        self._compilations, self._frozen = Compilations(), loss.put(placement)
        # keep_unused: the arguments also determine the device of the zeros.
        self._begin_program = jax.jit(traced._begin, static_argnames="takes", keep_unused=True)
        self._finish_program, self._finite = jax.jit(traced._finish), jax.jit(traced._zero_flag, keep_unused=True)
        self._marked = jax.jit(marked, static_argnums=1)
        self._step = jax.jit(
            traced._one_step, static_argnames="measures", donate_argnums=1, compiler_options=placement.compiler_options
        )

    def on(self, placement: DevicePlacement) -> LocalPrograms:
        """These programs on another device, neither traced nor compiled again; not for replicas on meshes."""
        other = copy.copy(self)
        other._placement, other._frozen = placement, self._loss.put(placement)
        return other

    def begin(
        self, local: LocalState, index: Any, merge_scale: MergeScale, takes: Sequence[str] = ()
    ) -> tuple[Constants, Carry]:
        packed = local.packed(self._packings)
        places = {name: self._packings[name].places(one) for name, one in packed.items()}
        # Without what no step needs: each array and each number takes time to dispatch.
        needed = local._replace(outer_state=(), residual=None, ema=None, **packed)
        scale = MergeScale(*map(np.float32, merge_scale))
        if self._average == "gradients" and self._scaling is None:
            needed, scale = needed._replace(opt_state=()), None
        made, carry = self._begin_program(needed, places, index, scale, takes=tuple(takes))
        for name in takes:
            own = packed[name].others if name in packed else jax.tree.leaves(getattr(local, name))
            carry = carry._replace(**{name: with_large(getattr(carry, name), own, self._small_bytes(name))})
        # Arrays of the local state itself are no outputs of a program.
        made = made._replace(frozen=self._frozen)
        if self._average == "gradients":
            made = made._replace(params=local.params)
        if made.stride is not None:
            made = made._replace(counts=local.counts)
        if self._scaling is not None:
            made = made._replace(progress=local.progress, noise=None if self._scaling.solo else local.noise)
        return made, carry

    def lower(self, start: Constants, carry: Carry, batch: Any) -> Callable[[], Steps]:
        measuring, plain = self._lower(start, carry, batch, measures=True), None
        if self._scaling is not None and not self._scaling.measures_every_step:
            plain = self._lower(*_without_noise(start, carry), batch, measures=False)

        def compiled() -> Steps:
            step = measuring()
            return Steps(step, step if plain is None else partial(_plain_step, plain()))

        return compiled

    def _lower(self, *args: Any, measures: bool) -> Callable[[], Any]:
        traced = self._step.trace(*args, measures=measures)
        if isinstance(self._placement, DevicePlacement):
            return self._compilations.lower(traced, self._placement.device)
        return traced.lower().compile

    def _small_bytes(self, name: str) -> int:
        return self._packings[name].small_bytes if name in self._packings else SMALL_BYTES

    def marked(self, local: LocalState, takes: Sequence[str]) -> LocalState:
        packed, trees = local.packed(self._packings), {}
        for name in takes:
            if (own := packed.get(name)) is None:
                trees[name] = self._marked(getattr(local, name), SMALL_BYTES)
            else:
                own = own._replace(others=self._marked(own.others, self._small_bytes(name)))
                trees[name] = Deferred.of(self._packings[name], own)
        return local._replace(**trees)

    def finish(self, local: LocalState, carry: Carry) -> Carry:
        if self._average == "gradients":
            return carry  # the merge checks the gradients
        names, packed = ("params", "opt_state", "model_state"), local.packed(self._packings)
        before = {name: packed[name] if name in packed else getattr(local, name) for name in names}
        vectors, flag = self._finish_program(before, {name: getattr(carry, name) for name in names})
        # Large arrays are no outputs of the program, which would copy them.
        others = {name: self._packings[name].others(getattr(carry, name)) for name in vectors}
        return carry._replace(**{name: Packed(own, others[name]) for name, own in vectors.items()}, not_finite=flag)

    def idle(self, local: LocalState, carry: Carry) -> Carry:
        if self._average == "gradients":
            return carry
        if self._packings:  # of one device, so this program is no collective
            return self.finish(local, carry)
        return carry._replace(not_finite=self._finite(carry.sums))

    def _zero_flag(self, sums: Any) -> Any:
        return self._placement.constrain({"not_finite": jnp.zeros_like(sums[:, :1])})["not_finite"]

    def _finish(self, before: dict[str, Any], after: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        """The vectors of packed trees, and ``not_finite``."""
        packed = {name: packing.pack(after[name]) for name, packing in self._packings.items()}
        others = [{name: tree for name, tree in trees.items() if name not in packed} for trees in (before, after)]
        if not self._placement.makes_pieces:  # a few long vectors are compiled sooner than many arrays
            packing = Packing(others[1])
            others = [packing.pack(tree) for tree in others]
        flag = non_finite_flag(stayed_finite((others[0], {name: before[name] for name in packed}), (others[1], packed)))
        vectors = {name: one.vectors for name, one in packed.items()}
        return vectors, self._placement.constrain({"not_finite": flag})["not_finite"]

    def _begin(
        self,
        local: LocalState,
        places: dict[str, Any],
        index: Any,
        merge_scale: MergeScale | None,
        takes: tuple[str, ...],
    ) -> tuple[Constants, Carry]:
        copied = jax.tree.map(jnp.copy, local)
        unpacked = {name: self._packings[name].unpack(getattr(copied, name), at) for name, at in places.items()}
        copied = copied._replace(**unpacked)
        local = local._replace(**unpacked)
        made = Constants()
        carry = Carry(copied.model_state, index, jnp.zeros((1, self._columns.count), float))
        if self._scaling is not None:
            noise, params, opt_state = drop_replica_axis((local.noise, local.params, local.opt_state))
            preconditioner, trees = self._scaling.begin(noise, params, opt_state)
            made = made._replace(preconditioner=add_replica_axis(preconditioner), merge_scale=merge_scale)
            carry = carry._replace(**add_replica_axis(trees))
        if self._average == "parameters":
            carry = carry._replace(params=copied.params, opt_state=copied.opt_state)
            if not self._solo and any(are_schedules(local.opt_state)):
                assert merge_scale is not None
                made = made._replace(stride=merge_scale.stride)
        else:
            carry = carry._replace(grads=self._packed_grads(zero_sums(local.params)))
        carry = self._constrained(carry)
        small = {name: without_large(getattr(carry, name), self._small_bytes(name)) for name in takes}
        return self._constrained(made), carry._replace(**small)

    def _packed_grads(self, grads: Any) -> Any:
        return grads if self._grads_packing is None else self._grads_packing.pack(grads)

    def _constrained(self, trees: Any) -> Any:
        """A carry or constants with the shardings of the placement."""
        present = {name: tree for name, tree in trees._asdict().items() if tree is not None}
        return trees._replace(**self._placement.constrain(present))

    def _one_step(self, start: Constants, carry: Carry, batch: Any, measures: bool) -> tuple[Any, ...]:
        """A step; within it arrays have no replica axis."""
        step = self._local_step if self._average == "parameters" else self._accumulate
        carry, *rest = step(_mapped(drop_replica_axis, start), _mapped(drop_replica_axis, carry), batch, measures)
        return self._constrained(_mapped(add_replica_axis, carry)), *rest

    def _value_and_grad(
        self, params: Any, frozen: Any, carry: Carry, batch: Any
    ) -> tuple[Any, Any, Any, Carry, list[Any]]:
        """Loss, gradients, the row of the sums, the carry with new model state, index and sums, and any outputs."""
        rng = jax.random.fold_in(jax.random.key(self._seed), carry.index)
        (loss, (metrics, model_state, *outputs)), grads = self._objective(
            params, (frozen, carry.model_state), batch, rng
        )
        row = self._columns.row(loss, metrics, jnp.asarray(batch_size(batch), float))
        counted = carry._replace(model_state=model_state, index=carry.index + 1, sums=carry.sums + row)
        return mean_of(loss), grads, row, counted, outputs

    def _local_step(self, start: Constants, carry: Carry, batch: Any, measures: bool) -> tuple[Any, ...]:
        params, opt_state, scaled = carry.params, carry.opt_state, {}
        loss, grads, row, carry, outputs = self._value_and_grad(params, start.frozen, carry, batch)
        if self._scaling is not None:
            scaled, carry = self._scale(start, carry, grads, row[0].astype(jnp.float32), measures)
        update = partial(self._placement.update, self._tx, grads, params=params, value=loss, **scaled)
        params, opt_state = update_in_round(update, opt_state, start.counts, start.stride)
        if scaled:
            gain = jnp.stack([scaled["noise"].gain(scaled["scale"]), opt_state.factor])
            carry = carry._replace(scaled=carry.scaled + gain)
        return carry._replace(params=params, opt_state=opt_state), loss, *outputs

    def _scale(
        self, start: Constants, carry: Carry, grads: Any, examples: Any, measures: bool
    ) -> tuple[dict[str, Any], Carry]:
        """The arguments of the scaled optimizer in a local step, and the carry with the new noise sums."""
        scaling, merge_scale = self._scaling, start.merge_scale
        assert scaling is not None
        assert merge_scale is not None
        progress = start.progress + merge_scale.alpha * carry.scaled[0]
        noise = (carry if measures and scaling.solo else start).noise
        if measures and scaling.solo:
            noise, tracked = scaling.update_from_step(noise, carry.tracked, grads, examples, start.preconditioner)
            carry = carry._replace(noise=noise, tracked=tracked)
        elif measures:
            tracked = scaling.accumulate(carry.tracked, noise, grads, examples, start.preconditioner)
            carry = carry._replace(tracked=tracked)
        return scaling.arguments(noise, progress, examples, merge_scale.replicas), carry

    def _accumulate(self, start: Constants, carry: Carry, batch: Any, measures: bool) -> tuple[Any, ...]:
        loss, grads, row, carry, outputs = self._value_and_grad(start.params, start.frozen, carry, batch)
        if self._scaling is not None and measures:
            examples = row[0].astype(jnp.float32)
            tracked = self._scaling.accumulate(carry.tracked, start.noise, grads, examples, start.preconditioner)
            carry = carry._replace(tracked=tracked)
        before, grads = add_replica_axis(carry.grads), self._packed_grads(add_replica_axis(grads))
        summed = add_weighted(before, grads, row[self._columns.weights[0]])
        return carry._replace(grads=drop_replica_axis(summed)), loss, *outputs


def _mapped(change: Callable[[Any], Any], trees: Any) -> Any:
    """Constants or a carry with all changed that has a replica axis."""
    return trees._replace(**{name: change(tree) for name, tree in trees._asdict().items() if TREES[name].has_axis})


def _without_noise(start: Constants, carry: Carry) -> tuple[Constants, Carry]:
    """Constants and carry of a step that does not measure: the noise scale of a single replica becomes a constant."""
    if carry.noise is not None:
        start = start._replace(noise=carry.noise)
    return start, carry._replace(tracked=None, noise=None)


def _plain_step(step: Any, start: Constants, carry: Carry, batch: Any) -> tuple[Any, ...]:
    rest, *more = step(*_without_noise(start, carry), batch)
    return rest._replace(tracked=carry.tracked, noise=carry.noise), *more
