"""The program of each process of test_data_store: the same script, with a different stage."""

import json
import os
import runpy
import signal
import sys
from pathlib import Path

import jax
import numpy as np
import optax

import jaxche

# What the tests in one process train.
STAGES = runpy.run_path(str(Path(__file__).parents[1] / "stages" / "conftest.py"))
STEPS = 4
TX = optax.adam(0.05)


def make_model(n_stages):
    """Uneven stages with dropout, the same in every process."""
    return STAGES["MODELS"]["dropout"](n_stages, True)


def make_batch(step):
    """A function of the step, so that a restarted process reads the same batches."""
    batch = STAGES["make_batch"](5, seed=step)
    return batch | {"x": np.float32(os.environ.get("STORE_SCALE", "1")) * batch["x"]}


def dies(wire, step, direction, saved=""):
    """Send SIGKILL to this process after it sent micro-batch 1 of a step, ``saved`` once its last state is saved."""
    send = wire.send

    def sends(tag, tree):
        send(tag, tree)
        if (tag.step, tag.micro, tag.direction) == (step, 1, direction):
            if saved:
                wire._wait_committed()
            os.kill(os.getpid(), signal.SIGKILL)

    wire.send = sends
    return wire


def train(n_stages, protocol, local_stages=None):
    whole = make_model(n_stages)
    model = jaxche.Partitioned(whole.stages, whole.loss, protocol, local_stages=local_stages)
    state = model.init(whole.params, TX)
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
        at, *when = death.split(":")
        mortal = jaxche.DataStore.wire
        jaxche.DataStore.wire = lambda *arguments: dies(mortal(*arguments), int(at), *when)
    result = train(int(n_stages), given, [int(stage)])
    assert not jax.distributed.is_initialized()
    with open(out, "w", encoding="utf8") as file:
        json.dump(result, file)
