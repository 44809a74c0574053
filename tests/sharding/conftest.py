"""A small problem with leaves of every kind: a matrix used transposed, a vector, a scalar; of even sizes and of odd."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxche


def _matrices(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


class Problem:
    """A network of two layers and a head, of the sizes of input, hidden layers and output."""

    strategies: ClassVar = {
        "full": lambda world: jaxche.FullShard(),
        "grad_op": lambda world: jaxche.ShardGradOp(),
        "none": lambda world: jaxche.NoShard(),
        "hybrid": lambda world: jaxche.HybridShard(intra_node_size=max(world // 2, 1)),
        "hybrid_grad_op": lambda world: jaxche.HybridShardGradOp(intra_node_size=max(world // 2, 1)),
    }
    optimizers: ClassVar = {
        "sgd": lambda: optax.sgd(0.1),
        "adam": lambda: optax.adam(1e-2),
        # Clipping that acts at every step, decay of matrices only, an average.
        "masked_chain": lambda: optax.chain(
            optax.clip_by_global_norm(0.05),
            optax.masked(optax.add_decayed_weights(0.1), _matrices),
            optax.ema(0.9),
            optax.adam(1e-2),
        ),
    }

    def __init__(self, sizes):
        self._sizes, self._twins = sizes, {}

    @staticmethod
    def loss(params, batch):
        hidden = jnp.tanh(batch["x"] @ params["first"]["w"] + params["first"]["b"])
        hidden = jnp.tanh(hidden @ params["second"]["w"] * params["scale"])
        out = hidden @ params["head"].T
        return jnp.mean((out - batch["y"]) ** 2), {"mean": jnp.mean(out)}

    def params(self):
        rng, (inputs, first, second, outputs) = np.random.default_rng(0), self._sizes

        def draw(*shape):
            return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[0]), jnp.float32)

        return {
            "first": {"w": draw(inputs, first), "b": draw(first)},
            "second": {"w": draw(first, second)},
            "head": draw(outputs, second),
            "scale": jnp.float32(1.0),
        }

    def batches(self, count, rows=16):
        rng = np.random.default_rng(1)

        def draw(size):
            return rng.normal(size=(rows, size)).astype(np.float32)

        return [{"x": draw(self._sizes[0]), "y": draw(self._sizes[-1])} for _ in range(count)]

    def on_one_device(self, optimizer):
        """The slow obvious twin: parameters and losses of 20 steps on one device with the joined batches."""
        if optimizer not in self._twins:
            tx, params, losses = self.optimizers[optimizer](), self.params(), []

            @jax.jit
            def step(params, opt_state, batch):
                (loss, _), grads = jax.value_and_grad(self.loss, has_aux=True)(params, batch)
                updates, opt_state = tx.update(grads, opt_state, params)
                return optax.apply_updates(params, updates), opt_state, loss

            opt_state = tx.init(params)
            for batch in self.batches(20):
                params, opt_state, loss = step(params, opt_state, batch)
                losses.append(float(loss))
            self._twins[optimizer] = jax.device_get(params), losses
        return self._twins[optimizer]

    @staticmethod
    def run(step, state, batches):
        """Waits after every step: two programs with collectives in flight can deadlock fake devices."""
        losses = []
        for batch in batches:
            state, metrics = jax.block_until_ready(step(state, batch))
            losses.append(float(metrics["loss"]))
        return state, losses


@pytest.fixture(params=list(Problem.strategies))
def name(request):
    """The name of a strategy: each in turn, where a test does not say which."""
    return request.param


@pytest.fixture
def through_orbax(tmp_path):
    """Saves a state by plain Orbax, and opens it as another is laid out."""

    def move(state, target):
        import orbax.checkpoint as ocp

        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "state", state)
            checkpointer.wait_until_finished()
            return checkpointer.restore(tmp_path / "state", target)

    return move


@pytest.fixture(scope="session")
def problems():
    """Even sizes, which 8 devices divide, and odd ones; what one device makes of them is computed once."""
    return {"even": Problem((8, 16, 24, 8)), "odd": Problem((5, 16, 7, 3))}


@pytest.fixture(scope="session")
def problem(problems):
    """The one with leaves that are cut and leaves that are not."""
    return problems["odd"]
