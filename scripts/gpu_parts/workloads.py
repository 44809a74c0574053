"""Models and batches of several sizes, in bfloat16 with float32 parameters, and the raw loop that trains them."""

from __future__ import annotations

import collections
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

_KINDS = 8  # different batches in host memory
_AHEAD = 2  # batches that the raw loop copies to the device before it needs them


@dataclass(frozen=True)
class Workload:
    """A model with its loss; ``batch(rows, seed)`` makes a batch in host memory."""

    name: str
    init: Callable[[], Any]
    loss_fn: Callable[[Any, Any], jax.Array]
    tx: optax.GradientTransformation
    batch: Callable[[int, int], Any]
    rows: int

    def batches(self, count: int, rows: int | None = None) -> Repeated:
        """So many batches, a few different ones in turn."""
        return Repeated([self.batch(rows or self.rows, seed) for seed in range(_KINDS)], count)


class Repeated:
    """A sequence of ``count`` batches that repeats a few."""

    def __init__(self, batches: Sequence[Any], count: int):
        self._batches, self._count = batches, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i: int) -> Any:
        if not 0 <= i < self._count:
            raise IndexError(i)
        return self._batches[i % len(self._batches)]


def _pixels(x: jax.Array) -> jax.Array:
    """Bytes as numbers from -1 to 1."""
    return x.astype(jnp.bfloat16) / 128 - 1


class Cnn(nn.Module):
    """A small convolutional network."""

    width: int = 32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = _pixels(x)
        for factor in (1, 2, 4):
            x = nn.relu(nn.Conv(factor * self.width, (3, 3), strides=2, dtype=jnp.bfloat16)(x))
        return nn.Dense(10, dtype=jnp.float32)(x.mean((1, 2)))


class ResNet(nn.Module):
    """ResNet-18 with group norms, which need no model state."""

    width: int = 64
    blocks: tuple[int, ...] = (2, 2, 2, 2)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = partial(nn.Conv, use_bias=False, dtype=jnp.bfloat16)
        norm = partial(nn.GroupNorm, num_groups=8, dtype=jnp.bfloat16)
        x = nn.relu(norm()(conv(self.width, (3, 3))(_pixels(x))))
        for stage, count in enumerate(self.blocks):
            for block in range(count):
                features, strides = self.width * 2**stage, 2 if stage and not block else 1
                y = nn.relu(norm()(conv(features, (3, 3), strides=strides)(x)))
                y = norm()(conv(features, (3, 3))(y))
                if x.shape != y.shape:
                    x = norm()(conv(features, (1, 1), strides=strides)(x))
                x = nn.relu(x + y)
        return nn.Dense(10, dtype=jnp.float32)(x.mean((1, 2)))


