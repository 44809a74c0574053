"""A checkpoint of plain Orbax, written under one layout, opens under another and trains on as if undisturbed."""

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import jaxche

# Strategy and number of devices before and after.
MOVES = [
    (("full", 4), ("grad_op", 2)),
    (("full", 8), ("full", 4)),
    (("grad_op", 4), ("hybrid", 8)),
    (("hybrid", 8), ("none", 1)),
    (("none", 1), ("full", 8)),
    (("hybrid_grad_op", 4), ("hybrid", 4)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), MOVES, ids=lambda x: "-".join(map(str, x)))
def test_training_goes_on_under_another_layout(before, after, problem, devices, through_orbax, close, same):
    one, other = (
        jaxche.sharded_step(problem.loss, problem.optimizers["adam"](), strategy, strategy.mesh(devices[:world]))
        for strategy, world in ((problem.strategies[name](world), world) for name, world in (before, after))
    )
    batches = problem.batches(20)
    state, _ = problem.run(one, one.init(problem.params()), batches[:8])
    target = other.abstract_state(problem.params())
    restored = through_orbax(state, target)
    assert int(restored.index) == 8
    same(restored, state)
    assert jax.tree.all(jax.tree.map(lambda x, y: x.sharding == y.sharding, restored, target))
    end, losses = problem.run(other, restored, batches[8:])
    params, undisturbed = problem.on_one_device("adam")
    np.testing.assert_allclose(losses, undisturbed[8:], rtol=1e-5)
    close(end.params, params, atol=1e-5)


def test_a_manager_keeps_several_and_opens_the_latest(problem, devices, tmp_path, close, same):
    full, none = jaxche.FullShard(), jaxche.NoShard()

    def make(strategy, world):
        mesh = strategy.mesh(devices[:world])
        return jaxche.sharded_step(problem.loss, problem.optimizers["masked_chain"](), strategy, mesh)

    one, other = make(full, 4), make(none, 1)
    state = one.init(problem.params())
    with ocp.CheckpointManager(tmp_path, options=ocp.CheckpointManagerOptions(max_to_keep=2)) as manager:
        for batch in problem.batches(3):
            state, _ = jax.block_until_ready(one(state, batch))
            manager.save(int(state.index), args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        assert manager.all_steps() == [2, 3]
        target = other.abstract_state(problem.params())
        restored = manager.restore(3, args=ocp.args.StandardRestore(target))
    same(restored, state)
    batch = problem.batches(4)[-1]
    (ours, _), (theirs, _) = other(restored, batch), one(state, batch)
    close(*(jax.device_get(s.params) for s in (ours, theirs)))


def test_on_the_same_layout_it_goes_on_bit_for_bit(problem, devices, through_orbax, same):
    strategy = jaxche.HybridShard(2)
    step = jaxche.sharded_step(problem.loss, problem.optimizers["adam"](), strategy, strategy.mesh(devices[:4]))
    batches = problem.batches(6)
    state, _ = problem.run(step, step.init(problem.params()), batches[:3])
    restored = through_orbax(state, step.abstract_state(problem.params()))
    ends = [problem.run(step, s, batches[3:]) for s in (state, restored)]
    same(*ends)
