"""Layers cut into stages that take equal times, and stages in the order of a plan."""

import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxche

costs = st.lists(st.one_of(st.integers(0, 20), st.floats(0, 100)), min_size=1, max_size=9)
speeds = st.lists(st.floats(0.1, 10), min_size=1, max_size=4)


def slowest(costs, speeds, stages):
    return max(sum(costs[i] for i in stage) / speed for stage, speed in zip(stages, speeds, strict=True))


@given(costs, speeds)
def test_no_cut_is_better(costs, speeds):
    if len(costs) < len(speeds):
        with pytest.raises(ValueError, match=f"costs has {len(costs)} layers for {len(speeds)} stages"):
            jaxche.stages.balance_stages(costs, speeds)
        return
    stages = jaxche.stages.balance_stages(costs, speeds)
    assert [layer for stage in stages for layer in stage] == list(range(len(costs)))
    assert all(len(stage) > 0 for stage in stages)
    tried = (
        [range(a, b) for a, b in itertools.pairwise((0, *cuts, len(costs)))]
        for cuts in itertools.combinations(range(1, len(costs)), len(speeds) - 1)
    )
    best = min(slowest(costs, speeds, stages) for stages in tried)
    assert slowest(costs, speeds, stages) == pytest.approx(best, rel=1e-9)


def test_costs_and_speeds_may_be_anything_that_yields_numbers():
    costs, speeds = {"first": 1, "second": 2, "third": 3}, (1.0 for _ in range(2))
    assert jaxche.stages.balance_stages(costs.values(), speeds) == [range(2), range(2, 3)]


@pytest.mark.parametrize(
    ("costs", "speeds", "message"),
    [
        (5, [1], "costs=5 must be a list of numbers; write e.g. jaxche.stages.balance_stages"),
        (["a"], [1], "costs=\\['a'\\] must be a list of numbers"),
        ([1, 1], None, "speeds=None must be a list of numbers"),
        ([], [1], "costs is empty"),
        ([1], [], "speeds is empty"),
        ([1, -1], [1], r"costs\[1\]=-1 must be a number"),
        ([1, float("nan")], [1], r"costs\[1\]=nan must be a number"),
        ([1, 1], [1, 0], r"speeds\[1\]=0 must be a positive number"),
    ],
)
def test_refused(costs, speeds, message):
    with pytest.raises(ValueError, match=message):
        jaxche.stages.balance_stages(costs, speeds)


def test_costs_of_trees_with_a_mask_and_of_stages_with_dropout():
    def first(params, batch):
        return {"h": jnp.tanh(batch["x"] @ params), "mask": batch["mask"]}

    def second(params, x, rng):
        kept = jax.random.bernoulli(rng, 0.5, x["h"].shape)
        return jnp.where(x["mask"][:, None], x["h"] * kept, 0) @ params

    batch = {"x": np.ones((4, 3), np.float32), "mask": np.ones(4, bool)}
    costs = jaxche.stages.measure_costs([first, second], [jnp.ones((3, 3))] * 2, batch)
    assert len(costs) == 2
    assert min(costs) > 0


def test_costs_of_stages_with_complex_arrays():
    params = [jnp.ones((3, 3), jnp.complex64)] * 2
    costs = jaxche.stages.measure_costs([lambda w, x: x @ w] * 2, params, np.ones((4, 3), np.complex64))
    assert len(costs) == 2


def test_costs_of_stages_on_their_devices(devices):
    model = jaxche.Partitioned([lambda w, x: x @ w] * 2, lambda y, x: jnp.mean(y), jaxche.Direct(), devices[:2])
    state = model.init([jnp.ones((3, 3))] * 2, optax.sgd(0.1))
    assert len(jaxche.stages.measure_costs(model.stages, state.params, jnp.ones((4, 3)))) == 2


def test_costs_need_parameters_for_each_stage():
    with pytest.raises(ValueError, match="params: 1 entries for 2 stages"):
        jaxche.stages.measure_costs([lambda w, x: x * w] * 2, [jnp.ones(3)], jnp.ones(3))
    with pytest.raises(ValueError, match="params: ArrayImpl for 1 stages; give a list"):
        jaxche.stages.measure_costs([lambda w, x: x * w], jnp.ones(3), jnp.ones(3))
    with pytest.raises(ValueError, match=r"stages=<function .*> is no list of functions"):
        jaxche.stages.measure_costs(lambda w, x: x * w, [jnp.ones(3)], jnp.ones(3))


