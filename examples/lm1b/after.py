"""A transformer language model on sentences of unlike lengths, in linen, on all devices.

As for the One Billion Word Benchmark: padding masks, a mean over tokens, warmup and decay with the root of the step,
clipped gradients, bfloat16. The sentences are those of the Python reference in the standard library.
"""

import re
from pydoc_data.topics import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import jaxche

LENGTH = 64


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm."""

    dtype: Any

    @nn.compact
    def __call__(self, x, mask):
        width = x.shape[-1]
        y = nn.LayerNorm(dtype=self.dtype)(x)
        x = x + nn.MultiHeadDotProductAttention(4, dtype=self.dtype)(y, mask=mask)
        y = nn.Dense(4 * width, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))
        return x + nn.Dense(width, dtype=self.dtype)(nn.gelu(y))


class LanguageModel(nn.Module):
    """The logits of every next character; token 0 is padding."""

    width: int = 48
    blocks: int = 2
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, tokens):
        inputs = jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
        embed = nn.Embed(128, self.width, dtype=self.dtype)
        place = self.param("place", nn.initializers.normal(0.02), (LENGTH, self.width))
        x = embed(inputs) + place.astype(self.dtype)
        mask = nn.combine_masks(nn.make_causal_mask(tokens), nn.make_attention_mask(tokens > 0, tokens > 0))
        for _ in range(self.blocks):
            x = Block(self.dtype)(x, mask)
        return embed.attend(nn.LayerNorm(dtype=self.dtype)(x)).astype(jnp.float32)


model = LanguageModel()


def load_data(examples):
    """Sentences as rows of character numbers, padded with zeros."""
    text = " ".join(" ".join(topics[name].split()) for name in sorted(topics))
    sentences = [s for s in re.split(r"(?<=[.:]) ", text) if s.isascii() and len(s) > 8]
    rows = np.zeros((len(sentences), LENGTH), np.int32)
    for row, sentence in zip(rows, sentences, strict=True):
        row[: len(sentence)] = np.frombuffer(sentence[:LENGTH].encode(), np.uint8)
    rows = rows[np.random.default_rng(0).permutation(len(rows))]
    return rows[500:][:examples], rows[:500]


def loss_fn(params, tokens):
    weights = tokens > 0
    losses = optax.softmax_cross_entropy_with_integer_labels(model.apply({"params": params}, tokens), tokens)
    return jaxche.Weighted((losses * weights).sum(), weights.sum())


def make_schedule(learning_rate, warmup):
    def schedule(step):
        return learning_rate * jnp.minimum(step / warmup, jnp.sqrt(warmup / jnp.maximum(step, 1)))

    return schedule


def main(epochs=3, batch_size=16, learning_rate=6e-3, examples=2976, seed=0, **options):
    """The held-out loss in nats a character after training."""
    train, test = load_data(examples)
    steps = epochs * -(-len(train) // batch_size)
    schedule = make_schedule(learning_rate, max(1, steps // 8))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.01))
    params = jax.jit(model.init)(jax.random.key(seed), train[:1])["params"]
    trainer = jaxche.Trainer(loss_fn, tx, **options)
    data, held_out = jaxche.Batches(train, batch_size, seed), jaxche.Batches(test, 125)
    _, history = trainer.fit(trainer.init(params), data, epochs, validation=held_out)
    return history[-1].validation["loss"]


if __name__ == "__main__":
    jaxche.initialize()
    main(policy="sync", joined_batches=1)  # the updates of one device
