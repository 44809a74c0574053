"""Flax adapters: loss functions of linen and nnx models."""

from __future__ import annotations

import copy
import functools
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from jaxche.averaging import path_names
from jaxche.messages import brief, short_traceback
from jaxche.sharding import RNG_NAMES, loss_and_aux, not_floats, wanted_names
from jaxche.training._start_checks import shapes_of_state

if TYPE_CHECKING:
    from flax import linen as nn
    from flax import nnx

    from jaxche.reports import History
    from jaxche.training._state import TrainerState
    from jaxche.training._trainer import Trainer


@short_traceback
def linen_loss(
    module: nn.Module, loss_fn: Callable[..., Any], rngs: str | Sequence[str] = ("dropout",)
) -> Callable[..., tuple[Any, tuple[dict[str, Any], Any]]]:
    """A loss for the trainer from a linen module with any collections and random streams.

    Args:
      module: the linen module.
      loss_fn: ``loss_fn(apply, batch) -> loss`` or ``(loss, metrics)``, where ``apply(x, ...)`` is ``module.apply``
        with parameters, collections and random streams filled in, and returns the output alone. Collections it
        updates (batch statistics) become the replica's new ``model_state``. With ``mutable=["losses"]`` it returns
        ``(output, {"losses": ...})``, as of values that the module sows; leave that collection out of the model state,
        because sown values are added to those in it. It gets ``params=``, e.g. for an L2 penalty, and ``rng=`` (or
        ``key=``), a new key for every batch, if it names them.
      rngs: names of the random streams the module draws from in training, or one name. Each call of ``apply`` gets
        keys of its own; ``apply(..., rngs={"dropout": key})`` gives others.

    Returns:
      A function for ``jaxche.Trainer``. Start it with
      ``trainer.init(variables.pop("params"), model_state=variables)``.

    Raises:
      ValueError: ``module`` is not a linen module.

    Example:
      >>> from flax import linen as nn
      >>> import jax.numpy as jnp, numpy as np, optax
      >>> import jaxche
      >>> class Net(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x, train):
      ...         x = nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x))
      ...         return nn.Dense(1)(nn.Dropout(0.1, deterministic=not train)(nn.relu(x)))
      >>> net = Net()
      >>> def loss_fn(apply, batch):
      ...     return jnp.mean((apply(batch["x"], train=True) - batch["y"]) ** 2)
      >>> data = jaxche.Batches({"x": np.ones((32, 3), np.float32), "y": np.ones((32, 1), np.float32)}, batch_size=4)
      >>> trainer = jaxche.Trainer(jaxche.linen_loss(net, loss_fn), optax.adam(1e-2))
      >>> variables = net.init(jax.random.key(0), data[0]["x"], train=False)
      >>> state = trainer.init(variables.pop("params"), model_state=variables)
      >>> state, history = trainer.fit(state, data, epochs=2, progress=False)
      >>> sorted(trainer.model_state(state))
      ['batch_stats']
    """
    from flax import linen as nn
    from flax.core.scope import in_filter, union_filters
    from flax.errors import InvalidRngError, ScopeCollectionNotFound

    if not isinstance(module, nn.Module):
        raise ValueError(f"module={brief(module)} is not a linen module; for nnx write jaxche.NNXLoss(model, loss_fn)")
    _check_function(loss_fn, "apply, batch")
    wanted = wanted_names(loss_fn, "apply, batch", ("params", *RNG_NAMES))
    names = (rngs,) if isinstance(rngs, str) else tuple(rngs)

    def call(params: Any, batch: Any, rng: Any, model_state: Any) -> tuple[Any, tuple[dict[str, Any], Any]]:
        collections = dict(model_state or {})
        if "params" in collections:  # the module would compute with these, which no step changes
            raise ValueError(
                f"model_state has {', '.join(map(repr, collections))}, and 'params' are not a part of it; write "
                'trainer.init(variables.pop("params"), model_state=variables)'
            )
        streams = {name: jax.random.fold_in(rng, i) for i, name in enumerate(names)}
        calls = itertools.count()

        def apply(*args: Any, mutable: Any = False, rngs: Any = None, **kwargs: Any) -> Any:
            if args and isinstance(args[0], Mapping) and "params" in args[0] and {*args[0]} <= {"params", *collections}:
                raise ValueError(
                    "loss_fn calls apply with variables, which linen_loss supplies; leave them out: write "
                    'apply(batch["x"])'
                )
            variables, number = {"params": params, **collections}, next(calls)
            # As the streams of a model of nnx go on, so that e.g. two views of a batch have dropout of their own.
            keys = {name: jax.random.fold_in(key, number) if number else key for name, key in streams.items()}
            try:
                all_mutable = union_filters(list(collections), mutable)
                output, updated = module.apply(
                    variables, *args, rngs=keys | dict(rngs or {}), mutable=all_mutable, **kwargs
                )
            except InvalidRngError as error:
                error.add_note(f"jaxche.linen_loss(module, loss_fn, rngs=) has {names}: add the name to rngs=")
                raise
            except ScopeCollectionNotFound as error:
                has = ", ".join(map(repr, collections)) or "no collections"
                error.add_note(
                    f"model_state has {has}: write trainer.init(variables.pop('params'), model_state=variables)"
                )
                raise
            collections.update({name: updated[name] for name in collections if name in updated})
            if not mutable:
                return output
            return output, {name: value for name, value in updated.items() if in_filter(mutable, name)}

        named = {name: params if name == "params" else jax.random.fold_in(rng, len(names)) for name in wanted}
        loss, metrics = loss_and_aux(loss_fn(apply, batch, **named))
        if model_state is None:
            return loss, (metrics, None)
        after = {name: _frozen_as(model_state[name], value) for name, value in collections.items()}
        return loss, (metrics, _frozen_as(model_state, after))

    return call


