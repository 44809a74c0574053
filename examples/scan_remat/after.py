"""A deep transformer on small images: its layers scanned and recomputed in the backward pass, in linen, on all devices.

An image of 8x8 is a sequence of eight rows. The images are the digits in the wheel of scikit-learn.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_digits

import jaxche


class Block(nn.Module):
    """Attention and a feed-forward layer, in the form of a scan: ``(x, None) -> (x, None)``."""

    dropout: float
    train: bool

    @nn.compact
    def __call__(self, x, _):
        y = nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x))
        x = x + nn.Dropout(self.dropout, deterministic=not self.train)(y)
        y = nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(2 * x.shape[-1])(nn.LayerNorm()(x))))
        return x + nn.Dropout(self.dropout, deterministic=not self.train)(y), None


class Classifier(nn.Module):
    """One compiled layer, run ``layers`` times; its activations are not kept."""

    layers: int = 6
    width: int = 32
    dropout: float = 0.1

    @nn.compact
    def __call__(self, x, train):
        place = self.param("place", nn.initializers.normal(0.02), (8, self.width))
        x = nn.Dense(self.width)(x) + place
        layers = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=self.layers,
        )
        x, _ = layers(self.dropout, train)(x, None)
        return nn.Dense(10)(nn.LayerNorm()(x).mean(1))


model = Classifier()


def load_data(examples):
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    x, y = (images[order] / 16).astype(np.float32).reshape(-1, 8, 8), labels[order].astype(np.int32)
    return {"image": x[357:][:examples], "label": y[357:][:examples]}, {"image": x[:357], "label": y[:357]}


def loss_fn(params, batch, rng):
    logits = model.apply({"params": params}, batch["image"], train=True, rngs={"dropout": rng})
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def evaluate(params, batch):
    logits = model.apply({"params": params}, batch["image"], train=False)
    return {"accuracy": jnp.mean(logits.argmax(-1) == batch["label"])}


def main(epochs=8, batch_size=32, learning_rate=2e-3, examples=1440, seed=0, **options):
    """The test accuracy after training."""
    train, test = load_data(examples)
    tx = optax.adamw(optax.cosine_decay_schedule(learning_rate, epochs * -(-examples // batch_size)))
    params = jax.jit(model.init, static_argnames="train")(jax.random.key(seed), test["image"][:1], train=False)[
        "params"
    ]
    trainer = jaxche.Trainer(loss_fn, tx, seed=seed, **options)
    state = trainer.init(params)
    data = jaxche.Batches(train, batch_size, seed)
    _, history = trainer.fit(state, data, epochs, validation=jaxche.Batches(test, 119), metric_fn=evaluate)
    return history[-1].validation["accuracy"]


if __name__ == "__main__":
    jaxche.initialize()
    main(policy="sync", joined_batches=1)  # the updates of one device
