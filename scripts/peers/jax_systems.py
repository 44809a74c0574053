"""jaxche, and data parallelism as one writes it by hand in JAX; both train the Flax model of this file."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.experimental import multihost_utils
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from peers.task import WIDTHS, Pace, Rate, Task, average_weight

import jaxche

# Rounds before the clock starts. In so many "sync" has measured how many rows each process can do, and "auto" has tried
# both exact sync and local steps, so their programs are compiled.
WARM_ROUNDS = 12


class Perceptron(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in WIDTHS[1:-1]:
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(WIDTHS[-1])(x)


def loss_fn(params: Any, batch: Any) -> jax.Array:
    logits: Any = Perceptron().apply({"params": params}, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def start(seed: int) -> list[np.ndarray]:
    """Initial parameters of a seed, in the order of :meth:`Task.start`."""
    params = Perceptron().init(jax.random.key(seed), jnp.zeros((1, WIDTHS[0])))["params"]
    return to_list(params)


def to_list(params: Any) -> list[np.ndarray]:
    return [np.asarray(params[f"Dense_{i}"][name]) for i in range(len(params)) for name in ("kernel", "bias")]


def from_list(arrays: list[np.ndarray]) -> Any:
    pairs = zip(arrays[::2], arrays[1::2], strict=True)
    return {f"Dense_{i}": {"kernel": kernel, "bias": bias} for i, (kernel, bias) in enumerate(pairs)}


def adam(rate: Rate, batches_per_update: int = 1) -> optax.GradientTransformation:
    """Adam at this learning rate, for a schedule that counts batches, or updates of some batches each."""
    if rate.batches is None:
        return optax.adam(rate.peak)
    return optax.adam(optax.cosine_decay_schedule(rate.peak, max(1, round(rate.batches / batches_per_update))))


class _OnJax:
    def agree(self, value: float) -> float:
        # Two floats, as JAX has no doubles by default.
        high = np.float32(value)
        parts = np.array([high, np.float32(value - high)], np.float32)
        return float(np.asarray(multihost_utils.broadcast_one_to_all(parts), np.float64).sum())


class Jaxche(_OnJax):
    """The trainer; ``knobs`` are its arguments."""

    def __init__(self, task: Task, seed: int, rate: Rate, pace_ms: float, **knobs: Any):
        # The trainer reads its pace from the environment, as every script under `jaxche launch --pace` does.
        # With overlap merges run on the second device of each process.
        replicas, self._ema = jax.devices()[::2] if "overlap" in knobs else None, knobs.get("ema")
        self._trainer = jaxche.Trainer(loss_fn, adam(rate), seed=seed, replicas=replicas, **knobs)
        self._data = jaxche.Batches({"x": task.x, "y": task.y}, task.batch_size, seed)
        state = self._trainer.init(from_list(task.start(seed)))
        for _ in range(WARM_ROUNDS if "policy" in knobs else 1):  # compiles
            state, _ = self._trainer.round(state, self._data)
        self._trainer.params(state)
        self._state = self._trainer.init(from_list(task.start(seed)))

    def agree(self, value: float) -> float:
        self._trainer.params(self._state)  # a merge in flight ends before other programs communicate
        return super().agree(value)

    def run(self, batches: int) -> int:
        done = 0
        while done < batches:
            self._state, info = self._trainer.round(self._state, self._data)
            done += info.batches
        return done

    def parameters(self) -> list[np.ndarray]:
        return to_list(self._trainer.params(self._trainer.with_ema(self._state) if self._ema else self._state))


class PlainJit(_OnJax):
    """Data parallelism: a local gradient, one all-reduce of it as one flat array, the same update on every process.

    With ``ema`` each update is taken into an average.
    """

    def __init__(self, task: Task, seed: int, rate: Rate, pace_ms: float, ema: float | None = None):
        mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
        self._split, everywhere = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
        self._task, self._seed, self._pace, self._step = task, seed, Pace(pace_ms), 0
        flat, self._unravel = ravel_pytree(from_list(task.start(seed)))
        tx = adam(rate, jax.process_count())

        @jax.jit
        def gradient(flat: Any, batch: Any) -> Any:
            return jax.grad(lambda flat: loss_fn(self._unravel(flat), batch))(flat)[None]

        @jax.jit
        def update(flat: Any, opt_state: Any, gradients: Any) -> Any:
            updates, opt_state = tx.update(gradients.mean(0), opt_state, flat)
            return jax.lax.with_sharding_constraint((optax.apply_updates(flat, updates), opt_state), everywhere)

        @jax.jit
        def alone(flat: Any, opt_state: Any, batch: Any) -> Any:
            return update(flat, opt_state, gradient(flat, batch))

        def place(tree: Any) -> Any:
            return jax.tree.map(lambda x: jax.make_array_from_process_local_data(everywhere, np.asarray(x)), tree)

        self._gradient, self._update, self._alone, self._ema = gradient, update, alone, ema
        self._averaged = jax.jit(lambda average, flat, weight: average + weight * (flat - average))
        first = place(flat), place(tx.init(flat))
        (self._flat, self._opt_state), self._average = first, first[0]
        for _ in range(2):  # compiles
            self.run(1)
        (self._flat, self._opt_state), self._average, self._step = first, first[0], 0

    def run(self, batches: int) -> int:
        replicas = jax.process_count()
        steps = -(-batches // replicas)
        self._pace.begin()
        for _ in range(steps):
            x, y = self._task.batch(self._seed, self._step * replicas + jax.process_index())
            if replicas == 1:
                self._flat, self._opt_state = self._alone(self._flat, self._opt_state, {"x": x, "y": y})
                jax.block_until_ready(self._flat)
                self._pace.wait()
            else:
                self._together({"x": x, "y": y})
            self._step += 1
            if self._ema is not None:
                self._average = self._averaged(self._average, self._flat, average_weight(self._ema, self._step))
        return steps * replicas

    def _together(self, batch: Any) -> None:
        self._pace.begin()
        gradient = jax.block_until_ready(self._gradient(self._flat.addressable_data(0), batch))
        self._pace.wait()
        shape = (jax.process_count(), *gradient.shape[1:])
        gradients = jax.make_array_from_single_device_arrays(shape, self._split, [gradient])
        self._flat, self._opt_state = self._update(self._flat, self._opt_state, gradients)
        jax.block_until_ready(self._flat)

    def parameters(self) -> list[np.ndarray]:
        flat = self._flat if self._ema is None else self._average
        return to_list(self._unravel(flat.addressable_data(0)))


def first_gradient(data: Any, arrays: list[np.ndarray]) -> tuple[float, list[np.ndarray]]:
    """Loss and gradient of the first batch at the initial parameters."""
    loss, grads = jax.value_and_grad(loss_fn)(from_list(arrays), data[0])
    return float(loss), to_list(grads)
