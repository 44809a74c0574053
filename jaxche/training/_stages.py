"""A replica whose model is cut into stages: a pipeline of its own, on devices of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxche.averaging import add_weighted, zero_sums
from jaxche.sharding import Device, batch_size
from jaxche.stages import Partitioned
from jaxche.training._counts import advanced, ahead, are_schedules, counts_of
from jaxche.training._finite import stayed_finite
from jaxche.training._place import Begin, OneDevice, first, lift
from jaxche.training._programs import Carry, Constants, Local, Steps


class Stages:
    """A replica on one device a stage.

    Args:
      model: the stages, and how they communicate; its own devices are not used.
      devices: one a stage, all of one process; a device may hold several stages.
    """

    def __init__(self, model: Partitioned, devices: Sequence[Device]):
        self.model, self.by_stage = model, [OneDevice(device) for device in devices]
        self.devices = np.array([list(devices)], dtype=object)
        self.makes_pieces = False

    def start(self, begin: Begin, params: Any, model_state: Any, opt_state: Any) -> dict[str, Any]:
        """What a replica keeps: parameters and the states of optimizers are tuples, one entry a stage."""
        assert model_state is None, "stages have none"
        reached = (None,) * len(self.by_stage) if opt_state is None else opt_state
        given = zip(self.by_stage, params, reached, strict=True)
        made = [place.start(begin, tree, None, own) for place, tree, own in given]
        names = ("params", "opt_state", "outer_state")
        return Local(**{name: tuple(one[name] for one in made) for name in names}, model_state=None)._asdict()

    def put(self, batch: Any) -> Any:
        return self.by_stage[0].put(batch)


class StagedPrograms:
    """The local phase of a replica in stages.

    A step is driven from the host: the pipeline's gradients, then an update of each stage where it lives.

    Args:
      place: where the replica lives.
      tx: optimizer of the local steps, applied to each stage by itself.
      average: ``"parameters"`` or ``"gradients"``.
      seed: added to the model's own, of the keys of stages that name ``rng``.
      examples: in a batch of the data. A smaller one, as the last of an epoch may be, is cut into micro-batches of
        the largest size that divides it.
      solo: whether this is the only replica.
    """

    def __init__(
        self, place: Stages, tx: optax.GradientTransformation, average: str, seed: int, examples: int, solo: bool
    ):
        self._model, self._average, self._examples, self._solo = place.model, average, examples, solo
        self._devices = [device for (device,) in (one.devices[0] for one in place.by_stage)]
        self._seed = place.model.seed + seed
        self._tx: Any = optax.with_extra_args_support(tx)
        self._by_size: dict[int | None, Partitioned] = {}
        # keep_unused: the arguments also say on which device the zeros are made.
        self._begin = jax.jit(self._begun, keep_unused=True)
        self._update = jax.jit(self._updated, donate_argnums=(1, 2))
        self._add = jax.jit(add_weighted, donate_argnums=0)
        self._count = jax.jit(_counted, donate_argnums=0)
        self._stayed_finite = jax.jit(stayed_finite)

    def constants(self, local: Local, made: Constants) -> Constants:
        if self._average == "gradients":
            return made._replace(params=local.params)
        return made if made.stride is None else made._replace(counts=tuple(map(counts_of, local.opt_state)))

    def begin(self, local: Local, index: Any, worth: Any) -> tuple[Constants, Carry]:
        """The state a round works on, a copy: the one it starts from stays valid."""
        follows = self._average == "parameters" and not self._solo and any(are_schedules(local.opt_state))
        begun = [self._begin(*stage) for stage in zip(local.params, local.opt_state, strict=True)]
        names = ("params", "opt_state") if self._average == "parameters" else ("grads",)
        trees: dict[str, Any] = {name: tuple(one[name] for one in begun) for name in names}
        sums = jax.device_put(np.zeros((1, 2), np.float32), self._devices[-1])
        return Constants(stride=worth.stride if follows else None), Carry(None, int(index), sums, **trees)

    def compile(self, start: Constants, carry: Carry, batch: Any) -> Steps:
        examples = batch_size(batch)
        model = self._model_for(examples)
        model.compile(self._params(start, carry), batch)
        step = functools.partial(self._step, model, np.float32(examples))
        return Steps(step, step)

    def ended(self, local: Local, carry: Carry) -> Carry:
        if self._average == "gradients":
            return carry
        stages = zip(local.params, local.opt_state, carry.params, carry.opt_state, strict=True)
        flags = [self._stayed_finite((p, o), (params, opt_state)) for p, o, params, opt_state in stages]
        return carry._replace(not_finite=np.array([[not all(map(bool, flags))]], np.float32))

    def idle(self, carry: Carry) -> Carry:
        return carry if self._average == "gradients" else carry._replace(not_finite=np.zeros((1, 1), np.float32))

    def _params(self, start: Constants, carry: Carry) -> Any:
        return carry.params if self._average == "parameters" else start.params

    def _model_for(self, examples: int) -> Partitioned:
        protocol: Any = self._model.protocol
        size = protocol.micro_batch_size
        if size is not None and examples < self._examples and examples % size:
            size = next(n for n in range(min(size, examples), 0, -1) if examples % n == 0)
            protocol = replace(protocol, micro_batch_size=size)
        if size not in self._by_size:
            self._by_size[size] = Partitioned(
                [_on_lifted(stage) for stage in self._model.stages],
                self._model.loss,
                protocol,
                self._devices,
                remat=self._model.remat,
                seed=self._seed,
            )
        return self._by_size[size]

    def _step(self, model: Partitioned, examples: Any, start: Constants, carry: Carry, batch: Any) -> tuple[Carry, Any]:
        params = self._params(start, carry)
        loss, grads = model.value_and_grad(params, batch, step=carry.index)
        stepped = carry._replace(index=carry.index + 1, sums=self._count(carry.sums, loss, examples))
        if self._average == "gradients":
            added = (self._add(*stage, examples) for stage in zip(carry.grads, grads, strict=True))
            return stepped._replace(grads=tuple(added)), loss
        told = jax.device_put([loss] * len(self._devices), self._devices)
        counts = start.counts or (None,) * len(params)
        stages = zip(grads, carry.opt_state, params, told, counts, strict=True)
        updated = [self._update(*stage, start.stride) for stage in stages]
        params, opt_state = zip(*updated, strict=True)
        return stepped._replace(params=params, opt_state=opt_state), loss

    def _begun(self, params: Any, opt_state: Any) -> dict[str, Any]:
        if self._average == "parameters":
            # jnp.copy, because jit hands an unchanged input through as the same buffer, which an update would delete.
            return {"params": jax.tree.map(jnp.copy, params), "opt_state": jax.tree.map(jnp.copy, opt_state)}
        return {"grads": zero_sums(params)}

    def _updated(self, grads: Any, opt_state: Any, params: Any, loss: Any, begun: Any, stride: Any) -> tuple[Any, Any]:
        grads, opt_state, params, begun = first((grads, opt_state, params, begun))
        seen = opt_state if begun is None else ahead(opt_state, begun, stride)
        updates, updated = self._tx.update(grads, seen, params, value=loss)
        opt_state = updated if begun is None else advanced(opt_state, seen, updated)
        return lift((optax.apply_updates(params, updates), opt_state))


def _counted(sums: Any, loss: Any, examples: Any) -> Any:
    return sums + (jnp.stack([jnp.float32(1), loss.astype(jnp.float32)]) * examples)[None]


def _on_lifted(stage: Callable[..., Any]) -> Callable[..., Any]:
    """The stage for parameters with the leading axis of 1 that rows of the ``[R, ...]`` view have."""

    @functools.wraps(stage)
    def call(params: Any, x: Any, **more: Any) -> Any:
        # Not x[0]: the gradient of a reshape is one, that of an index a scatter.
        return stage(jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[1:]), params), x, **more)

    return call
