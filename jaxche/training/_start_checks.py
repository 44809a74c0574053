"""Checks of what a run starts from: the optimizer, on the shapes of the parameters, the given states, and the data."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxche.data import check_stream, epoch_size, is_stream
from jaxche.messages import brief
from jaxche.replicas import (
    LocalState,
    are_accumulators,
    are_keys,
    are_subspaces,
    stepped_params,
    without_replica_axis,
)
from jaxche.scaling import AdamScale, ScaleLearningRateState, has_moments_of_magnitudes, noise_scale
from jaxche.sharding import check_params, check_update
from jaxche.stages import check_stage_params
from jaxche.training._checks import (
    check_arrays,
    check_bits,
    check_metrics_of_model,
    check_whole_batches,
    warn_of_unused_model_state,
)
from jaxche.training._groups import Groups
from jaxche.training._settings import Settings

_log = logging.getLogger("jaxche")


def check_start(settings: Settings, world_size: int, params: Any, model_state: Any, opt_state: Any) -> None:
    """Refuse what :meth:`Trainer.init` cannot start from with these settings."""
    tx, shapes = settings.tx, check_params(params, "trainer.init")
    check_copies(shapes)
    trees = shapes if settings.staged else [shapes]
    if settings.staged:
        check_stage_params(shapes, len(settings.loss_fn.stages))
    state = shapes_of_state(tx, shapes)
    check_unscaled(state, settings.scaling is not None)
    check_update(tx, *trees, **settings.extra_args)
    check_second_moments(tx, shapes, settings.scaling and settings.scaling.rule, **settings.extra_args)
    if settings.average == "parameters" and world_size > 1:
        check_trajectory(state)
        check_state_params(settings, trees)
        check_subspaces(settings.opt_state, state)
        if settings.group.is_first:
            warn_of_shared_key(state)
    check_accumulators(settings.groups, settings.opt_state, state)
    if world_size > 1:
        check_metrics_of_model(settings.loss_fn)
    if model_state is not None:
        _check_model_state(settings, shapes, state, model_state)
    check_bits({"loss_fn": settings.loss_fn, "model_state": model_state}, settings.placements)
    if opt_state is not None:
        check_opt_state(tx, shapes, opt_state, settings.staged)


def checked_epoch_size(settings: Settings, data: Any, epochs: int = 1) -> int:
    """The number of batches in an epoch, ``EPOCH_SIZE`` for a stream; refuses data that cannot be read."""
    if is_stream(data):
        spans = any(len(processes) > 1 for processes in settings.processes_of_ranks)
        if spans and settings.staged:
            raise ValueError(
                "data is a stream, and the stages of a replica that are in several processes read batches by their "
                "index; give a sequence, e.g. jaxche.Batches(arrays, batch_size=32), or each process whole replicas"
            )
        stream = check_stream(data, settings.group, spans, epochs)
        if stream.shards and settings.group.num_processes > 1:
            check_whole_batches(settings.policy, settings.given_rows, settings.joined, len(settings.placements))
    return epoch_size(data)


def check_trees(settings: Settings, local: LocalState) -> None:
    """Refuse a state with other trees than those that the arguments of the trainer ask for."""
    if (local.noise is None) != (settings.scaling is None):
        raise ValueError(
            f"state is of a trainer {'without' if local.noise is None else 'with'} scaling=; start from this "
            "trainer's own: state = trainer.init(params)"
        )
    if (local.residual is None) != (settings.wire == "float32"):
        other = "one of few bytes" if settings.wire == "float32" else "'float32'"
        raise ValueError(
            f"state is of a trainer whose wire is {other}, and here wire={settings.wire!r}; start from "
            "its own: state = trainer.init(other.params(state))"
        )
    has_ema = bool(jax.tree.leaves(local.ema))
    if has_ema != (settings.ema is not None):
        raise ValueError(
            f"state is of a trainer {'with' if has_ema else 'without'} ema=; start from this trainer's own: "
            "state = trainer.init(other.params(state), other.model_state(state))"
        )


def check_tx(settings: Settings, tx: optax.GradientTransformation, local: LocalState) -> None:
    """Refuse a state of another optimizer than ``tx``, which scales by the rule of the settings."""
    trees = without_replica_axis((local.params, local.opt_state))
    for params, opt_state in zip(*trees, strict=True) if settings.staged else [trees]:
        check_state_of_tx(tx, params, opt_state)


def check_copies(params: Any) -> None:
    """Refuse the parameters of a ``jax.pmap``, which have a copy for each of its devices along a first axis."""

    def is_copied(leaf: Any) -> bool:
        if not (isinstance(leaf, jax.Array) and leaf.ndim and leaf.is_fully_addressable):
            return False
        is_cut = leaf.sharding.shard_shape(leaf.shape) == (1, *leaf.shape[1:])
        if not (is_cut and len(leaf.sharding.device_set) == len(leaf) > 1):
            return False
        copies = np.asarray(leaf)
        return bool((copies == copies[:1]).all())

    leaves = jax.tree.leaves(params)
    if all(map(is_copied, leaves)):
        raise ValueError(
            f"params has {len(leaves[0])} copies of each array along a first axis, one for each device of a jax.pmap; "
            "write trainer.init(flax.jax_utils.unreplicate(params))"
        )


def _check_model_state(settings: Settings, params: Any, opt_state: Any, model_state: Any) -> None:
    """Refuse what is no model state, such as that of the optimizer, whose moments and counts would be lost."""
    if settings.staged:
        raise ValueError("model_state: stages of a jaxche.Partitioned have none; leave it out")
    line = 'write e.g. trainer.init(params, model_state=variables["batch_stats"]), or leave it out'
    check_arrays("model_state", model_state, line)
    found = jax.tree.structure(model_state)
    if found.num_leaves and found == jax.tree.structure(opt_state) != jax.tree.structure(params):
        raise ValueError(
            f"model_state={brief(model_state)} is a state of tx; write trainer.init(params, opt_state=opt_state), or "
            "with a model state trainer.init(params, model_state, opt_state)"
        )
    if settings.group.is_first:
        warn_of_unused_model_state(settings.loss_fn, model_state)


def _form(tree: Any) -> Any:
    return jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), tree)


def check_opt_state(tx: optax.GradientTransformation, params: Any, opt_state: Any, staged: bool) -> None:
    """Refuse an optimizer state unlike ``tx.init(params)``; if ``staged``, unlike that of each stage."""

    check_arrays("opt_state", opt_state, "write opt_state=tx.init(params), or leave it out")
    wanted = jax.eval_shape(lambda p: tuple(map(tx.init, p)) if staged else tx.init(p), params)
    if not _are_equal(_form(opt_state), _form(wanted)):
        own, other = _differences(opt_state, wanted)
        raise ValueError(
            "opt_state is not one of this tx and these parameters; give a state from tx.init(params) or "
            f"tx.update. It has {own}, and tx.init(params) makes {other}"
        )


def check_replacement(name: str, tree: Any, wanted: Any) -> None:
    """Refuse a tree with other arrays than those of the shapes ``wanted``, which it is to replace in a state."""
    line = f"write trainer.replace(state, {name}=...), with a tree like trainer.{name}(state)"
    check_arrays(name, tree, line)
    if not _are_equal(_form(tree), _form(wanted)):
        own, other = _differences(tree, wanted)
        raise ValueError(
            f"{name} has {own}, and that of state has {other}; {line}. Other shapes begin a run: trainer.init(params)"
        )


def check_params_alone(tx: optax.GradientTransformation, trees: Sequence[Any]) -> None:
    """Refuse to replace parameters where the next step would be made from those in the state of ``tx``."""
    for params in trees:
        if paths := stepped_params(tx, params):
            raise ValueError(
                f"params alone replaces nothing: tx makes its steps from those in its state, opt_state{paths[0]}, as "
                "optax.contrib.schedule_free does; write trainer.replace(state, params, opt_state=tx.init(params))"
            )


def check_state_of_tx(tx: Any, params: Any, opt_state: Any) -> None:
    """Refuse the state of a trainer with another optimizer."""

    def form(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.shape, tree)

    wanted = jax.eval_shape(tx.init, params)
    if not _are_equal(form(wanted), form(opt_state)):
        own, other = _differences(opt_state, wanted)
        raise ValueError(
            f"state is of a trainer with another tx: its optimizer state has {own}, and tx.init makes {other}; to go "
            "on with this one write state = trainer.replace(state, opt_state=tx.init(trainer.params(state)))"
        )


def _differences(tree: Any, wanted: Any) -> list[str]:
    """What differs between two trees: the classes of their parts, or else the first arrays that one of them lacks."""
    parts = [_parts(tree), _parts(wanted)]
    if parts[0] != parts[1]:
        return parts
    arrays = [
        [f"{jax.tree_util.keystr(path)} {jnp.result_type(x)}{list(jnp.shape(x))}" for path, x in leaves]
        for leaves in map(jax.tree.leaves_with_path, (tree, wanted))
    ]
    own, other = ([x for x in one if x not in rest] for one, rest in (arrays, arrays[::-1]))
    return [", ".join(x[:3]) or "no other arrays" for x in (own, other)]


def _parts(tree: Any) -> str:
    """The classes of the parts of a tree, as ``(ScaleByAdamState, EmptyState)`` of an optimizer's state."""
    if type(tree) is tuple:
        return f"({', '.join(map(_parts, tree))})"
    return "an array" if hasattr(tree, "shape") else type(tree).__name__


