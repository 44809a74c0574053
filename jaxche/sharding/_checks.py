"""Checks of the arguments of a sharded step, before it runs; each raises ValueError with the line to write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxche.averaging import is_float
from jaxche.drawing import brief
from jaxche.sharding._layout import Layout
from jaxche.sharding._loss import batch_size
from jaxche.sharding._models import not_an_array

# Collections of linen variables beside the parameters.
_COLLECTIONS = ("batch_stats", "cache", "intermediates", "perturbations")


def check_arguments(tx: Any, strategy: Any, accumulate: Any, compute_dtype: Any) -> None:
    """ValueError for an invalid argument of :func:`sharded_step`."""
    check_transform("tx", tx)
    if isinstance(strategy, type) or not hasattr(strategy, "shards_params"):
        raise ValueError(f"strategy={strategy!r} is not a sharding strategy; write e.g. strategy=jaxche.FullShard()")
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(f"accumulate={accumulate!r} is a number of micro-batches, 1 or more; write accumulate=1")
    if compute_dtype is not None and not _is_float_dtype(compute_dtype):
        raise ValueError(
            f"compute_dtype={compute_dtype!r} is not a dtype of floats; write compute_dtype=jnp.bfloat16, or leave it "
            "out to compute in the parameters' own"
        )


def check_transform(name: str, tx: Any) -> None:
    """ValueError for a value that is not an optax transformation."""
    if hasattr(tx, "init") and hasattr(tx, "update"):
        return
    # An nnx.Optimizer has a transformation, and the state of the optimizer too.
    if hasattr(tx, "tx") and hasattr(tx, "opt_state"):
        raise ValueError(
            f"{name} is a {type(tx).__name__}, which holds the transformation and its state; write "
            "loss = jaxche.NNXLoss(model, loss_fn, optimizer), tx=loss.tx and trainer.init(loss.params, "
            "loss.model_state, loss.opt_state), or tx=optimizer.tx to begin with a new state"
        )
    made = f"optax.{tx.__name__}(0.1)" if getattr(tx, "__module__", "").startswith("optax") else "optax.adam(1e-3)"
    raise ValueError(f"{name}={brief(tx)} is not an optax transformation; write e.g. {name}={made}")


def check_params(params: Any, init: str = "step.init") -> None:
    """ValueError for a tree of parameters or shapes without arrays, or with a leaf that is not float.

    ``init`` is the call in the message, to which the tree was passed.
    """
    leaves = jax.tree.leaves_with_path(params)
    if not leaves:
        raise ValueError("params has no arrays; pass the tree of parameters, e.g. model.init(rng, x)['params']")
    if others := collections_of(params):
        raise ValueError(
            f"params is a whole dict of variables, {', '.join(map(repr, params))}, and the optimizer would train all; "
            f'write {init}(variables["params"], variables["{others[0]}"]), or with jaxche.linen_loss(module, loss_fn) '
            f'{init}(variables.pop("params"), variables)'
        )
    for path, leaf in leaves:
        name = jax.tree_util.keystr(path)
        if message := not_an_array(f"params{name}", leaf, init):
            raise ValueError(message)
        if not is_float(leaf):
            kind = getattr(leaf, "dtype", type(leaf).__name__)
            raise ValueError(f"params{name} is {kind}, not float; move it into {init}(params, model_state=...)")


def collections_of(params: Any) -> list[str]:
    """The collections beside ``params`` in a dict of linen variables; none for a tree of parameters."""
    if not (isinstance(params, Mapping) and isinstance(params.get("params"), Mapping)):
        return []
    return [name for name in _COLLECTIONS if isinstance(params.get(name), Mapping)]


def check_mesh(layout: Layout, tree: Any, name: str) -> None:
    """ValueError for arrays on another mesh; arrays on a single device are not placed yet, and are accepted."""
    own = set(layout.mesh.devices.flat)
    for path, leaf in jax.tree.leaves_with_path(tree):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and set(sharding.device_set) != own:
            raise ValueError(
                f"{name}{jax.tree_util.keystr(path)} is on a mesh of {len(sharding.device_set)} devices, "
                f"{dict(sharding.mesh.shape)}, but this step is on one of {len(own)}, {dict(layout.mesh.shape)}; "
                f"write step.init(jax.device_get({name}))"
            )


def check_state(layout: Layout, state: Any, expected: Any) -> None:
    """ValueError for a state of another optimizer, another mesh or another layout."""
    have, want = jax.tree.structure(state.opt_state), jax.tree.structure(expected.opt_state)
    if have != want:
        raise ValueError(
            f"state.opt_state has {have.num_leaves} arrays in the tree {_short(have)}, but the state of this step's tx "
            f"has {want.num_leaves} in {_short(want)}; write state = step.init(params), or build the step with the tx "
            "of the state"
        )
    check_mesh(layout, state.params, "state.params")
    pairs = zip(jax.tree.leaves_with_path(state), jax.tree.leaves(expected), strict=True)
    for (path, leaf), want in pairs:
        name = f"state{jax.tree_util.keystr(path)}"
        if leaf.shape != want.shape:
            raise ValueError(
                f"{name} has the shape {leaf.shape}, but for these parameters it must be {want.shape}; "
                "write state = step.init(params)"
            )
        sharding = getattr(leaf, "sharding", None)
        if sharding is None or not sharding.is_equivalent_to(want.sharding, leaf.ndim):
            laid = getattr(sharding, "spec", sharding)
            raise ValueError(
                f"{name} is sharded as {laid}, but {layout.strategy} shards it as {want.sharding.spec}; write state = "
                "jax.device_put(state, jax.tree.map(lambda x: x.sharding, step.abstract_state(state.params)))"
            )


def check_batch(layout: Layout, batch: Any, accumulate: int) -> None:
    """ValueError for a batch that the devices times the micro-batches do not divide."""
    rows, parts = batch_size(batch), layout.devices * accumulate
    if rows % parts:
        shape = " x ".join(f"{size} {name}" for name, size in layout.mesh.shape.items())
        times = f" times accumulate={accumulate}" if accumulate > 1 else ""
        better = max(parts, rows - rows % parts)
        # Batches keeps a smaller last batch, which would not divide either.
        raise ValueError(
            f"the batch has {rows} rows, which {layout.devices} devices ({shape}){times} do not divide; "
            f"give all batches {better} rows, and leave out the examples that do not fill the last one, e.g. "
            f"jaxche.Batches(jax.tree.map(lambda x: x[: len(x) // {better} * {better}], arrays), batch_size={better})"
        )


def _is_float_dtype(dtype: Any) -> bool:
    try:
        return jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:  # not a dtype
        return False


def _short(treedef: Any, most: int = 200) -> str:
    text = str(treedef)
    return text if len(text) <= most else text[: most - 3] + "..."