def _frozen_as(given: Any, found: Any) -> Any:
    """The collection ``found`` as a ``FrozenDict``, if ``given`` is one: ``module.apply`` returns plain dicts."""
    from flax.core import FrozenDict, freeze, unfreeze

    if isinstance(given, FrozenDict):
        return freeze(found)
    return unfreeze(found) if isinstance(found, FrozenDict) else found


class NNXLoss:
    """A loss for the trainer from an nnx model; holds the parameters and the state to start from.

    Args:
      model: the nnx model, in training mode. It is not changed; :meth:`rebuild` makes a trained one. Load pretrained
        weights into it before: those that it gets later are not seen.
      loss_fn: ``loss_fn(model, batch) -> loss`` or ``(loss, metrics)``, as in nnx training code. It gets ``rngs=``, an
        ``nnx.Rngs`` with new keys for every batch, and ``rng=`` (or ``key=``), such a key, if it names them.
      optimizer: the model's ``nnx.Optimizer``, if there is one: every replica starts from its state, and :meth:`update`
        updates model and optimizer after training.
      wrt: the nnx filter of the variables to train, e.g. ``nnx.LoRAParam``; by default that of the optimizer, or
        ``nnx.Param``. Other parameters are frozen: constants on every replica, which are neither merged nor saved in
        checkpoints, so a resumed run has to be given the same ones.

    Attributes:
      params: pytree of plain dicts, for ``trainer.init``.
      frozen: the parameters that are not trained, in the same form. They are no part of the state.
      model_state: all variables that are not parameters (batch statistics, random streams), in the same form.
      tx: optax transformation of ``optimizer``, for the trainer; None without one.
      opt_state: state of ``optimizer``, for ``trainer.init``; None without one.
      metric_names: the variables of nnx metrics in the model, which several replicas do not add up.

    Raises:
      ValueError: ``model`` is not an nnx module, ``optimizer`` is not one of its parameters, or ``wrt`` selects none.

    Example:
      >>> import jax.numpy as jnp, numpy as np, optax
      >>> from flax import nnx
      >>> import jaxche
      >>> class Net(nnx.Module):
      ...     def __init__(self, rngs):
      ...         self.dense, self.norm = nnx.Linear(3, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
      ...         self.drop, self.out = nnx.Dropout(0.1, rngs=rngs), nnx.Linear(8, 1, rngs=rngs)
      ...     def __call__(self, x):
      ...         return self.out(self.drop(nnx.relu(self.norm(self.dense(x)))))
      >>> loss = jaxche.NNXLoss(Net(nnx.Rngs(0)), lambda model, batch: jnp.mean((model(batch["x"]) - batch["y"]) ** 2))
      >>> data = jaxche.Batches({"x": np.ones((32, 3), np.float32), "y": np.ones((32, 1), np.float32)}, batch_size=4)
      >>> trainer = jaxche.Trainer(loss, optax.adam(1e-2))
      >>> state, history = trainer.fit(trainer.init(loss.params, loss.model_state), data, epochs=2, progress=False)
      >>> model = loss.rebuild(trainer.params(state), trainer.model_state(state))
      >>> model.eval()
      >>> model(data[0]["x"]).shape
      (4, 1)

      With a model and an ``nnx.Optimizer``:

      >>> model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
      >>> optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
      >>> loss = jaxche.NNXLoss(model, lambda model, batch: jnp.mean((model(batch["x"]) - batch["y"]) ** 2), optimizer)
      >>> trainer = jaxche.Trainer(loss, loss.tx)
      >>> state = trainer.init(loss.params, loss.model_state, loss.opt_state)
      >>> state, history = trainer.fit(state, data, epochs=2, progress=False)
      >>> loss.update(trainer, state, history)  # model and optimizer are trained
      >>> int(optimizer.step[...]) > 0
      True
    """

    @short_traceback
    def __init__(
        self,
        model: nnx.Module,
        loss_fn: Callable[..., Any],
        optimizer: nnx.Optimizer | None = None,
        wrt: Any = None,
    ):
        from flax import nnx

        if not isinstance(model, nnx.Module):
            raise ValueError(
                f"model={brief(model)} is not an nnx module; for linen write jaxche.linen_loss(module, loss_fn), and "
                "of several nnx models make one: nnx.Dict(generator=generator, critic=critic)"
            )
        _check_function(loss_fn, "model, batch")
        self._wanted = _wanted_keys(loss_fn)
        self._wrt = _wrt(optimizer, wrt)
        self._graph, self._params, self._frozen, self._rest = nnx.split(model, self._wrt, nnx.Param, ...)
        self._loss_fn = loss_fn
        self.params, self.frozen = nnx.to_pure_dict(self._params), nnx.to_pure_dict(self._frozen)
        if not jax.tree.leaves(self.params):
            raise ValueError(
                f"wrt={_filter_name(self._wrt)} selects no variable of the model; write wrt=nnx.Param for all "
                "parameters, or wrt=nnx.LoRAParam for adapters"
            )
        if other := next(((name, kind) for name, _, kind in not_floats(self.params, "") if kind is not None), None):
            filtered = _filter_name(self._wrt)
            both = filtered if self._wrt is nnx.Param else f"nnx.Param, {filtered}"
            raise ValueError(
                f"wrt={filtered} selects {other[0]}, which is {other[1]}, and an optimizer trains floats; write "
                f"wrt=nnx.All({both}, lambda path, p: jnp.issubdtype(p.dtype, jnp.floating))"
            )
        self.model_state = nnx.to_pure_dict(self._rest)

        def paths(kind: type) -> dict[Any, Any]:
            return nnx.traversals.flatten_mapping(nnx.to_pure_dict(nnx.filter_state(self._rest, kind)))

        self._keys, self._streams = sorted(paths(nnx.RngKey), key=str), list(paths(nnx.RngState))
        self.metric_names = [".".join(map(str, path)) for path in paths(nnx.metrics.MetricState)]
        self._model, self._optimizer = model, optimizer
        self._counted: tuple[int, float, float] | None = None  # the last round of the optimizer's count of steps
        self.tx = None if optimizer is None else optimizer.tx
        self.opt_state = None if optimizer is None else self._start_state(optimizer)

    def _start_state(self, optimizer: nnx.Optimizer) -> Any:
        """The state of the optimizer with dicts in place of nnx states; the leaves have the same order."""
        form = shapes_of_state(optimizer.tx, self.params)
        leaves = jax.tree.leaves(optimizer.opt_state)
        if [x.shape for x in jax.tree.leaves(form)] != [x.shape for x in leaves]:
            raise ValueError(
                "optimizer is not one of the parameters of this model; write "
                f"nnx.Optimizer(model, tx, wrt={_filter_name(self._wrt)}). Labels and masks in tx get arrays, not nnx "
                "variables: choose by path, with jax.tree.map_with_path(lambda path, p: ..., params)"
            )
        return jax.tree.unflatten(jax.tree.structure(form), [jnp.copy(x) for x in leaves])

    @short_traceback
    def update(self, trainer: Trainer, state: TrainerState, history: History) -> None:
        """Update the model, and the optimizer if there is one, in place as ``nnx.update`` does.

        ``params``, ``model_state`` and ``opt_state`` of this loss are then the trained ones.

        Args:
          trainer: the trainer.
          state: its state. Each replica has its own optimizer state; the optimizer gets that of the first replica of
            this process.
          history: of the rounds since the start, for the optimizer's count of steps: its updates, in rounds of local
            steps those of the replica that takes most. Rounds that an earlier update has counted, as in the history of
            a folder of checkpoints, are not counted again.

        Raises:
          ValueError: learning rates are scaled, so that the optimizer state has another structure; or a layer of the
            model was replaced since.
        """
        from flax import nnx

        params, model_state = trainer.params(state), trainer.model_state(state)
        trained = self.rebuild(params, model_state)
        # Before anything is written: nnx.update puts an array of another shape into a layer.
        found, now = (nnx.to_pure_dict(nnx.state(model)) for model in (trained, self._model))
        _check_form("the trained variables", now, found)
        _check_form("the variables of the model, as it is now,", found, now)
        if self._optimizer is not None:
            own = [x[0] for x in jax.tree.leaves(state.local_states[0].opt_state)]
            leaves, form = jax.tree.flatten(self._optimizer.opt_state)
            if [x.shape for x in own] != [x.shape for x in leaves]:
                raise ValueError(
                    "the trainer's optimizer state has another structure than the optimizer's (scaling= adds to it); "
                    "take the model alone: model = loss.rebuild(trainer.params(state), trainer.model_state(state))"
                )
            nnx.update(self._optimizer.opt_state, nnx.state(jax.tree.unflatten(form, own)))
            # The history of a folder of checkpoints begins with rounds that an earlier update has counted.
            marks = [(info.round, info.clock_ms, info.loss) for info in history]
            first = marks.index(self._counted) + 1 if self._counted in marks else 0
            # The same on all processes, whatever the share of their own replicas.
            updates = [1 if info.average == "gradients" else max(info.counts) for info in history[first:]]
            self._optimizer.step[...] += sum(updates)
            self._counted = marks[-1] if marks else self._counted
            self.opt_state = self._start_state(self._optimizer)
        nnx.update(self._model, nnx.state(trained))
        self.params, self.model_state = params, self._checked(model_state)  # another run starts from these

    def rebuild(self, params: Any, model_state: Any) -> nnx.Module:
        """A model with the given parameters and state.

        Args:
          params: e.g. ``trainer.params(state)``.
          model_state: e.g. ``trainer.model_state(state)``.

        Returns:
          A new nnx model.

        Raises:
          ValueError: parameters or state of another model.
        """
        from flax import nnx

        _check_form("params", self.params, params)
        model_state = self._checked(model_state)
        own = jax.tree.map(lambda x: x, (self._params, self._frozen, self._rest))
        for variables, values in zip(own, (params, self.frozen, model_state), strict=True):
            nnx.replace_by_pure_dict(variables, values)
        return nnx.merge(self._graph, *own)

    def in_eval_mode(self, metric_fn: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """A metric function in the trainer's form that calls ``metric_fn`` with the model in evaluation mode.

        ``trainer.evaluate`` of a trainer with this loss does this by itself.

        Args:
          metric_fn: ``metric_fn(model, batch)``; None for the loss function.

        Returns:
          ``call(params, batch, rng, model_state)``.
        """
        from flax import nnx

        function = metric_fn._loss_fn if isinstance(metric_fn, NNXLoss) else metric_fn or self._loss_fn
        wanted = _wanted_keys(function)

        def call(params: Any, batch: Any, rng: Any, model_state: Any) -> Any:
            model = self._with_keys(params, rng, nnx.traversals.flatten_mapping(self._checked(model_state)))
            model.eval()
            return function(model, batch, **self._named_keys(wanted, rng))

        return call

    def _checked(self, model_state: Any) -> Any:
        """The model state; refuses one of another model, or None if the model has variables beside its parameters."""
        if model_state is None and self.model_state:
            raise ValueError(
                f"model_state is None, and the model has variables beside its parameters, {brief(self.model_state)}; "
                "write trainer.init(loss.params, loss.model_state)"
            )
        _check_form("model_state", self.model_state, model_state)
        return {} if model_state is None else model_state

    def _with_keys(self, params: Any, rng: Any, before: dict[Any, Any]) -> nnx.Module:
        """The model with these variables and with random keys of a batch."""
        from flax import nnx

        keys = {path: _fresh(jax.random.fold_in(rng, i), before[path]) for i, path in enumerate(self._keys)}
        return self.rebuild(params, nnx.traversals.unflatten_mapping(before | keys))

    def _named_keys(self, wanted: Sequence[str], rng: Any) -> dict[str, Any]:
        """The random keys that a function of the user names."""
        from flax import nnx

        own = jax.random.fold_in(rng, len(self._keys))
        return {name: nnx.Rngs(own) if name == "rngs" else own for name in wanted}

    def __call__(self, params: Any, batch: Any, rng: Any, model_state: Any) -> tuple[Any, tuple[dict[str, Any], Any]]:
        """The loss in the trainer's form."""
        from flax import nnx

        # The keys depend on the batch, not on the replica; the streams are returned unchanged.
        before = nnx.traversals.flatten_mapping(self._checked(model_state))
        model = self._with_keys(params, rng, before)
        named = self._named_keys(self._wanted, rng)
        loss, metrics = loss_and_aux(self._loss_fn(model, batch, **named))
        _, *written, rest = nnx.split(model, self._wrt, nnx.Param, ...)
        if _changed((params, self.frozen), written):

            def parameters_after(params: Any, frozen: Any) -> Any:
                again = _with_frozen(self, (frozen,))._with_keys(params, rng, before)
                self._loss_fn(again, batch, **self._named_keys(self._wanted, rng))
                _, trained, frozen, _ = nnx.split(again, self._wrt, nnx.Param, ...)
                return nnx.to_pure_dict(trained), nnx.to_pure_dict(frozen)

            # Transformations such as nnx.remat return the parameters that they get as new arrays.
            code, after = jax.make_jaxpr(parameters_after, return_shape=True)(params, self.frozen)
            _warn_of_writes(code.jaxpr, after)
        after = nnx.traversals.flatten_mapping(nnx.to_pure_dict(rest)) | {path: before[path] for path in self._streams}
        return loss, (metrics, None if model_state is None else nnx.traversals.unflatten_mapping(after))


def _check_function(loss_fn: Any, takes: str) -> None:
    if not callable(loss_fn):
        raise ValueError(f"loss_fn={brief(loss_fn)} is not a function; write def loss_fn({takes}): ... return loss")


def _wanted_keys(function: Callable[..., Any]) -> list[str]:
    return wanted_names(function, "model, batch", ("rngs", *RNG_NAMES))


def _with_frozen(loss: NNXLoss, children: tuple[Any]) -> NNXLoss:
    other = copy.copy(loss)
    (other.frozen,) = children
    return other


# The trainer hands the arrays of this pytree to the compiled steps as inputs.
jax.tree_util.register_pytree_node(NNXLoss, lambda loss: ((loss.frozen,), loss), _with_frozen)


def _changed(before: Any, after: Any) -> bool:
    """Whether any leaf is another object."""
    return any(x is not y for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True))


