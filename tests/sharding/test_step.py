"""The sharded step: the same training under every strategy."""

import jax
import numpy as np
import pytest

import jaxche

STRATEGIES = ["full", "grad_op", "none", "hybrid", "hybrid_grad_op"]


def assert_close(ours, theirs, tolerance=1e-5):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), jax.device_get(ours), theirs
    )


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "masked_chain"])
@pytest.mark.parametrize("sizes", ["even", "odd"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_twenty_steps_equal_one_device(name, sizes, optimizer, world, devices, problems):
    problem = problems[sizes]
    strategy = problem.strategies[name](world)
    step = jaxche.sharded_step(problem.loss, problem.optimizers[optimizer](), strategy, strategy.mesh(devices[:world]))
    state, losses = problem.run(step, step.init(problem.params()), problem.batches(20))
    params, one_device = problem.on_one_device(optimizer)
    np.testing.assert_allclose(losses, one_device, rtol=1e-5)
    assert_close(state.params, params)
