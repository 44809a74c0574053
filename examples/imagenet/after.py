"""A residual network with batch statistics on images of ten classes, in linen, on all devices.

As in ImageNet training: L2 on the kernels, momentum, warmup and cosine, bfloat16. The images are synthetic.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state

import jaxche

WEIGHT_DECAY = 1e-4


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    features: int
    stride: int
    dtype: Any

    @nn.compact
    def __call__(self, x, train):
        def norm(x):
            return nn.BatchNorm(use_running_average=not train, momentum=0.9, dtype=self.dtype)(x)

        y = nn.Conv(self.features, (3, 3), self.stride, use_bias=False, dtype=self.dtype)(x)
        y = nn.Conv(self.features, (3, 3), use_bias=False, dtype=self.dtype)(nn.relu(norm(y)))
        if x.shape != y.shape:
            x = norm(nn.Conv(self.features, (1, 1), self.stride, use_bias=False, dtype=self.dtype)(x))
        return nn.relu(x + norm(y))


class ResNet(nn.Module):
    """A stem, blocks and the mean over the image."""

    width: int = 8
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(self.width, (3, 3), 2, dtype=self.dtype)(x.astype(self.dtype))
        for stage, stride in enumerate((1, 2)):
            x = Block(self.width * 2**stage, stride, self.dtype)(x, train)
        return nn.Dense(10)(x.mean((1, 2)).astype(jnp.float32))


model = ResNet()


def make_data(examples, noise):
    """Images of 16x16: gratings of ten directions in random phase and colour, under noise."""
    rng = np.random.default_rng(0)
    label = rng.integers(0, 10, examples + 1000)
    angle, phase = np.pi * label / 10, rng.uniform(0, 2 * np.pi, len(label))
    v, u = np.meshgrid(np.linspace(-1, 1, 16), np.linspace(-1, 1, 16))
    waves = np.cos(6 * (np.cos(angle)[:, None, None] * u + np.sin(angle)[:, None, None] * v) + phase[:, None, None])
    image = waves[..., None] * rng.uniform(0.5, 1, (len(label), 1, 1, 3)) + noise * rng.normal(
        size=(len(label), 16, 16, 3)
    )
    data = {"image": image.astype(np.float32), "label": label.astype(np.int32)}
    return {name: x[1000:] for name, x in data.items()}, {name: x[:1000] for name, x in data.items()}


class TrainState(train_state.TrainState):
    """With batch statistics."""

    batch_stats: Any


def create_state(schedule, seed):
    variables = jax.jit(model.init, static_argnames="train")(
        jax.random.key(seed), jnp.zeros((1, 16, 16, 3)), train=False
    )
    tx = optax.sgd(schedule, momentum=0.9, nesterov=True)
    return TrainState.create(
        apply_fn=model.apply, params=variables["params"], tx=tx, batch_stats=variables["batch_stats"]
    )


def loss_fn(params, batch, model_state):
    variables = {"params": params, "batch_stats": model_state}
    logits, updates = model.apply(variables, batch["image"], train=True, mutable=["batch_stats"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
    kernels = [x for x in jax.tree.leaves(params) if x.ndim > 1]
    loss = loss + 0.5 * WEIGHT_DECAY * sum(jnp.sum(x**2) for x in kernels)
    return loss, ({}, updates["batch_stats"])


def evaluate(params, batch, model_state):
    logits = model.apply({"params": params, "batch_stats": model_state}, batch["image"], train=False)
    return {"accuracy": jnp.mean(logits.argmax(-1) == batch["label"])}


def main(epochs=8, batch_size=32, learning_rate=0.1, examples=2048, noise=3.0, seed=0, **options):
    """The test accuracy after training."""
    train, test = make_data(examples, noise)
    steps = epochs * -(-examples // batch_size)
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, steps // 8, steps)
    state = create_state(schedule, seed)
    trainer = jaxche.Trainer(loss_fn, state.tx, **options)
    replicas = trainer.init(state.params, state.batch_stats)
    data = jaxche.Batches(train, batch_size, seed)
    _, history = trainer.fit(replicas, data, epochs, validation=jaxche.Batches(test, 250), metric_fn=evaluate)
    return history[-1].validation["accuracy"]


if __name__ == "__main__":
    jaxche.initialize()
    main(policy="sync", joined_batches=1)  # the updates of one device
