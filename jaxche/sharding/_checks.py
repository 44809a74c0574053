"""Checks of arguments before a step runs; each raises ValueError with the line to write."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding

from jaxche.averaging import is_float
from jaxche.messages import brief, type_of
from jaxche.scaling import with_extra_args
from jaxche.sharding._strategy import Layout, ShardingStrategy

# Kinds of NumPy's dtypes: text, objects, and times.
_NO_NUMBERS = tuple("USOTMm")
# Collections of linen variables beside the parameters.
_COLLECTIONS = ("batch_stats", "cache", "intermediates", "perturbations")
# Their types as variables of nnx; an nnx.Perturbation is an nnx.Intermediate.
_VARIABLES = ("BatchStat", "Cache", "Intermediate")


def check_strategy(strategy: Any) -> None:
    """ValueError for a value that is not a sharding strategy."""
    if not isinstance(strategy, ShardingStrategy):
        raise ValueError(f"strategy={strategy!r} is not a sharding strategy; write e.g. strategy=jaxche.FullShard()")


def check_compute_dtype(dtype: Any) -> None:
    """ValueError for a value that is neither a dtype of floats nor None."""
    with contextlib.suppress(TypeError):  # not a dtype
        if dtype is None or jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
            return
    raise ValueError(
        f"compute_dtype={dtype!r} is not a dtype of floats; write compute_dtype=jnp.bfloat16, or leave it out to "
        "compute in the parameters' own"
    )


def check_transform(name: str, tx: Any) -> None:
    """ValueError for a value that is not an optax transformation."""
    if hasattr(tx, "init") and hasattr(tx, "update"):
        return
    # A TrainState and an nnx.Optimizer have a transformation, and the state of the optimizer too.
    if hasattr(tx, "tx") and hasattr(tx, "opt_state"):
        if hasattr(tx, "apply_fn"):
            raise ValueError(
                f"{name} is a TrainState; write {name}=state.tx, and to begin with its parameters and moments "
                "trainer.init(state.params, opt_state=state.opt_state)"
            )
        raise ValueError(
            f"{name} is {type_of(tx)}, which holds the transformation and its state; write "
            "loss = jaxche.NNXLoss(model, loss_fn, optimizer), tx=loss.tx and trainer.init(loss.params, "
            "loss.model_state, loss.opt_state), or tx=optimizer.tx to begin with a new state"
        )
    made = "optax.sgd(0.7, momentum=0.9, nesterov=True)" if name == "outer" else "optax.adam(1e-3)"
    name_of = getattr(tx, "__qualname__", "")
    if "<locals>" in name_of:  # a function that another one returned, as optax.cosine_decay_schedule does
        made = "optax.adam(learning_rate=schedule) for a schedule"
    elif getattr(tx, "__module__", "").startswith("optax"):
        made = f"optax.{name_of}(0.1)"
    raise ValueError(f"{name}={brief(tx)} is not an optax transformation; write e.g. {name}={made}")


def check_update(tx: Any, *trees: Any, **extra: Any) -> None:
    """ValueError unless ``tx`` updates each tree of parameters, or shapes, from gradients, ``value=`` and ``extra``."""

    def update(params: Any, value: Any) -> Any:
        state = tx.init(params)
        updates, after = with_extra_args(tx).update(params, state, params, value=value, **extra)
        return state, after, params, optax.apply_updates(params, updates), updates

    def error_of(params: Any) -> Exception | None:
        try:
            found = jax.eval_shape(update, params, jax.ShapeDtypeStruct((), jnp.asarray(0.0).dtype))
        except Exception as error:
            return error
        _refuse_changes("its state", *found[:2])
        _refuse_changes("params", *found[2:4])
        _refuse_broadcast(params, found[4])
        return None

    for params in trees:
        if (error := error_of(params)) is not None:
            _refuse_empty(params, error, error_of)
            _refuse_update(error)


def _refuse_changes(name: str, before: Any, after: Any) -> None:
    """ValueError if an update changes the structure, or the shape or dtype of an array: steps are compiled for one."""
    changed = "its structure"
    if jax.tree.structure(before) == jax.tree.structure(after):
        pairs = zip(jax.tree.leaves_with_path(before), jax.tree.leaves(after), strict=True)
        found = [
            f"{jax.tree_util.keystr(path)} from {old.dtype}{old.shape} to {new.dtype}{new.shape}"
            for (path, old), new in pairs
            if (old.shape, old.dtype) != (new.shape, new.dtype)
        ]
        if not found:
            return
        changed = found[0]
    raise ValueError(
        f"an update of tx changes {name}: {changed}; write it so that update returns what init makes, e.g. "
        "x.astype(old.dtype).reshape(old.shape)"
    )


def _refuse_broadcast(params: Any, updates: Any) -> None:
    """ValueError if an update has a smaller shape than its parameter: adding them would spread it."""
    for (path, leaf), update in zip(jax.tree.leaves_with_path(params), jax.tree.leaves(updates), strict=True):
        if np.shape(leaf) != update.shape:
            raise ValueError(
                f"tx makes an update of the shape {update.shape} for params{jax.tree_util.keystr(path)} of the shape "
                f"{np.shape(leaf)}; write one of the shape of the gradient. If tx takes the first axis for examples, "
                "as optax.contrib.dpsgd does, write a loss that clips the gradient of each example, and "
                "optax.add_noise in tx, as in docs/recipes.md"
            )


def _refuse_empty(params: Any, error: Exception, error_of: Callable[[Any], Exception | None]) -> None:
    """ValueError if an update fails on arrays without elements only, as optax.contrib.muon, which divides by sizes."""
    empty = [(path, np.shape(leaf)) for path, leaf in jax.tree.leaves_with_path(params) if not np.size(leaf)]
    if not empty or error_of(jax.tree.map(_with_elements, params)) is not None:
        return
    path, shape = empty[0]
    raise ValueError(
        f"params{jax.tree_util.keystr(path)} has no elements, its shape is {shape}, and tx fails on such an array: "
        f"{type(error).__name__}: {error}; leave it out of params, or write "
        "tx=optax.masked(tx, lambda params: jax.tree.map(lambda p: p.size > 0, params))"
    ) from error


def _with_elements(leaf: Any) -> Any:
    """The shape of an array, with 1 in place of each 0."""
    return jax.ShapeDtypeStruct(tuple(max(n, 1) for n in np.shape(leaf)), jnp.result_type(leaf))


def _refuse_update(error: Exception) -> NoReturn:
    if "value_fn" in str(error):
        raise ValueError(
            "tx searches along its direction with further values of the loss (value_fn=), as optax.lbfgs and "
            "optax.scale_by_backtracking_linesearch do, and a step on one batch has one value; write "
            "optax.lbfgs(0.1, linesearch=None), in a Trainer with policy='sync', or optax.adam(1e-3)"
        ) from error
    if "got no progress" in str(error):
        raise ValueError(
            "tx has a jaxche.progress_schedule, and only a scaling rule counts progress; write jaxche.Trainer(loss_fn, "
            "tx, scaling=jaxche.AdaScale()), or the schedule itself in place of progress_schedule(schedule)"
        ) from error
    if "LookaheadParams" in str(error) or re.search(r"attribute '?fast\b", str(error)):
        raise ValueError(
            "tx has an optax.lookahead, which takes pairs of parameters, optax.LookaheadParams(fast, slow), and the "
            "gradient of the fast ones alone; write the optimizer inside it and a slow step at each merge, e.g. "
            "jaxche.Trainer(loss_fn, optax.adam(1e-3), outer=optax.sgd(0.5)), or the adapter in docs/recipes.md"
        ) from error
    if "needs the progress" in str(error):
        raise ValueError(f"tx: {error}") from error
    line = "tx=optax.adam(1e-3)"
    if "unexpected keyword argument 'value'" in str(error):  # as optax.contrib.sam, which accepts grad_fn= only
        line = "tx=optax.GradientTransformation(tx.init, tx.update), which gets no value="
    if "opaque" in str(error):  # optax.contrib.sam, which takes a gradient of its own
        line = "optax.contrib.sam without opaque_mode=True, as in docs/recipes.md"
    if "batch dimension" in str(error):  # optax.contrib.dpsgd
        line = "a loss that clips the gradient of each example, and optax.add_noise in tx, as in docs/recipes.md"
    raise ValueError(
        "tx makes no update from gradients, parameters and value= (the loss of the batch) alone: "
        f"{type(error).__name__}: {error}; write e.g. {line}"
    ) from error


def context_mesh() -> Mesh | None:
    """The mesh of ``jax.set_mesh``; None without one, and within a trace, which is refused by its own name."""
    with contextlib.suppress(ValueError):  # within a trace
        return None if jax.sharding.get_abstract_mesh().empty else jax.sharding.get_mesh()
    return None


def check_context_mesh(mesh: Any, call: str) -> None:
    """ValueError for a ``call`` under ``jax.set_mesh`` of another mesh, on whose devices JAX would run its programs."""
    if context_mesh() not in (None, mesh):
        raise ValueError(
            f"{call} was called under jax.set_mesh(...) of another mesh than step.mesh, {brief(dict(mesh.shape))}, on "
            f"whose devices it runs; write {call}(...) outside of it, or with jax.set_mesh(step.mesh): ..."
        )


def check_params(params: Any, init: str) -> Any:
    """The parameters, or the shapes of those that a function makes; ValueError unless all are float arrays."""
    _refuse_model(params, init)
    if is_maker(params):
        params = _made_by(params, init)
    if not jax.tree.leaves(params):
        raise ValueError("params has no arrays; pass the tree of parameters, e.g. model.init(rng, x)['params']")
    if others := collections_of(params):
        raise ValueError(
            f"params is a whole dict of variables, {', '.join(map(repr, params))}, and the optimizer would train all; "
            f'write {init}(variables["params"], variables["{others[0]}"]), or with jaxche.linen_loss(module, loss_fn) '
            f'{init}(variables.pop("params"), variables)'
        )
    if found := not_trained(params, "params"):
        raise ValueError(
            f"{found}, and the optimizer would train it; write graph, params, rest = nnx.split(model, nnx.Param, ...), "
            f"or loss = jaxche.NNXLoss(model, loss_fn) and {init}(loss.params, loss.model_state)"
        )
    check_not_deleted(params, "params", f"give {init} the parameters of the last state, or copies from before the step")
    for name, leaf, kind in not_floats(params, "params"):
        if kind is not None:
            raise ValueError(f"{name} is {kind}, not float; move it into {init}(params, model_state=...)")
        if callable(leaf):
            raise ValueError(
                f"{name} is a function, {brief(leaf)}; parameters are arrays alone. With Equinox write "
                f"params, static = eqx.partition(model, eqx.is_inexact_array), {init}(params), and "
                "eqx.combine(params, static) in loss_fn"
            )
        raise ValueError(f"{name} is {brief(leaf)}, not an array; leave it out of params, and close over it in loss_fn")
    return params


def not_floats(tree: Any, root: str) -> Iterator[tuple[str, Any, Any]]:
    """Name, value and dtype of each leaf that is not a float array; the dtype is None where it is no array at all."""
    for path, leaf in jax.tree.leaves_with_path(tree):
        # A module of linen has a dtype, too.
        is_array = hasattr(leaf, "shape") or isinstance(leaf, bool | int | float | complex)
        if not is_array or not is_float(leaf):
            kind = getattr(leaf, "dtype", type(leaf).__name__) if is_array else None
            yield f"{root}{jax.tree_util.keystr(path)}", leaf, kind


def check_not_deleted(tree: Any, name: str, line: str) -> None:
    """ValueError for arrays whose buffers were donated, with the ``line`` to write instead."""
    if not any(map(_is_deleted, jax.tree.leaves(tree))):  # without paths, because steps call this
        return
    path = next(path for path, leaf in jax.tree.leaves_with_path(tree) if _is_deleted(leaf))
    raise ValueError(
        f"{name}{jax.tree_util.keystr(path)} was deleted: a step takes the buffers of the state that it is given; "
        f"{line}"
    )


def is_maker(params: Any) -> bool:
    """Whether ``params`` is a function that makes parameters, and not a tree of arrays that can be called."""
    return callable(params) and jax.tree_util.all_leaves([params])


def flax_kind(value: Any) -> str:
    """``"linen"`` or ``"nnx"`` for a module of Flax, else an empty text; does not import Flax."""
    for base in type(value).__mro__:
        if base.__name__ == "Module" and base.__module__.startswith(("flax.linen.", "flax.nnx.")):
            return base.__module__.split(".")[1]
    return ""


def collections_of(params: Any) -> list[str]:
    """The collections beside ``params`` in a dict of linen variables; none for a tree of parameters."""
    if not (isinstance(params, Mapping) and isinstance(params.get("params"), Mapping)):
        return []
    return [name for name in _COLLECTIONS if isinstance(params.get(name), Mapping)]


def not_trained(params: Any, root: str) -> str:
    """Which variable of nnx holds statistics or a cache, and no parameter; empty if none does. Does not import Flax."""

    def kind(value: Any) -> str:
        names = (base.__name__ for base in type(value).__mro__ if base.__module__.startswith("flax.nnx."))
        return next((name for name in names if name in _VARIABLES), "")

    for path, value in jax.tree.leaves_with_path(params, is_leaf=lambda value: bool(kind(value))):
        if name := kind(value):
            return f"{root}{jax.tree_util.keystr(path)} is an nnx.{name}"
    return ""


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
            f"state.opt_state has {have.num_leaves} arrays in the tree {brief(have, 200)}, but the state of this "
            f"step's tx has {want.num_leaves} in {brief(want, 200)}; write state = step.init(params), or build the "
            "step with the tx of the state"
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
                "jax.device_put(state, jax.tree.map(lambda x: x.sharding, step.abstract_state(state.params, "
                "state.model_state)))"
            )


def check_batch(layout: Layout, batch: Any, accumulate: int) -> None:
    """ValueError for a batch that the devices times the micro-batches do not divide, or that JAX would cut."""
    check_range(batch)
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


def batch_size(batch: Any) -> int:
    """Examples in a batch, the common leading axis of its leaves; ValueError for a batch without one."""
    sizes = {}
    check_numbers(batch)
    for path, leaf in jax.tree.leaves_with_path(batch):
        name = jax.tree_util.keystr(path) or "batch"
        shape = jnp.shape(leaf)
        if not shape:
            if isinstance(path[-1] if path else None, jax.tree_util.SequenceKey) and isinstance(leaf, int | float):
                of = jax.tree_util.keystr(path[:-1]) or "a batch"
                raise ValueError(
                    f"{of} is a list of numbers, which JAX takes as a scalar each; write np.asarray(x) for it, and pad "
                    "rows of different lengths to one"
                )
            line = "np.full(n, x), which has the number once for each of the n examples"
            if jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key):
                line = "jax.random.split(key, n), one for each of the n examples, or key[None]"
            raise ValueError(f"{name} is a scalar, and every array of a batch needs a leading batch axis; write {line}")
        sizes[name] = shape[0]
    if not sizes:
        raise ValueError(
            "a batch without arrays; return a pytree of arrays with a leading batch axis, e.g. np.zeros(64) if loss_fn "
            "draws 64 examples by its argument rng"
        )
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        raise ValueError(
            f"the leading axes of a batch differ ({listed}); every array must hold the same examples. A set of padded "
            "graphs, or another batch that cannot be divided, is one example: jax.tree.map(lambda x: x[None], batch)"
        )
    size = next(iter(sizes.values()))
    if size == 0:
        raise ValueError("a batch with no examples (leading axis 0); leave empty batches out of the data")
    return size


def check_numbers(batch: Any) -> None:
    """ValueError for a batch with leaves that are not arrays of numbers."""
    for path, leaf in jax.tree.leaves_with_path(batch):
        if problem := _no_numbers(leaf):
            raise ValueError(f"{f'{jax.tree_util.keystr(path)} of ' if path else ''}a batch is {problem}")


def check_range(batch: Any) -> None:
    """ValueError for integers of NumPy that do not fit into the type to which JAX converts them."""
    for path, leaf in jax.tree.leaves_with_path(batch):
        if not isinstance(leaf, np.ndarray) or leaf.dtype.kind not in "iu" or not leaf.size:
            continue
        taken = np.dtype(jax.dtypes.canonicalize_dtype(leaf.dtype))
        for number in (leaf.min(), leaf.max()) if taken != leaf.dtype else ():
            if int(number) != int(number.astype(taken)):
                raise ValueError(
                    f"{jax.tree_util.keystr(path) or 'the array'} of a batch has {number}, which becomes "
                    f"{number.astype(taken)} in {taken}, the {leaf.dtype} of JAX; write "
                    'jax.config.update("jax_enable_x64", True), smaller numbers, or leave it out of the batch'
                )


def _refuse_model(params: Any, init: str) -> None:
    kind, of_step = flax_kind(params), init.startswith("step")
    if kind == "nnx":
        made = "jaxche.sharded_step(loss, tx, strategy)" if of_step else "jaxche.Trainer(loss, tx)"
        raise ValueError(
            f"params is an nnx model, {brief(params)}; write loss = jaxche.NNXLoss(model, loss_fn), "
            f"{made} and {init}(loss.params, loss.model_state)"
        )
    if kind == "linen":
        raise ValueError(
            f"params is a linen module, {brief(params)}, without parameters; "
            f'write {init}(module.init(jax.random.key(0), x)["params"])'
        )
    if hasattr(params, "trainable_variables"):
        raise ValueError(
            f"params is a model, {brief(params)}, not a tree of arrays; write "
            f"{init}([v.value for v in model.trainable_variables]), and model.stateless_call(...) in loss_fn"
        )
    if hasattr(params, "apply_gradients") and hasattr(params, "params"):
        line = f"{init}(state.params, opt_state=state.opt_state)"
        if of_step:
            placed = "jax.device_put(state.opt_state, step.layout(state.params).opt_state(state.tx))"
            line = f"{init}(state.params), and to begin with its moments {init}(...)._replace(opt_state={placed})"
        raise ValueError(f"params is a TrainState; write {line}")


def _is_deleted(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted()


def _made_by(make: Any, init: str) -> Any:
    try:
        return jax.eval_shape(make)
    except TypeError as error:
        if "required" in str(error) and "argument" in str(error):
            raise ValueError(
                f"params={brief(make)} is a function with arguments, and it is called without; "
                f'write {init}(lambda: module.init(jax.random.key(0), x)["params"])'
            ) from None
        raise


def _no_numbers(leaf: Any) -> str:
    """What a leaf of a batch is, with the line to write, if JAX cannot take it as an array of numbers; else empty."""
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | bool | int | float | complex):
        return ""
    is_numpy = isinstance(leaf, np.ndarray | np.generic)
    if isinstance(leaf, str | bytes) or getattr(getattr(leaf, "dtype", None), "kind", "") in _NO_NUMBERS:
        return (
            f"{brief(leaf)}, text or objects and not numbers; give token or class numbers, e.g. np.int32, or leave it "
            "out of the batch"
        )
    if isinstance(leaf, np.ma.MaskedArray):
        return "a masked array; write x.filled(0) for it, and give the mask as an array of its own"
    if isinstance(leaf, np.ndarray) and leaf.dtype.names:
        fields = ", ".join(map(repr, leaf.dtype.names))
        return f"an array with the fields {fields}; write {{name: x[name] for name in x.dtype.names}} for it"
    if is_numpy and not leaf.dtype.isnative:
        line = "x.astype(x.dtype.newbyteorder('='))"
        return f"{leaf.dtype.str}, in the byte order of other machines; write {line} for it"
    if is_numpy and not leaf.dtype.names:
        with contextlib.suppress(TypeError):
            jax.dtypes.canonicalize_dtype(leaf.dtype)
            return ""
    if dataclasses.is_dataclass(leaf):
        line = f"jax.tree_util.register_dataclass({type(leaf).__name__})"
        return f"{type_of(leaf)}, a dataclass that JAX does not know; write {line}"
    return (
        f"{type_of(leaf)}, {brief(leaf)}, not an array of NumPy or JAX; write np.asarray(x) for it, for each "
        "batch of the data"
    )
