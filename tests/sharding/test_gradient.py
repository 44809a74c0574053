"""Value and gradient over a mesh."""

import jax
import pytest

from jaxche.sharding import Layout, as_loss, value_and_grad


def test_a_ragged_batch_is_computed_whole_by_everybody(name, devices, problem, close):
    strategy, params, batch = problem.strategies[name](4), problem.params(), problem.batches(1, rows=7)[0]
    layout = Layout(strategy, strategy.mesh(devices[:4]), params)

    def loss_fn(params, batch, rng):
        loss, metrics = problem.loss(params, batch)
        return loss, metrics | {"drawn": jax.random.uniform(rng)}

    fn = jax.jit(value_and_grad(as_loss(loss_fn), layout), compiler_options=layout.compiler_options)
    (loss, (metrics, _)), grads = fn(jax.device_put(params, layout.params), None, batch, jax.random.key(3))
    (expected, _), theirs = jax.value_and_grad(problem.loss, has_aux=True)(params, batch)
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    assert float(metrics["drawn"]) == pytest.approx(float(jax.random.uniform(jax.random.key(3))))
    close(grads, theirs)
    assert jax.tree.all(jax.tree.map(lambda g, s: g.sharding.is_equivalent_to(s, g.ndim), grads, layout.grads))