def _are_equal(tree: Any, other: Any) -> bool:
    """Whether trees have one structure and equal leaves; ``==`` compares the objects of a class without ``__eq__``."""
    return jax.tree.flatten(tree) == jax.tree.flatten(other)


def shapes_of_state(tx: Any, params: Any) -> Any:
    """The shapes of ``tx.init(params)``; refuses masks and labels of another structure than the parameters."""
    try:
        return jax.eval_shape(tx.init, params)
    except ValueError as error:
        if "pytree" not in str(error):
            raise
        raise ValueError(
            f"a mask or labels in tx have another structure than params ({type(params).__name__}); write them as "
            "functions of params, e.g. optax.adamw(1e-3, mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, "
            f"params)), which also fit nnx.Optimizer. optax says: {error}"
        ) from None
    except AttributeError as error:
        if not isinstance(error.obj, dict):
            raise
        raise ValueError(
            f"a function of params in tx reads .{error.name} of them, as nnx.map_state does, and here params are plain "
            "dicts; write jax.tree.map_with_path(lambda path, p: ..., params), which also fits nnx.Optimizer"
        ) from error


def _holds(state: Any, kind: type) -> bool:
    """Whether the optimizer's state has a part of this kind, however deep."""

    def found(node: Any) -> bool:
        return isinstance(node, kind)

    return any(map(found, jax.tree.leaves(state, is_leaf=found)))


