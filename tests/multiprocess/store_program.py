"""The program of each process of test_data_store: the same script, with a different stage."""

import json
import os
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxche

STEPS = 4
TX = optax.adam(0.05)


def dense(params, x, rng):
    h = jnp.tanh(x @ params["w"] + params["b"])
    return h * jax.random.bernoulli(rng, 0.8, h.shape)


def first(params, batch, rng):
    return dense(params, batch["x"], rng)


def last(params, x):
    return x @ params["w"] + params["b"]


def loss(y, batch):
    return jnp.mean((y - batch["y"]) ** 2)


def make_stages(n_stages):
    """Uneven stages, the same in every process."""
    rng = np.random.default_rng(0)
    widths = [*[5, 7, 4][:n_stages], 2]
    params = [
        {"w": rng.normal(size=widths[i : i + 2]).astype(np.float32), "b": np.zeros(widths[i + 1], np.float32)}
        for i in range(n_stages)
    ]
    return [*[first, dense, dense][: n_stages - 1], last], params


def make_batch(step):
    """A function of the step, so that a restarted process reads the same batches."""
    rng, scale = np.random.default_rng(step), np.float32(os.environ.get("STORE_SCALE", "1"))
    shapes = {"x": (12, 5), "y": (12, 2)}
    return {name: scale * rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def dies(wire, step, direction):
    """Send SIGKILL to this process after it sent micro-batch 1 of a step."""
    send = wire.send

    def sends(tag, tree):
        send(tag, tree)
        if (tag.step, tag.micro, tag.direction) == (step, 1, direction):
            os.kill(os.getpid(), signal.SIGKILL)

    wire.send = sends
    return wire


def train(n_stages, protocol, local_stages=None):
    stages, params = make_stages(n_stages)
    model = jaxche.Partitioned(stages, loss, protocol, local_stages=local_stages)
    state = model.init(params, TX)
    began, losses = state.step, []
    for step in range(state.step, STEPS):
        state, value = model.step(state, make_batch(step))
        losses.append(float(value))
    model.close()
    trees = [[np.asarray(x).tolist() for x in jax.tree.leaves(tree)] for tree in state.params]
    return {"began": began, "losses": losses, "params": trees}


if __name__ == "__main__":
    url, out, stage, n_stages, options, death = sys.argv[1:]
    given = jaxche.DataStore(url, micro_batch_size=3, timeout_s=120, options=json.loads(options))
    if death:
        at, towards = death.split(":")
        mortal = jaxche.DataStore.wire
        jaxche.DataStore.wire = lambda *arguments: dies(mortal(*arguments), int(at), towards)
    result = train(int(n_stages), given, [int(stage)])
    assert not jax.distributed.is_initialized()
    with open(out, "w", encoding="utf8") as file:
        json.dump(result, file)
