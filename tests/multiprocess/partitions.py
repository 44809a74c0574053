"""The program of each process of test_partitions, run by ``jaxche launch``. Each writes one JSON file."""

import json
import runpy
import sys
from pathlib import Path

import jax
import numpy as np
import optax

import jaxche

# Those of the tests in one process.
MODELS = runpy.run_path(str(Path(__file__).parents[1] / "stages" / "conftest.py"))["MODELS"]
PROTOCOLS = {
    "direct": lambda: jaxche.Direct(timeout_s=60),
    "1f1b": lambda: jaxche.Pipeline(micro_batch_size=3, timeout_s=60),
    "gpipe": lambda: jaxche.Pipeline(micro_batch_size=3, schedule="gpipe", timeout_s=60),
}
# processes: (stages of the model, stages of each process); with two, one holds neighbours and one is in between.
PLACES = {2: (4, [[0, 1, 3], [2]]), 3: (3, [[2], [0], [1]])}
STEPS = 2


def train(model, protocol, local_stages=None, remat=False):
    """Initial gradients and parameters after a few steps, as lists with one entry a stage; losses and peaks."""
    partitioned = jaxche.Partitioned(
        model.stages,
        model.loss,
        protocol,
        devices=jax.local_devices()[:1] * (len(local_stages) if local_stages else len(model.stages)),
        local_stages=local_stages,
        remat=remat,
    )
    loss, grads = partitioned.value_and_grad(model.params, model.batch, step=7)
    state = partitioned.init(model.params, optax.adam(0.05))
    losses = [float(loss)]
    for _ in range(STEPS):
        state, loss = partitioned.step(state, model.batch)
        losses.append(float(loss))
    peaks = partitioned.peak_activations
    partitioned.close()
    trees = [jax.tree.map(lambda x: np.asarray(x).tolist(), part) for part in (grads, state.params)]
    return {"grads": trees[0], "params": trees[1], "losses": losses, "peaks": peaks, "step": state.step}


def results():
    n_stages, places = PLACES[jax.process_count()]
    local = places[jax.process_index()]
    told = {}
    for name, protocol in PROTOCOLS.items():
        told[name] = train(make_model(name, n_stages), protocol(), local, remat=name == "gpipe")
    return told


def make_model(name, n_stages):
    return MODELS["dropout" if name == "1f1b" else "trees"](n_stages, True)


def error_of(action):
    try:
        action()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None


def faults():
    """All errors between processes, one after the other."""
    me = jax.process_index()
    model = MODELS["plain"](2, False)

    def make(**options):
        return jaxche.Partitioned(
            model.stages, model.loss, jaxche.Direct(timeout_s=2.0), **{"local_stages": [me]} | options
        )

    seen = {}
    # Each process sees the other's part by shapes alone.
    shapes = jax.eval_shape(lambda: model.params)
    params = [model.params[i] if i == me else shapes[i] for i in range(2)]
    good = make()
    seen["shapes"] = float(good.value_and_grad(params, model.batch)[0])
    unknown = [model.params[i] if i == me else None for i in range(2)]
    seen["known"] = float(good.value_and_grad(unknown, model.batch)[0])
    fresh = make()
    seen["unknown"] = error_of(lambda: fresh.value_and_grad(unknown, model.batch))
    # Stage 0 is late for ever.
    if me == 1:
        seen["late"] = error_of(lambda: good.value_and_grad(params, model.batch))
    else:
        # A batch of another size in each process.
        seen["late"] = None
    jax.experimental.multihost_utils.sync_global_devices("late")
    other = jax.tree.map(lambda x: x[: 12 if me else 6], model.batch)
    seen["differs"] = error_of(lambda: fresh.value_and_grad(params, other))
    seen["twice"] = error_of(lambda: make(local_stages=[0]))
    return seen


def main(what, folder):
    jax.config.update("jax_disable_most_optimizations", True)
    jaxche.initialize(timeout_s=60)
    result = {"results": results, "faults": faults}[what]()
    (Path(folder) / f"{jax.process_index()}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