def check_unscaled(state: Any, scales: bool) -> None:
    """Refuse an optimizer with ``scale_learning_rate`` in it, and if the trainer ``scales``, one that accumulates."""
    if _holds(state, ScaleLearningRateState):
        raise ValueError(
            "tx holds a jaxche.scale_learning_rate(...), but the trainer itself wraps tx and passes scale and "
            "noise; give the inner optimizer and the rule separately: "
            "jaxche.Trainer(loss_fn, optax.sgd(0.1), scaling=jaxche.AdaScale())"
        )
    if scales and _holds(state, optax.MultiStepsState):
        raise ValueError(
            "tx holds an optax.MultiSteps, whose accumulated batches scaling= does not see; a round accumulates "
            "already: give tx the optimizer inside it and write average='gradients'"
        )


def check_second_moments(tx: Any, params: Any, rule: Any, **extra_args: Any) -> None:
    """Refuse ``AdamScale`` for an optimizer without the second moments that it reads."""
    if not isinstance(rule, AdamScale):
        return
    try:
        jax.eval_shape(lambda params: noise_scale.preconditioner(tx.init(params), params), params)
    except ValueError:
        raise ValueError(
            "scaling=jaxche.AdamScale() reads the second moments of an Adam-type optimizer, and the state of tx has "
            "none for these parameters; write scaling=jaxche.AdaScale() for SGD, scaling=jaxche.SqrtScale() for an "
            "optimizer whose steps do not grow with the gradient, such as optax.adafactor, or tx=optax.adam(1e-3)"
        ) from None
    if has_moments_of_magnitudes(tx, params, value=jnp.float32(0), **extra_args):
        raise ValueError(
            "scaling=jaxche.AdamScale() reads the second moments of an Adam-type optimizer, and nu in the state of tx, "
            "as of optax.adamax, is no mean of squares; write scaling=jaxche.SqrtScale(), or tx=optax.adam(1e-3)"
        )


