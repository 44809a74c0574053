"""A state goes from one trainer to another, which trains it by its own arguments."""

from functools import partial

import jax
import numpy as np
import optax
import pytest

import jaxche
from jaxche.cadence import RowShares

FLEET = jaxche.VirtualFleet([10.0, 30.0], sync_ms=20.0)


@pytest.fixture
def make(problem, devices):
    def trainer(policy="cadence", tx=None, fleet=FLEET, replicas=devices[:2], **options):
        return jaxche.Trainer(problem.loss, tx or optax.adam(0.05), policy, replicas=replicas, fleet=fleet, **options)

    return trainer


def fit(trainer, data, state=None, params=None, **options):
    state = trainer.init(params) if state is None else state
    return trainer.fit(state, data, progress=False, **({"epochs": 1} | options))


def test_rows_by_speed_end_with_the_trainer_that_deals_them_out(make, problem):
    state, history = fit(make("sync"), problem.data, params=problem.params)
    assert history[-1].shares
    state, history = fit(make("cadence"), problem.data, state)
    assert {info.shares for info in history} == {()}
    assert state.row_shares == RowShares()


def test_the_choice_of_auto_ends_with_its_trainer_and_begins_with_it(make, problem):
    auto = make("auto")
    state, history = fit(auto, problem.data, params=problem.params, epochs=4)
    assert history[-1].policy == "cadence"
    sync = make("sync")
    state, history = fit(sync, problem.data, state)
    assert {(info.policy, info.average) for info in history} == {("sync", "gradients")}
    assert sync.explain(state).startswith("policy='sync', as given")
    state, history = fit(auto, problem.data, state)
    assert history[0].policy == "sync"
    assert state.choice is not None


def test_a_checkpoint_of_auto_goes_on_by_the_policy_of_the_trainer(make, problem, tmp_path):
    saves = {"checkpoints": jaxche.Checkpoints(tmp_path, every=1000)}  # the end alone
    fit(make("auto"), problem.data, params=problem.params, epochs=4, **saves)
    _, history = fit(make("sync"), problem.data, params=problem.params, epochs=5, **saves)
    assert {info.policy for info in history if info.epoch == 4} == {"sync"}


def test_a_wire_as_given_takes_the_place_of_a_chosen_one(make, problem):
    state, _ = fit(make(wire="auto", fleet=None), problem.data, params=problem.params)
    _, history = fit(make(wire="int4"), problem.data, state)
    assert {info.wire for info in history} == {"int4"}
    state, _ = fit(make(wire="int4"), problem.data, params=problem.params)
    assert state.wire is None
    state, _ = fit(make(wire="auto", fleet=None), problem.data, state)
    assert state.wire is not None


def test_a_merge_in_flight_ends_before_the_state_goes_on(make, problem):
    one = make(overlap=0.5)
    state, _ = one.round(one.init(problem.params), problem.data, counts=(2, 2))
    assert state.in_flight is not None
    after, _ = make(overlap=0.5).round(state, problem.data, counts=(2, 2))
    assert after.merged().steps == 8
    after, _ = make().round(state, problem.data, counts=(2, 2))
    assert after.in_flight is None


def test_a_state_on_other_devices_is_refused(make, problem, devices):
    state = make().init(problem.params)
    other = make(replicas=devices[1:3])
    with pytest.raises(ValueError, match=r"replica 0 is on .*id=0.*, and here it is on .*id=1.*other.params\(state\)"):
        other.round(state, problem.data)


def test_a_state_of_other_replicas_is_refused(make, problem, devices):
    state = make().init(problem.params)
    other = make(replicas=devices[:1], fleet=None)
    with pytest.raises(ValueError, match=r"state has 2 replicas in this process, and the trainer 1; .*other.params"):
        other.round(state, problem.data)


def test_a_state_at_a_batch_that_other_data_does_not_have_is_refused(make, problem):
    one = make()
    state, _ = one.round(one.init(problem.params), problem.data, counts=(2, 2))
    with pytest.raises(ValueError, match=r"data has 3 batches in an epoch, and state is at batch 4 of one; .*or begin"):
        one.round(state, [problem.data[i] for i in range(3)])


def test_a_constant_schedule_goes_on_by_another_schedule_with_its_moments_and_its_place(make, problem):
    constant = make(tx=optax.adam(optax.constant_schedule(0.05)))
    state, _ = fit(constant, problem.data, params=problem.params)
    falling = make(tx=optax.adam(optax.linear_schedule(0.05, 0.0, 2 * len(problem.data))))
    again, history = fit(falling, problem.data, state)
    assert (history[0].epoch, again.epoch, again.steps) == (1, 2, 2 * len(problem.data))
    moments, count = falling.opt_state(again)
    assert count.count == 2 * len(problem.data)
    assert moments.count > constant.opt_state(state)[0].count


def test_another_optimizer_goes_on_from_the_place_of_the_first_one(make, problem, devices):
    """As where frozen parameters are trained from the middle of a run on."""
    first, second = optax.adam(0.05), optax.sgd(0.1, momentum=0.9)
    one, other = (make(tx=tx, replicas=devices[:1], fleet=None) for tx in (first, second))
    state, _ = fit(one, problem.data, params=problem.params, epochs=None, max_steps=len(problem.data) + 2)
    with pytest.raises(ValueError, match=r"another tx: .*state = trainer\.replace\(state, opt_state=tx\.init\(tra"):
        fit(other, problem.data, state)
    with pytest.raises(ValueError, match="another tx"):
        other.replace(state, problem.params)
    params = other.params(state)
    opt_state = second.init(params)
    state = other.replace(state, opt_state=opt_state)
    assert (state.epoch, state.cursor) == (1, 2)
    state, _ = fit(other, problem.data, state)
    batches = problem.data.epoch(1)
    for i in range(2, len(batches)):
        grads, _ = jax.grad(problem.loss, has_aux=True)(params, batches[i])
        updates, opt_state = second.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), other.params(state), params)


def test_another_optimizer_goes_on_with_what_a_scaling_rule_has_measured(make, problem):
    one, other = (make(tx=tx, scaling=jaxche.AdaScale()) for tx in (optax.sgd(0.05, momentum=0.9), optax.sgd(0.1)))
    state, _ = one.round(one.init(problem.params), problem.data, counts=(2, 2))
    given = other.replace(state, opt_state=optax.sgd(0.1).init(problem.params))
    assert given.local_states[0].opt_state.progress == state.local_states[0].opt_state.progress > 0
    _, history = fit(other, problem.data, given)
    assert history[0].progress > float(given.local_states[0].opt_state.progress[0])
    with pytest.raises(ValueError, match="with scaling="):
        make(tx=optax.sgd(0.1)).replace(state, opt_state=optax.sgd(0.1).init(problem.params))
