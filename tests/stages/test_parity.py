"""Under every protocol a partitioned model computes what the whole model does."""

import itertools
import uuid

import jax
import numpy as np
import optax
import pytest

import jaxche

# name: (a protocol, micro-batches of a batch of 12). A new protocol joins the tests by a line here.
PROTOCOLS = {
    "direct": (lambda: jaxche.Direct(), 1),
    "1f1b": (lambda: jaxche.Pipeline(micro_batch_size=3), 4),
    "gpipe": (lambda: jaxche.Pipeline(micro_batch_size=3, schedule="gpipe"), 4),
    "store": (lambda: jaxche.DataStore(f"memory://{uuid.uuid4()}", micro_batch_size=3, timeout_s=60), 4),
}


KINDS = ("plain", "trees", "dropout")
# All of two stages; of three and of four together, every pair of the other properties.
CASES = [
    (n_stages, uneven, kind, remat)
    for n_stages, uneven, kind, remat in itertools.product((2, 3, 4), (False, True), KINDS, (False, True))
    if n_stages == 2 or (n_stages + uneven + remat + KINDS.index(kind)) % 3 == 0
]


@pytest.mark.slow
@pytest.mark.parametrize(("n_stages", "uneven", "kind", "remat"), CASES)
@pytest.mark.parametrize("name", PROTOCOLS)
def test_loss_and_gradients_are_those_of_the_whole_model(
    name, n_stages, uneven, kind, remat, make_model, first_twin, close, devices
):
    make, micro_batches = PROTOCOLS[name]
    model = make_model(kind, n_stages, uneven)
    partitioned = jaxche.Partitioned(model.stages, model.loss, make(), remat=remat)
    loss, grads = partitioned.value_and_grad(model.params, model.batch, step=5)
    wanted_loss, wanted = first_twin(model, micro_batches if kind == "dropout" else 1, 5)
    close(loss, wanted_loss)
    close(list(grads), wanted)
    for stage, tree in enumerate(grads):
        assert all(leaf.devices() == {devices[stage]} for leaf in jax.tree.leaves(tree))


@pytest.mark.slow
@pytest.mark.parametrize("name", PROTOCOLS)
def test_steps_are_those_of_the_whole_model(name, make_model, twin, close, devices):
    make, micro_batches = PROTOCOLS[name]
    model = make_model("dropout", 3)
    tx = optax.adam(0.05)
    partitioned = jaxche.Partitioned(model.stages, model.loss, make(), devices=devices[3:6], seed=4)
    state = partitioned.init(model.params, tx)
    params, opt_state = model.params, tx.init(model.params)
    for step in range(3):
        before = jax.device_get(state.params)
        next_state, loss = partitioned.step(state, model.batch)
        jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state.params))
        state = next_state
        wanted, grads = twin(model, params, model.batch, micro_batches, step, seed=4)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        close(loss, wanted)
        close(list(state.params), params)
    assert state.step == 3
    for stage, trees in enumerate(zip(state.params, state.opt_state, strict=True)):
        assert all(leaf.devices() == {devices[3 + stage]} for leaf in jax.tree.leaves(trees))