def _warn_of_writes(code: Any, after: Any) -> None:
    """Warn of parameters that the ``code`` of a loss function does not return as it gets them."""
    paths = [".".join(path_names(path[1:])) for path, _ in jax.tree.leaves_with_path(after)]
    written = [path for i, (path, source) in enumerate(zip(paths, _sources(code), strict=True)) if i != source]
    if written:
        warnings.warn(
            f"loss_fn writes to parameters, {brief(written)}, and the trainer drops what it writes: the optimizer "
            "alone changes parameters. Hold a value that loss_fn sets, such as a moving average of parameters, in a "
            "variable of a type of its own: class Average(nnx.Variable): pass. nnx.SpectralNorm and nnx.WeightNorm "
            "write weights that they normalise again in the next call; here they stay as before, as in linen",
            stacklevel=2,
        )


def _sources(code: Any) -> list[int | None]:
    """For each output of a jaxpr, the number of the input that it is; None if it is another value."""
    numbers = {variable: i for i, variable in enumerate(code.invars)}

    def number(atom: Any) -> int | None:
        return None if isinstance(atom, Literal) else numbers.get(atom)

    for equation in code.eqns:
        inner = next((equation.params[name] for name in ("jaxpr", "call_jaxpr") if name in equation.params), None)
        inner = getattr(inner, "jaxpr", inner)
        if inner is None or len(inner.invars) != len(equation.invars):
            continue
        for variable, source in zip(equation.outvars, _sources(inner), strict=False):
            if source is not None and (found := number(equation.invars[source])) is not None:
                numbers[variable] = found
    return [number(atom) for atom in code.outvars]


