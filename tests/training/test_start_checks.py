"""Optimizers that a trainer cannot use are refused before the first step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

import jaxche
from jaxche.sharding import check_update
from jaxche.training._start_checks import check_copies, check_line_search, shapes_of_state

PARAMS = {"w": np.zeros((3, 2), np.float32), "b": np.zeros(2, np.float32)}
EXTRA_ARGUMENTS = {
    "polyak_sgd": optax.polyak_sgd(),
    "momo": optax.contrib.momo(),
    "reduce_on_plateau": optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()),
    "lbfgs without line search": optax.lbfgs(0.1, linesearch=None),
    "schedule_free": optax.contrib.schedule_free_sgd(0.1),
}


@pytest.mark.parametrize("tx", EXTRA_ARGUMENTS)
def test_an_optimizer_may_read_the_loss(tx):
    check_line_search(EXTRA_ARGUMENTS[tx])
    check_update(EXTRA_ARGUMENTS[tx], PARAMS, PARAMS["w"])


def test_a_train_state_as_an_optimizer_is_refused_with_the_line_to_write(devices):
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=optax.sgd(0.1))
    line = r"tx=state\.tx, .* trainer\.init\(state\.params, opt_state=state\.opt_state\)"
    with pytest.raises(ValueError, match=f"tx is a TrainState; write {line}"):
        jaxche.Trainer(lambda p, b: p["w"].sum(), state, replicas=devices[:1])


def test_the_copies_of_a_pmap_are_no_parameters(devices):
    mesh = jax.make_mesh((4,), ("batch",), devices=devices[:4])

    def cut(array, spec=("batch",)):
        return jax.device_put(np.asarray(array, np.float32), NamedSharding(mesh, PartitionSpec(*spec)))

    copies = {"w": cut(np.ones((4, 3, 2))), "b": cut(np.zeros(4))}
    with pytest.raises(ValueError, match=r"4 copies of each .* write trainer.init\(flax.jax_utils.unreplicate\(params"):
        jaxche.Trainer(lambda p, b: p["w"].sum(), optax.sgd(0.1), replicas=devices[:1]).init(copies)
    # Sharded parameters differ along the axis, and have others that are not cut into rows.
    for other in (cut(np.arange(4)), cut(np.zeros(8)), cut(np.zeros(4), ()), jnp.zeros(4)):
        check_copies(copies | {"b": other})


def test_an_optimizer_state_in_the_place_of_the_model_state_is_refused(devices):
    tx = optax.adam(0.1)
    trainer = jaxche.Trainer(lambda p, b: p["w"].sum(), tx, replicas=devices[:1])
    with pytest.raises(ValueError, match=r"is a state of tx; write trainer\.init\(params, opt_state=opt_state\)"):
        trainer.init(PARAMS, tx.init(PARAMS))
    trainer.init(PARAMS, PARAMS, tx.init(PARAMS))
    average = optax.GradientTransformation(lambda params: params, lambda updates, state, params: (updates, params))
    jaxche.Trainer(lambda p, b: p["w"].sum(), average, replicas=devices[:1]).init(PARAMS, model_state=PARAMS)


@pytest.mark.parametrize("wrap", [lambda tx: tx, lambda tx: optax.chain(optax.clip(1.0), tx.gradient_transformation())])
def test_accumulated_batches_that_scaling_does_not_see_are_refused(devices, wrap):
    tx = wrap(optax.MultiSteps(optax.sgd(0.1), 4))
    trainer = jaxche.Trainer(lambda p, b: p["w"].sum(), tx, replicas=devices[:2], scaling=jaxche.AdaScale())
    with pytest.raises(ValueError, match=r"tx holds an optax.MultiSteps, .* write average='gradients'"):
        trainer.init(PARAMS)


def labelled(tx):
    return optax.partition({"all": tx}, {"w": "all", "b": "all"})


@pytest.mark.parametrize("wrapped", [lambda tx: tx, labelled, lambda tx: optax.chain(optax.clip(1.0), tx)])
@pytest.mark.parametrize(
    "tx", [optax.lbfgs(), optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(max_backtracking_steps=5))]
)
def test_a_line_search_is_refused_with_the_line_to_write(devices, tx, wrapped):
    reason = r"value_fn=.*a step on one batch has one value; write optax\.lbfgs\(0\.1, linesearch=None\)"
    with pytest.raises(ValueError, match=reason):
        jaxche.Trainer(lambda p, b: p["w"].sum(), wrapped(tx), replicas=devices[:2]).init(PARAMS)
    if wrapped is not labelled:  # labels are of the parameters
        with pytest.raises(ValueError, match=reason):
            jaxche.Trainer(lambda p, b: p["w"].sum(), wrapped(tx), replicas=devices[:2])


OPAQUE = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), opaque_mode=True)


@pytest.mark.parametrize(
    "params",
    [PARAMS, PARAMS["w"], optax.LookaheadParams(PARAMS, PARAMS)],
    ids=["a dict", "an array", "pairs"],
)
def test_lookahead_is_an_outer_optimizer_here(devices, params):
    tx = optax.lookahead(optax.sgd(0.1), 5, 0.5)
    trainer = jaxche.Trainer(lambda p, b: jax.tree.leaves(p)[0].sum(), tx, replicas=devices[:2])
    with pytest.raises(
        ValueError, match=r"tx has an optax\.lookahead, .*outer=optax\.sgd\(0\.5\)\), or the adapter in"
    ):
        trainer.init(params)


@pytest.mark.parametrize(
    ("tx", "named"),
    [
        (optax.contrib.sophia(0.1), r"obj_fn must be provided.*; write e\.g\. tx=optax\.adam"),
        (
            optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05)),
            r"unexpected keyword argument 'value'; write e\.g\. tx=optax\.GradientTransformation\(tx\.init",
        ),
        (OPAQUE, r"unexpected keyword argument 'value'; write e\.g\. optax\.contrib\.sam without opaque_mode=True"),
        (optax.GradientTransformation(OPAQUE.init, OPAQUE.update), r"must be provided.*sam without opaque_mode=True"),
        (optax.contrib.differentially_private_aggregate(1.0, 1.0, key=0), "per_example.*clips the gradient of each"),
    ],
)
def test_other_needs_of_an_optimizer_are_named(devices, tx, named):
    trainer = jaxche.Trainer(lambda p, b: p["w"].sum(), tx, replicas=devices[:1])
    with pytest.raises(ValueError, match=rf"value= \(the loss of the batch\) alone: .*{named}"):
        trainer.init(PARAMS)
    staged = [PARAMS, {"w": PARAMS["w"]}]
    with pytest.raises(ValueError, match=named):
        check_update(tx, *staged)


@pytest.mark.parametrize(
    "tx",
    [
        optax.contrib.differentially_private_aggregate(1.0, 1.0, key=0),
        optax.stateless(lambda updates, params: {"w": updates["w"][:1]}),
    ],
)
def test_an_update_that_adding_would_spread_is_refused(devices, tx):
    trainer = jaxche.Trainer(lambda p, b: p["w"].sum(), tx, replicas=devices[:2], policy="sync")
    with pytest.raises(ValueError, match=r"the shape \(.*\) for params\['w'\] of the shape .*write a loss that clips"):
        trainer.init({"w": jnp.ones((4, 2))})


@pytest.mark.parametrize("policy", ["cadence", "async", "auto"])
def test_lbfgs_is_refused_where_parameters_are_averaged(devices, policy):
    tx = optax.chain(optax.clip(1.0), optax.lbfgs(0.1, linesearch=None))

    def trainer(policy, replicas):
        return jaxche.Trainer(lambda p, b: p["w"].sum(), tx, policy, replicas=replicas)

    with pytest.raises(ValueError, match=r"path of the parameters.*write jaxche\.Trainer\(\.\.\., policy='sync'\)"):
        trainer(policy, devices[:2]).init(PARAMS)
    trainer("sync", devices[:2]).init(PARAMS)
    trainer(policy, devices[:1]).init(PARAMS)


SAM = optax.contrib.sam(optax.adam(0.1), optax.sgd(0.05))
AHEAD = optax.lookahead(optax.sgd(0.1), 5, 0.5)
ADAPTED = {
    "optax.contrib.sam": (optax.chain(optax.GradientTransformation(SAM.init, SAM.update), optax.clip(1.0)), PARAMS),
    "optax.lookahead": (
        optax.GradientTransformation(AHEAD.init, lambda grads, *rest: AHEAD.update(grads.fast, *rest)),
        optax.LookaheadParams.init_synced(PARAMS),
    ),
}


@pytest.mark.parametrize("name", ADAPTED)
@pytest.mark.parametrize("policy", ["cadence", "async", "auto"])
def test_phases_of_several_steps_are_refused_where_parameters_are_averaged(devices, policy, name):
    tx, params = ADAPTED[name]

    def start(policy, replicas=devices[:2], **options):
        jaxche.Trainer(lambda p, b: jax.tree.leaves(p)[0].sum(), tx, policy, replicas=replicas, **options).init(params)

    with pytest.raises(ValueError, match=rf"tx holds an {name}, .* write jaxche\.Trainer\(\.\.\., policy='sync'\)"):
        start(policy)
    start("sync")
    start("cadence", average="gradients")
    start(policy, replicas=devices[:1])


@pytest.mark.parametrize(
    ("after", "found"),
    [
        (lambda x: x.astype(jnp.float32), r"its state: \['sum'\] from bfloat16\(3,\) to float32\(3,\)"),
        (lambda x: x[None], r"its state: \['sum'\] from bfloat16\(3,\) to bfloat16\(1, 3\)"),
        (lambda x: (x, x), "its state: its structure"),
    ],
)
def test_a_state_that_an_update_changes_is_refused(devices, after, found):
    def update(updates, state, params=None):
        return updates, {"sum": after(state["sum"])}

    tx = optax.GradientTransformation(lambda params: {"sum": jnp.zeros(3, jnp.bfloat16)}, update)
    with pytest.raises(ValueError, match=f"an update of tx changes {found}; write it so that update returns what init"):
        jaxche.Trainer(lambda p, b: p["w"].sum(), tx, replicas=devices[:1]).init(PARAMS)


def test_an_update_that_changes_the_shape_of_a_parameter_is_refused(devices):
    tx = optax.scale_by_distance_over_gradients()  # of a scalar it makes an array
    with pytest.raises(ValueError, match=r"an update of tx changes params: .* from float32\(\) to float32\(1,\)"):
        jaxche.Trainer(lambda p, b: p.sum(), tx, replicas=devices[:1]).init(jnp.zeros(()))


def test_means_over_subspaces_of_replicas_are_refused(devices):
    tx = optax.chain(optax.clip(1.0), optax.contrib.galore(0.1, rank=1))

    def trainer(**options):
        return jaxche.Trainer(lambda p, b: p["w"].sum(), tx, **{"replicas": devices[:2]} | options)

    with pytest.raises(ValueError, match=r"optax.contrib.galore, .* write opt_state='local', or policy='sync'"):
        trainer().init(PARAMS)
    for options in ({"opt_state": "local"}, {"opt_state": "reset"}, {"policy": "sync"}, {"replicas": devices[:1]}):
        trainer(**options).init(PARAMS)


def test_a_scaled_optimizer_is_refused_however_deep(devices):
    tx = optax.chain(optax.clip(1.0), jaxche.scale_learning_rate(optax.sgd(0.1), jaxche.SqrtScale()))
    with pytest.raises(ValueError, match=r"tx holds a jaxche\.scale_learning_rate\(.*optax\.sgd\(0\.1\), scaling="):
        jaxche.Trainer(lambda p, b: p["w"].sum(), tx, replicas=devices[:1]).init(PARAMS)


FALLING = optax.linear_schedule(0.2, 0.0, transition_steps=40)


def following(progress):
    return optax.inject_hyperparams(optax.sgd)(learning_rate=progress)


@pytest.mark.parametrize("wrap", [lambda tx: tx, lambda tx: optax.chain(optax.clip(1.0), tx)])
def test_a_progress_schedule_follows_the_progress_of_a_scaling_rule(devices, tmp_path, wrap):
    def loss_fn(p, batch):
        return jnp.mean((batch["x"] @ p["w"] + p["b"] - 1.0) ** 2)

    tx, data = wrap(following(jaxche.progress_schedule(FALLING))), [{"x": np.eye(4, 3, dtype=np.float32)}] * 6
    settings = {"policy": "sync", "rows": "equal", "replicas": devices[:2], "scaling": jaxche.SqrtScale()}
    trainer = jaxche.Trainer(loss_fn, tx, **settings, base_batch_size=2)
    state, history = trainer.fit(trainer.init(PARAMS), data, checkpoints=tmp_path, progress=False)
    rate = optax.tree.get(trainer.opt_state(state), "learning_rate", filtering=lambda _, x: isinstance(x, jax.Array))
    assert history[-2].progress > 2
    assert float(rate) == pytest.approx(float(FALLING(history[-2].progress)), rel=1e-6)


def test_a_progress_schedule_without_a_rule_is_refused_with_the_line_to_write(devices):
    loss_fn, schedule = lambda p, b: p["w"].sum(), jaxche.progress_schedule(FALLING)
    line = r"write jaxche\.Trainer\(loss_fn, tx, scaling=jaxche\.AdaScale\(\)\)"
    with pytest.raises(ValueError, match=f"tx has a jaxche.progress_schedule, .*{line}"):
        jaxche.Trainer(loss_fn, following(schedule), replicas=devices[:1]).init(PARAMS)
    with pytest.raises(ValueError, match=r"tx: a progress schedule .*learning_rate=progress_schedule\(\.\.\.\)\)$"):
        jaxche.Trainer(loss_fn, optax.sgd(schedule), replicas=devices[:1], scaling=jaxche.AdaScale()).init(PARAMS)


@pytest.mark.parametrize("params", [PARAMS, lambda: PARAMS])
def test_adam_scale_without_second_moments_is_refused_at_the_start(devices, params):
    def trainer(tx, rule):
        return jaxche.Trainer(lambda p, b: p["w"].sum(), tx, replicas=devices[:2], scaling=rule)

    line = r"scaling=jaxche\.AdamScale\(\) reads .* write scaling=jaxche\.AdaScale\(\) for SGD, .*\.SqrtScale\(\) for"
    with pytest.raises(ValueError, match=line):
        trainer(optax.sgd(0.1), jaxche.AdamScale()).init(params)
    trainer(optax.sgd(0.1), jaxche.AdaScale()).init(params)
    trainer(
        optax.partition({"a": optax.adam(0.1), "b": optax.sgd(0.1)}, {"w": "a", "b": "b"}), jaxche.AdamScale()
    ).init(params)


@pytest.mark.parametrize("tx", [optax.adamax(0.1), optax.chain(optax.clip_by_global_norm(1.0), optax.adamaxw(0.1))])
def test_adam_scale_of_adamax_is_refused_at_the_start(devices, tx):
    def init(scaling):
        return jaxche.Trainer(lambda p, b: p["w"].sum(), tx, replicas=devices[:2], scaling=scaling).init(PARAMS)

    with pytest.raises(ValueError, match=r"optax\.adamax, is no mean of squares; write scaling=jaxche\.SqrtScale\(\)"):
        init(jaxche.AdamScale())
    init(jaxche.SqrtScale())


@jax.tree_util.register_pytree_node_class
class Line:
    """A pytree whose objects compare by identity."""

    def __init__(self, w, b):
        self.w, self.b = w, b

    def tree_flatten(self):
        return (self.w, self.b), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children)


@pytest.mark.parametrize("settings", [{"replicas": 1}, {"replicas": 2, "policy": "sync", "joined_batches": 1}])
def test_parameters_may_be_of_a_class_without_an_equality(devices, settings):
    def loss_fn(line, batch):
        return jnp.mean((batch["x"] @ line.w + line.b - 1.0) ** 2)

    tx, line, data = optax.adam(0.1), Line(jnp.ones(3), jnp.zeros(())), [{"x": np.eye(3, dtype=np.float32)}] * 4
    trainer = jaxche.Trainer(loss_fn, tx, **settings | {"replicas": devices[: settings["replicas"]]})
    state, _ = trainer.fit(trainer.init(line, opt_state=tx.init(line)), data, progress=False)
    opt_state = tx.init(line)
    for batch in data:
        updates, opt_state = tx.update(jax.grad(loss_fn)(line, batch), opt_state, line)
        line = optax.apply_updates(line, updates)
    np.testing.assert_allclose(trainer.params(state).w, line.w, rtol=1e-5)
    with pytest.raises(ValueError, match="opt_state is not one of this tx"):
        trainer.init(line, opt_state=optax.sgd(0.1).init(line))


def test_a_state_with_numbers_of_python_is_trained_like_one_of_arrays(problem, devices, same):
    def update(grads, state, params=None):
        return jax.tree.map(lambda g: -0.1 * g / (1 + state["count"]), grads), {"count": state["count"] + 1}

    found = []
    for zero in (0, jnp.int32(0)):
        tx = optax.GradientTransformation(lambda params, zero=zero: {"count": zero}, update)
        trainer = jaxche.Trainer(problem.loss, tx, policy="sync", rows="equal", replicas=devices[:2])
        state, _ = trainer.fit(trainer.init(problem.params), problem.data, progress=False)
        found.append(trainer.params(state))
    same(*found)


def draws_from_words():
    """A transformation whose state is a random key as two words."""

    def update(updates, key, params=None):
        key, own = jax.random.split(key["rng_key"])
        return jax.tree.map(lambda x: x + jax.random.normal(own, x.shape), updates), {"rng_key": key}

    return optax.GradientTransformation(lambda _: {"rng_key": jax.random.PRNGKey(0)}, update)


@pytest.mark.parametrize(
    ("noise", "where"),
    [(optax.add_noise(0.1, 0.5, 0), "opt_state[1].rng_key"), (draws_from_words(), "opt_state[1]['rng_key']")],
    ids=["typed", "words"],
)
@pytest.mark.parametrize(
    ("options", "warns"),
    [({}, True), ({"policy": "sync"}, False), ({"average": "gradients"}, False), ({"replicas": 1}, False)],
    ids=str,
)
def test_a_random_key_that_replicas_share_is_logged(noise, where, options, warns, devices, caplog):
    options = options | {"replicas": devices[: options.get("replicas", 2)]}
    tx = optax.chain(optax.trace(0.9), noise, optax.sgd(0.1))
    jaxche.Trainer(lambda p, b: p["w"].sum(), tx, **options).init(PARAMS)
    assert (f"{where}, and all replicas start with the same" in caplog.text) == warns
    assert ("write policy='sync'" in caplog.text) == warns
    caplog.clear()
    jaxche.Trainer(lambda p, b: p["w"].sum(), optax.adam(0.1), **options).init(PARAMS)
    assert not caplog.records


def test_a_parameter_without_elements_is_named_where_tx_fails_on_it(devices):
    params = PARAMS | {"empty": np.zeros((0, 4), np.float32)}

    def start(tx):
        return jaxche.Trainer(lambda p, b: p["w"].sum(), tx, replicas=devices[:2]).init(params)

    line = "tx=optax.masked(tx, lambda params: jax.tree.map(lambda p: p.size > 0, params))"
    what = r"params\['empty'\] has no elements, its shape is \(0, 4\), .*ZeroDivisionError"
    with pytest.raises(ValueError, match=what) as refused:
        start(optax.contrib.muon(0.1))
    assert str(refused.value).endswith(f"or write {line}")
    start(eval(line.removeprefix("tx="), {"optax": optax, "jax": jax, "tx": optax.contrib.muon(0.1)}))
    start(optax.adam(0.1))
    with pytest.raises(ValueError, match=r"tx makes no update .*opaque"):  # the array is not the cause
        start(optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1), opaque_mode=True))


@pytest.mark.parametrize("error", [ValueError("a rank of 0"), AttributeError("no such field", obj=3)], ids=str)
def test_an_error_of_an_optimizer_that_is_about_no_structure_stays_as_it_is(error):
    def init(params):
        raise error

    with pytest.raises(type(error)) as raised:
        shapes_of_state(optax.GradientTransformation(init, optax.identity().update), PARAMS)
    assert raised.value is error


def other_rate(make_tx):
    return make_tx(0.1), make_tx(optax.constant_schedule(0.1))


@pytest.mark.parametrize(
    ("txs", "own", "other"),
    [
        (
            other_rate(optax.adam),
            r"\(ScaleByAdamState, EmptyState\)",
            r"\(ScaleByAdamState, ScaleByScheduleState\)",
        ),
        ((optax.adam(0.1), optax.adamw(0.1)), r"\(\w+, EmptyState\)", r"\(\w+, EmptyState, EmptyState\)"),
        (other_rate(lambda rate: labelled(optax.sgd(rate))), "no other arrays", r"\.inner_states.*\.count int32\[\]"),
    ],
    ids=["adam with a schedule", "adamw", "partition"],
)
def test_the_states_of_two_optimizers_are_named_by_what_differs(devices, txs, own, other):
    before, after = (jaxche.Trainer(lambda p, b: p["w"].sum(), tx, replicas=devices[:1]) for tx in txs)
    with pytest.raises(ValueError, match=rf"optimizer state has {own}, and tx\.init makes {other}; to go on with"):
        after.evaluate(before.init(PARAMS), [PARAMS])
    with pytest.raises(ValueError, match=rf"It has {own}, and tx\.init\(params\) makes {other}$"):
        after.init(PARAMS, opt_state=txs[0].init(PARAMS))
