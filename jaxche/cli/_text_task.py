"""The text task: a character-level transformer on the Python reference, which every CPython contains."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from jaxche.cli._tasks import Task
from jaxche.stages import balance_stages
from jaxche.training import Batches

BATCH_SIZE, LEARNING_RATE, EPOCHS = 16, 2e-3, 4
_CONTEXT = 48
_CHUNK = 64
_HELD_OUT = 0.1


class Transformer(nn.Module):
    """Pre-norm transformer blocks; the whole model, or one stage of it.

    Args:
      vocabulary: number of characters.
      width: of the activations.
      blocks: number of blocks.
      heads: of the attention.
      is_first: whether to begin with the embedding.
      is_last: whether to end with the logits, with tied weights if this part has the embedding.
    """

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
    train, test, vocabulary = _split()
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
        total = sum(float(chunk(params, test[i : i + _CHUNK])) for i in range(0, len(test), _CHUNK))
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


@dataclasses.dataclass(frozen=True)
class TextStages:
    """The transformer in stages, for ``jaxche.Partitioned``.

    Args:
      stages: functions of the stages.
      params: initial parameters of each stage.
      data: training batches; the last batch of an epoch may be smaller.
      test: test windows.
    """

    stages: Sequence[Callable[..., Any]]
    params: Sequence[Any]
    data: Batches
    test: np.ndarray

    @staticmethod
    def loss(logits: Any, window: Any) -> jax.Array:
        """Nats a character."""
        return _losses(logits, window).mean()


def text_stages(n_stages: int, batch_size: int | None, seed: int) -> TextStages:
    """The transformer in stages of about equal cost; unlike in :func:`text`, its weights are not tied.

    Raises:
      ValueError: there are more stages than layers.
    """
    train, test, vocabulary = _split()
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


def _split() -> tuple[np.ndarray, np.ndarray, int]:
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
