"""A character-level transformer on the text every CPython carries: the reference behind ``help()``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from jaxche.cli._tasks import Task
from jaxche.training import Batches

_CONTEXT = 48
_CHUNK = 64
_HELD_OUT = 0.1


class Transformer(nn.Module):
    """Pre-norm blocks of causal attention and a two-layer network."""

    vocabulary: int
    width: int = 64
    blocks: int = 2
    heads: int = 4

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(self.vocabulary, self.width)
        place = self.param("place", nn.initializers.normal(0.02), (_CONTEXT, self.width))
        x = embed(tokens) + place[: tokens.shape[1]]
        mask = nn.make_causal_mask(tokens)
        for _ in range(self.blocks):
            x = x + nn.MultiHeadDotProductAttention(self.heads)(nn.LayerNorm()(x), mask=mask)
            x = x + nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x))))
        return embed.attend(nn.LayerNorm()(x))


def text(batch_size: int | None, learning_rate: float | None, seed: int) -> Task:
    """The first 90 % of the text to train on, the rest held out; judged by loss in nats a character."""
    windows, vocabulary = _windows()
    held_out = int(_HELD_OUT * len(windows))
    train, test = windows[:-held_out], windows[-held_out:]
    net = Transformer(vocabulary)

    def losses(params: Any, window: Any) -> jax.Array:
        logits: Any = net.apply({"params": params}, window[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, window[:, 1:].astype(jnp.int32))

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        return losses(params, batch).mean()

    # Compiled as one program; op by op it takes seconds.
    start = jax.jit(net.init)

    def init(seed: int) -> tuple[Any, Any]:
        return start(jax.random.key(seed), windows[:1, :-1])["params"], None

    chunk = jax.jit(lambda params, window: losses(params, window).sum())

    def evaluate(params: Any, model_state: Any) -> dict[str, float]:
        total = sum(float(chunk(params, test[i : i + _CHUNK])) for i in range(0, len(test), _CHUNK))
        loss = total / (len(test) * _CONTEXT)
        return {"loss": loss, "perplexity": float(np.exp(loss))}

    return Task(
        name="text",
        data=Batches(train, batch_size or 16, seed),
        test=test,
        init=init,
        loss_fn=loss_fn,
        evaluate=evaluate,
        tx=optax.adam(2e-3 if learning_rate is None else learning_rate),
        epochs=4,
        metric="loss",
        higher_is_better=False,
        percent=False,
    )


def _windows() -> tuple[np.ndarray, int]:
    """Windows [N, context + 1] of character numbers, each overlapping the next by the one it predicts first."""
    from pydoc_data.topics import topics

    whole = "\n".join(topics[name] for name in sorted(topics))
    characters, numbers = np.unique(np.array(list(whole)), return_inverse=True)
    count = (len(numbers) - 1) // _CONTEXT
    starts = np.arange(count)[:, None] * _CONTEXT
    return numbers.astype(np.uint8)[starts + np.arange(_CONTEXT + 1)], len(characters)
