"""A transformer in two stages: both on the device of this process, or one, with the other in another process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxche
from gpu_parts.processes import program_parser, write
from gpu_parts.workloads import Layers


class Sizes(NamedTuple):
    """The sizes of model and batch."""

    vocabulary: int
    width: int
    blocks: int  # of each stage
    heads: int
    context: int
    rows: int  # of a micro-batch
    micro_batches: int


CARD = Sizes(12_288, 512, 3, 8, 256, 16, 4)
CPU = Sizes(64, 32, 1, 2, 16, 2, 2)


class First(nn.Module):
    """Embeddings and the first half of the blocks."""

    sizes: Sizes

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(self.sizes.vocabulary, self.sizes.width, dtype=jnp.bfloat16)(tokens[:, :-1])
        return Layers(self.sizes.blocks, self.sizes.heads)(x)


class Last(nn.Module):
    """The second half of the blocks, and the logits."""

    sizes: Sizes

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = Layers(self.sizes.blocks, self.sizes.heads)(x)
        return nn.Dense(self.sizes.vocabulary, dtype=jnp.bfloat16)(x).astype(jnp.float32)


def main() -> None:
    parser = program_parser()
    parser.add_argument("what", choices=("pipeline", "store"))
    parser.add_argument("--turns", type=int, required=True)
    parser.add_argument("--losses", type=int, default=0)
    parser.add_argument("--stage", type=int, default=0)
    parser.add_argument("--store")
    args = parser.parse_args()
    model = Model(CPU if args.cpu else CARD)
    if args.what == "pipeline":
        write(args.out, 0, pipeline(model, args.turns) | {"losses": model.train(args.losses)[0]})
    else:
        write(args.out, args.stage, stored(model, args.store, args.stage, args.turns))


class Model:
    """The two stages, their parameters, and a batch."""

    def __init__(self, sizes: Sizes):
        self.sizes = sizes
        first, last = First(sizes), Last(sizes)
        self.stages = [lambda p, x: first.apply({"params": p}, x), lambda p, x: last.apply({"params": p}, x)]
        rng = np.random.default_rng(0)
        shape = (sizes.rows * sizes.micro_batches, sizes.context + 1)
        self.batch = rng.integers(0, sizes.vocabulary, shape, np.int32)
        x, start = jax.jit(first.init_with_output)(jax.random.key(0), self.batch[:1])
        self.params = [start["params"], jax.jit(last.init)(jax.random.key(1), x)["params"]]

    @staticmethod
    def loss(logits: Any, batch: Any) -> jax.Array:
        """Next-token loss."""
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    def partitioned(self, protocol: Any, **where: Any) -> jaxche.Partitioned:
        """The model by a protocol, with all stages on the first device."""
        return jaxche.Partitioned(self.stages, self.loss, protocol, jax.devices()[:1] * 2, **where)

    def train(self, steps: int, protocol: Any = None, **where: Any) -> tuple[list[float], list[float]]:
        """Losses and seconds of some steps; losses are NaN in a process that does not have them."""
        protocol = protocol or jaxche.Pipeline(micro_batch_size=self.sizes.rows)
        model = self.partitioned(protocol, **where)
        state = model.init(self.params, optax.sgd(0.1))
        losses, seconds = [], []
        for _ in range(steps):
            start = time.perf_counter()
            state, loss = model.step(state, self.batch)
            jax.block_until_ready(state.params)
            seconds.append(time.perf_counter() - start)
            losses.append(float("nan") if loss is None else float(loss))
        model.close()
        return losses, seconds


def pipeline(model: Model, turns: int) -> dict[str, Any]:
    """Milliseconds of gradients by the pipeline and by the whole model, in turn."""
    sizes = model.sizes
    stages = model.partitioned(jaxche.Pipeline(micro_batch_size=sizes.rows))
    params = jax.device_put(model.params, jax.devices()[0])
    whole = whole_model(model)
    batch = jax.device_put(model.batch)
    times: dict[str, list[float]] = {"ms": [], "whole_ms": []}
    for turn in range(turns + 1):  # the first one compiles
        start = time.perf_counter()
        loss, _ = jax.block_until_ready(stages.value_and_grad(params, model.batch))
        middle = time.perf_counter()
        whole_loss, _ = jax.block_until_ready(whole(params, batch))
        if turn:
            times["ms"].append((middle - start) * 1e3)
            times["whole_ms"].append((time.perf_counter() - middle) * 1e3)
    found = {name: statistics.median(values) for name, values in times.items()}
    found |= {"loss": float(loss), "whole_loss": float(whole_loss)}
    return found | {"rows": sizes.rows, "micro_batches": sizes.micro_batches}


def whole_model(model: Model) -> Callable[[Any, Any], Any]:
    """Loss and gradients of the whole model in one program, accumulated over the micro-batches."""
    sizes = model.sizes

    def loss(params: Any, batch: Any) -> jax.Array:
        return model.loss(model.stages[1](params[1], model.stages[0](params[0], batch)), batch)

    @jax.jit
    def value_and_grad(params: Any, batch: Any) -> Any:
        def one(total: Any, part: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(params, part)), None

        parts = batch.reshape(sizes.micro_batches, sizes.rows, -1)
        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        total, _ = jax.lax.scan(one, zeros, parts)
        return jax.tree.map(lambda x: x / sizes.micro_batches, total)

    return value_and_grad


def stored(model: Model, url: str, stage: int, turns: int) -> dict[str, Any]:
    """Losses and milliseconds of steps through a store; the first step compiles, and waits for the other process."""
    sizes = model.sizes
    protocol = jaxche.DataStore(url, run="gpu", micro_batch_size=sizes.rows)
    losses, seconds = model.train(turns, protocol, local_stages=[stage])
    activations = 2 * sizes.rows * sizes.micro_batches * sizes.context * sizes.width * 2 / 1e6
    return {"losses": losses, "ms": statistics.median(seconds[1:]) * 1e3, "mb": activations}


if __name__ == "__main__":
    main()