def check_trajectory(state: Any) -> None:
    """Refuse to average the parameters of optimizers that follow the path of one replica over several steps."""
    if _holds(state, optax.ScaleByLBFGSState):
        raise ValueError(
            "tx holds an optax.lbfgs, which learns curvature from the path of the parameters, and a merge moves them "
            "off it; write jaxche.Trainer(..., policy='sync'), in which all replicas take one path, or optax.adam(1e-3)"
        )
    for name, kind in (("optax.contrib.sam", optax.contrib.SAMState), ("optax.lookahead", optax.LookaheadState)):
        if _holds(state, kind):
            raise ValueError(
                f"tx holds an {name}, which moves the parameters in phases of several steps, and a merge falls between "
                "two phases; write jaxche.Trainer(..., policy='sync'), or leave it out; outer=optax.sgd(0.5) makes the "
                "slow step of lookahead at each merge"
            )


def check_state_params(settings: Settings, trees: Sequence[Any]) -> None:
    """Refuse merges after which parameters in the state of ``tx``, that steps are made from, are not the merged ones.

    With ``opt_state="local"`` each replica keeps its own; ``outer=`` and ``merge="fednova"`` move the parameters alone.
    """
    opt_state, overlap, outer = settings.opt_state, settings.overlap, settings.outer
    if opt_state == "reset" or (opt_state == "average" and outer is None and settings.merge != "fednova"):
        return
    paths = [path for params in trees for path in stepped_params(settings.tx, params)]
    if not paths:
        return
    if opt_state == "local":
        what = f"overlap={overlap} implies opt_state='local', which" if overlap else "opt_state='local'"
        what += f" does not merge them: leave {'overlap' if overlap else 'opt_state'}= out"
    else:
        what = "merge='fednova'" if outer is None else "outer="
        what += f" moves the parameters and leaves those at their mean: leave {what} out, or write opt_state='reset'"
    raise ValueError(
        f"tx has parameters in its state, opt_state{paths[0]}, and makes its steps from them, as "
        f"optax.contrib.schedule_free and float32 copies of bfloat16 parameters do; {what}"
    )


def check_subspaces(opt_state: str, state: Any) -> None:
    """Refuse to average the moments of ``optax.contrib.galore``, which are in another subspace on each replica."""
    if opt_state == "average" and any(are_subspaces(state)):
        raise ValueError(
            "tx holds an optax.contrib.galore, with which each replica projects its gradients onto a subspace of its "
            "own; the mean of such moments means nothing; write opt_state='local', or policy='sync'"
        )


def check_accumulators(groups: Groups, opt_state: str, state: Any) -> None:
    """Refuse to average what ``tx`` has accumulated: its replicas are at different steps of theirs."""
    if groups.ranks and opt_state == "average" and any(are_accumulators(state)):
        raise ValueError(
            f"groups={groups.ranks} with opt_state='average' would average what an optax.MultiSteps or "
            "optax.apply_every in tx has accumulated, and each replica has accumulated its own number of gradients; "
            "write opt_state='local'"
        )


def warn_of_shared_key(state: Any) -> None:
    """Log that all replicas draw from one random key in the state of ``tx``."""
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(state)]
    if (path := next(itertools.compress(paths, are_keys(state)), None)) is not None:
        _log.warning(
            "tx draws from a random key in its state, opt_state%s, and all replicas start with the same: those that "
            "take equally many steps add the same noise, which a merge does not reduce. For one draw an update write "
            "policy='sync'; for others on each replica draw in the loss, loss_fn(params, batch, rng)",
            path,
        )


def check_line_search(tx: Any) -> None:
    """Refuse an optimizer that evaluates the loss again, as far as parameters of one array show it."""
    try:
        check_update(tx, jnp.zeros(2))
    except ValueError as error:
        if "value_fn" in str(error):  # and not e.g. a mask for other parameters
            raise