def test_a_stage_whose_costs_cannot_be_measured_is_named():
    stages, params = [lambda w, x: x * w, lambda w, x: x @ w], [jnp.ones(4), jnp.ones((3, 2))]
    with pytest.raises(ValueError, match=r"stage 1 \(<lambda>\) does not accept what stage 0 gives: float32\[2, 4\]\."):
        jaxche.stages.measure_costs(stages, params, jnp.ones((2, 4)))
    with pytest.raises(ValueError, match=r"params\[0\] is the shape float32\[4\] without values; give arrays"):
        jaxche.stages.measure_costs(stages, jax.eval_shape(lambda: params), jnp.ones((2, 4)))
    with pytest.raises(ValueError, match=r"batch is the shape float32\[2, 4\] without values; give arrays"):
        jaxche.stages.measure_costs(stages, params, jax.ShapeDtypeStruct((2, 4), jnp.float32))
    with pytest.raises(ValueError, match=r"\['s'\] of a batch is 'abc', text or objects and not numbers"):
        jaxche.stages.measure_costs(stages, params, {"x": jnp.ones((2, 4)), "s": "abc"})


def test_layers_cut_by_their_measured_costs_train_as_one_model(close):
    """Costs, cut, stages: the way from a list of layers to a pipeline on devices of different speeds."""
    rng = np.random.default_rng(0)
    params = [rng.normal(size=(4, 4)).astype(np.float32) for _ in range(5)]
    layers = [lambda w, x: jnp.tanh(x @ w)] * 5
    batch = rng.normal(size=(8, 4)).astype(np.float32)
    costs = jaxche.stages.measure_costs(layers, params, batch[:2])
    cuts = jaxche.stages.balance_stages(costs, speeds=[2, 1])
    assert [layer for cut in cuts for layer in cut] == list(range(5))

    def run(own, x):
        for w in own:
            x = jnp.tanh(x @ w)
        return x

    def loss(y, batch):
        return jnp.mean((y - batch) ** 2)

    model = jaxche.Partitioned([run, run], loss, jaxche.Pipeline(micro_batch_size=2))
    value, grads = model.value_and_grad([[params[i] for i in cut] for cut in cuts], batch)
    wanted, wanted_grads = jax.value_and_grad(lambda p: loss(run(p, batch), batch))(params)
    close((value, [g for stage in grads for g in stage]), (wanted, wanted_grads))


def test_partitions_run_in_the_order_of_the_plan():
    assert jaxche.order_partitions(list("abcd"), [["c", "d"], ["a", "b"]]) == [["a", "b"], ["c", "d"]]


@pytest.mark.parametrize(
    ("partitions", "message"),
    [
        ([["a", "b"], ["b", "c", "d"]], r"'b' is claimed twice, by partitions\[0\] and partitions\[1\]"),
        ([["a", "a", "b"], ["c", "d"]], r"'a' is claimed twice, by partitions\[0\];"),
        ([["a", "b"], ["d"]], "'c' is claimed by no partition"),
        ([["a", "c"], ["b"], ["d"]], r"partitions\[0\] is interleaved with partitions\[1\]: node 'b' runs between"),
        ([["a", "b"], [], ["c", "d"]], r"partitions\[1\] is empty"),
        ([["a", "b"], ["c", "d", "e"]], r"partitions\[1\] claims 'e', which is not in the plan"),
        ([], "partitions is empty"),
        (5, r"partitions=5 must be lists of nodes of the plan; write e\.g\. jaxche\.order_partitions"),
        ([0, 1], r"partitions=\[0, 1\] must be lists of nodes"),
        ([[["a"], "b"], ["c", "d"]], r"partitions=\[\[\['a'\], 'b'\], \['c', 'd'\]\] must be lists of nodes"),
    ],
)
def test_refused_partitions(partitions, message):
    with pytest.raises(ValueError, match=message):
        jaxche.order_partitions(list("abcd"), partitions)


def test_a_plan_names_each_layer_once():
    with pytest.raises(ValueError, match="plan has node 'a' twice"):
        jaxche.order_partitions(["a", "b", "a"], [["a"], ["b"]])


@pytest.mark.parametrize("plan", [5, None, [["a"], ["b"]]])
def test_a_plan_is_a_list_of_names(plan):
    with pytest.raises(ValueError, match=r"plan=.* must be a list of nodes such as names; write e\.g\."):
        jaxche.order_partitions(plan, [["a"], ["b"]])


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers())
def test_any_stretches_in_any_order(lengths, seed):
    plan = list(range(sum(lengths)))
    stretches = [plan[sum(lengths[:i]) : sum(lengths[: i + 1])] for i in range(len(lengths))]
    shuffler = random.Random(seed)
    mixed = [shuffler.sample(stretch, len(stretch)) for stretch in stretches]
    shuffler.shuffle(mixed)
    assert jaxche.order_partitions(plan, mixed) == stretches