class Block(nn.Module):
    """A pre-norm transformer block, as the body of a scan."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        dense, norm = partial(nn.DenseGeneral, dtype=jnp.bfloat16), partial(nn.LayerNorm, dtype=jnp.bfloat16)
        width = x.shape[-1]
        q, k, v = (dense((self.heads, width // self.heads))(norm()(x)) for _ in range(3))
        x = x + dense(width, axis=(-2, -1))(jax.nn.dot_product_attention(q, k, v, is_causal=True))
        return x + dense(width)(nn.gelu(dense(4 * width)(norm()(x)))), None


class Layers(nn.Module):
    """Blocks by scan, so that the time to compile does not grow with their number."""

    blocks: int
    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scanned = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.blocks)
        return scanned(self.heads)(x, None)[0]


class Transformer(nn.Module):
    """A decoder with tied embeddings."""

    vocabulary: int
    width: int
    blocks: int
    heads: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(self.vocabulary, self.width, dtype=jnp.bfloat16)
        place = self.param("place", nn.initializers.normal(0.02), (tokens.shape[1], self.width))
        x = embed(tokens) + place.astype(jnp.bfloat16)
        x = nn.LayerNorm(dtype=jnp.bfloat16)(Layers(self.blocks, self.heads)(x))
        return embed.attend(x).astype(jnp.float32)


def images(name: str, net: nn.Module, size: int, rows: int) -> Workload:
    """Image classification on random images."""

    def init() -> Any:
        return jax.jit(net.init)(jax.random.key(0), jnp.zeros((1, size, size, 3), jnp.uint8))["params"]

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        logits: Any = net.apply({"params": params}, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    def batch(rows: int, seed: int) -> Any:
        rng = np.random.default_rng(seed)
        # Bytes, as images are stored: a quarter of what is copied to the device otherwise.
        x = rng.integers(0, 256, (rows, size, size, 3), np.uint8)
        return {"x": x, "y": rng.integers(0, 10, rows, np.int32)}

    return Workload(name, init, loss_fn, optax.sgd(0.01, momentum=0.9), batch, rows)


def tokens(name: str, net: Transformer, context: int, rows: int, tx: Any = None) -> Workload:
    """Next-token prediction on random tokens."""

    def init() -> Any:
        return jax.jit(net.init)(jax.random.key(0), jnp.zeros((1, context), jnp.int32))["params"]

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        logits: Any = net.apply({"params": params}, batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    def batch(rows: int, seed: int) -> Any:
        return np.random.default_rng(seed).integers(0, net.vocabulary, (rows, context + 1), np.int32)

    return Workload(name, init, loss_fn, tx or optax.adamw(3e-4), batch, rows)


def cnn(cpu: bool) -> Workload:
    """Steps of about half a millisecond on a large card."""
    return images("small CNN", Cnn(8 if cpu else 32), 16 if cpu else 32, 16 if cpu else 256)


def resnet(cpu: bool) -> Workload:
    """ResNet-18 on images of 32 pixels."""
    return images("ResNet-18", ResNet(8, (1, 1)) if cpu else ResNet(), 16 if cpu else 32, 8 if cpu else 64)


def transformer(cpu: bool, large: bool = False, tx: Any = None) -> Workload:
    """A transformer of 25 million parameters, or of 350 million (GPT-2 medium)."""
    if cpu:
        return tokens(f"transformer {'L' if large else 'S'}", Transformer(64, 32, 2 + large, 2), 16, 4, tx)
    if large:
        return tokens("transformer 350M", Transformer(50_304, 1024, 24, 16), 1024, 4, tx)
    return tokens("transformer 25M", Transformer(12_288, 512, 6, 8), 256, 32, tx)


class RawLoop:
    """The loop that a user writes: a jitted step that donates its state, and batches copied ahead."""

    def __init__(self, workload: Workload, params: Any = None):
        def step(params: Any, opt_state: Any, batch: Any) -> Any:
            loss, grads = jax.value_and_grad(workload.loss_fn)(params, batch)
            updates, opt_state = workload.tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss

        self._step = jax.jit(step, donate_argnums=(0, 1))
        self.params = workload.init() if params is None else jax.tree.map(jnp.copy, params)
        self.opt_state = jax.jit(workload.tx.init)(self.params)

    def run(self, batches: Iterable[Any]) -> float:
        """Train on these batches; returns the seconds until the last step was computed."""
        ahead: collections.deque[Any] = collections.deque()
        start, loss = time.perf_counter(), None

        def step() -> Any:
            self.params, self.opt_state, loss = self._step(self.params, self.opt_state, ahead.popleft())
            return loss

        for batch in batches:
            ahead.append(jax.device_put(batch))
            if len(ahead) > _AHEAD:
                loss = step()
        while ahead:
            loss = step()
        jax.block_until_ready((self.params, loss))
        return time.perf_counter() - start


def step_ms(loop: RawLoop, workload: Workload, rows: int | None = None, steps: int = 10) -> float:
    """Milliseconds a step, after one that compiles."""
    batches = workload.batches(steps, rows)
    loop.run([batches[0]])
    return statistics.median(loop.run(batches) for _ in range(3)) / steps * 1e3


def rows_for(workload: Workload, wanted_ms: float, most: int = 1 << 14) -> int:
    """The rows of a batch, a multiple of 4, with which a step takes about so long; a second look if far off."""
    loop, rows = RawLoop(workload), workload.rows
    for _ in range(2):
        ms = step_ms(loop, workload, rows)
        if 0.75 < ms / wanted_ms < 1.33:
            break
        rows = min(most, max(4, round(rows * wanted_ms / ms / 4) * 4))
    return rows