def _wrt(optimizer: nnx.Optimizer | None, wrt: Any) -> Any:
    """The filter of the trained variables, that of the optimizer if there is one."""
    from flax import nnx

    if optimizer is None:
        return nnx.Param if wrt is None else wrt
    if not isinstance(optimizer, nnx.Optimizer):
        raise ValueError(
            f"optimizer={brief(optimizer)} is no nnx.Optimizer; write nnx.Optimizer(model, tx, wrt=nnx.Param), or for "
            "an optax optimizer jaxche.NNXLoss(model, loss_fn) and jaxche.Trainer(loss, tx)"
        )
    if wrt is not None and wrt != optimizer.wrt:
        raise ValueError(
            f"wrt={_filter_name(wrt)}, but the optimizer is of {_filter_name(optimizer.wrt)}; leave wrt= out, or write "
            f"nnx.Optimizer(model, tx, wrt={_filter_name(wrt)})"
        )
    return optimizer.wrt


def _filter_name(wrt: Any) -> str:
    return f"nnx.{wrt.__name__}" if isinstance(wrt, type) else repr(wrt)


def _fresh(key: Any, stream: Any) -> Any:
    """Keys of a stream's shape; in a stacked stream, equal keys stay equal."""
    if stream.shape == ():
        return key

    # Fold in the stream's own keys, so that layers with a shared key (rngs.broadcast) still share one.
    def folded(words: Any) -> Any:
        return functools.reduce(jax.random.fold_in, words, key)

    words = jax.random.key_data(stream)
    return jax.vmap(folded)(words.reshape(stream.size, -1)).reshape(stream.shape)


def _check_form(name: str, own: Any, given: Any) -> None:
    """Refuse variables of another nnx model: those without an entry of this model's ``own``, or of another shape."""
    found = {path_names(path): jnp.shape(leaf) for path, leaf in jax.tree.leaves_with_path(given)}
    for path, leaf in jax.tree.leaves_with_path(own):
        names = path_names(path)
        if (shape := found.get(names)) != jnp.shape(leaf):
            have = "is missing" if shape is None else f"has the shape {shape}, and the model's is {jnp.shape(leaf)}"
            raise ValueError(
                f"{name} are of another model: {'.'.join(names)} {have}; after a change of a model write a new "
                "loss = jaxche.NNXLoss(model, loss_fn) and state = trainer.init(loss.params, loss.model_state)"
            )
