"""A small GPT on the characters of a text, in nnx, on all devices.

Random windows of a long text, AdamW that decays matrices only, warmup and cosine, clipped gradients. The text is the
Python reference in the standard library.
"""

from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxche

CONTEXT = 48


class Block(nnx.Module):
    """Causal attention and a feed-forward layer, each behind a norm."""

    def __init__(self, width, heads, rngs):
        self.norm1, self.norm2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class GPT(nnx.Module):
    """The logits of every next character."""

    def __init__(self, vocabulary, width, blocks, heads, rngs):
        self.embed = nnx.Embed(vocabulary, width, rngs=rngs)
        self.place = nnx.Embed(CONTEXT, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, heads, rngs) for _ in range(blocks)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.place(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


def load_text():
    """The text as character numbers, split into training and validation, and the number of characters."""
    text = "\n".join(topics[name] for name in sorted(topics))
    characters, numbers = np.unique(np.array(list(text)), return_inverse=True)
    cut = len(numbers) * 9 // 10
    return numbers[:cut], numbers[cut:], len(characters)


def get_batch(text, batch_size, seed):
    """Random windows, with one character more than the context."""
    starts = np.random.default_rng(seed).integers(0, len(text) - CONTEXT, batch_size)
    return text[starts[:, None] + np.arange(CONTEXT + 1)].astype(np.int32)


def loss_fn(model, window):
    return optax.softmax_cross_entropy_with_integer_labels(model(window[:, :-1]), window[:, 1:]).mean()


def make_optimizer(learning_rate, steps):
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, steps // 10, steps, learning_rate / 10)

    def matrices(params):
        return jax.tree.map(lambda x: x.ndim > 1, params)

    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.99, weight_decay=0.1, mask=matrices))


def main(steps=600, batch_size=16, learning_rate=5e-3, width=48, blocks=2, eval_every=200, seed=0, **options):
    """The validation loss in nats a character after training."""
    train, validation, vocabulary = load_text()
    model = GPT(vocabulary, width, blocks, 4, nnx.Rngs(seed))
    optimizer = nnx.Optimizer(model, make_optimizer(learning_rate, steps), wrt=nnx.Param)
    held_out = get_batch(validation, 256, 0)
    objective = jaxche.NNXLoss(model, loss_fn, optimizer)
    trainer = jaxche.Trainer(objective, objective.tx, **options)
    state = trainer.init(objective.params, objective.model_state, objective.opt_state)
    windows = [get_batch(train, batch_size, (seed, step)) for step in range(steps)]
    state, history = trainer.fit(state, windows, validation=[held_out], eval_every=eval_every)
    objective.update(trainer, state, history)
    return history[-1].validation["loss"]


if __name__ == "__main__":
    jaxche.initialize()
    main(policy="sync", joined_batches=1)  # the updates of one device
