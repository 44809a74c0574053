"""Equal stages as one program: what the general way computes, chosen where stages are alike and their tasks small."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxche
from jaxche.protocols import SCHEDULES, Pace
from jaxche.protocols._ticks import make_ticks

WIDTH, EXAMPLES, MICRO = 5, 12, 3


def dense(params, x):
    return jax.nn.relu(x @ params["w"]) * params["scale"] + x


def tree_stage(params, x):
    h = jnp.where(x["mask"][:, None], dense(params, x["h"]), x["h"])
    return {"count": x["count"] + 1, "h": h * x["count"][:, None], "mask": ~x["mask"]}


def dropping(params, x, rng):
    return dense(params, x) * jax.random.bernoulli(rng, 0.7, x.shape)


def of_batch(stage):
    """The same as the first stage, on one entry of a batch."""
    if stage is dropping:
        return lambda params, batch, rng: stage(params, batch["x"], rng)
    return lambda params, batch: stage(params, batch["x"])


def make_params(n_stages, seed=0):
    rng = np.random.default_rng(seed)
    return [
        {"w": 0.5 * rng.normal(size=(WIDTH, WIDTH)).astype(np.float32), "scale": np.float32(0.5 + rng.random())}
        for _ in range(n_stages)
    ]


def make_batch():
    rng = np.random.default_rng(1)
    x, y = (rng.normal(size=(EXAMPLES, WIDTH)).astype(np.float32) for _ in range(2))
    return {"x": x, "y": y, "extra": np.arange(EXAMPLES)}


def loss(y, batch):
    return jnp.mean((y - batch["y"]) ** 2)


def tree_loss(y, batch):
    return jnp.mean(y["h"] ** 2 * y["mask"][:, None]) + y["count"].sum() * 0 + 0 * batch["h"].sum()


def kind_of(name, n_stages):
    if name == "trees":
        rng = np.random.default_rng(2)
        h = rng.normal(size=(EXAMPLES, WIDTH)).astype(np.float32)
        batch = {"count": np.ones(EXAMPLES, np.int32), "h": h, "mask": rng.random(EXAMPLES) < 0.5}
        return [tree_stage] * n_stages, tree_loss, batch
    stage = {"plain": dense, "dropout": dropping}[name]
    return [of_batch(stage)] + [stage] * (n_stages - 1), loss, make_batch()


def both_ways(stages, loss, params, batch, schedule="1f1b", step=5, **options):
    found = []
    for one_program in (True, False):
        protocol = jaxche.Pipeline(MICRO, schedule, one_program=one_program)
        model = jaxche.Partitioned(stages, loss, protocol, **options)
        assert ("one program over" in model.explain(params, batch)) == one_program
        found.append((model.value_and_grad(params, batch, step=step), model.peak_activations))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "n_stages", "schedule", "remat"),
    [
        ("plain", 2, "1f1b", False),
        ("plain", 3, "gpipe", True),
        ("plain", 4, "1f1b", True),
        ("plain", 4, "gpipe", False),
        ("trees", 2, "gpipe", True),
        ("trees", 3, "1f1b", False),
        ("dropout", 3, "1f1b", True),
        ("dropout", 3, "gpipe", False),
    ],
)
def test_loss_and_gradients_are_those_of_the_general_way_and_of_the_whole_model(
    name, n_stages, schedule, remat, close, devices
):
    stages, loss_fn, batch = kind_of(name, n_stages)
    params = make_params(n_stages)
    one, general = both_ways(stages, loss_fn, params, batch, schedule, remat=remat, seed=3)
    close(one[0], general[0])
    for stage, tree in enumerate(one[0][1]):
        assert all(leaf.devices() == {devices[stage]} for leaf in jax.tree.leaves(tree))
    assert one[0][0].devices() == {devices[n_stages - 1]}
    # Every device has room for what the stage that keeps most keeps.
    assert one[1] == (max(general[1]),) * n_stages
    if name != "dropout":

        def whole(params):
            x = batch
            for stage, tree in zip(stages, params, strict=True):
                x = stage(tree, x)
            return loss_fn(x, batch)

        close(one[0], jax.value_and_grad(lambda p: whole(list(p)))(tuple(params)))


def test_training_is_that_of_the_general_way(close):
    stages, loss_fn, batch = kind_of("dropout", 2)
    ends = []
    for one_program in (True, False):
        model = jaxche.Partitioned(stages, loss_fn, jaxche.Pipeline(MICRO, one_program=one_program), seed=2)
        state = model.init(make_params(2), optax.adam(0.05))
        for _ in range(3):
            state, last = model.step(state, batch)
        ends.append((state.params, last))
    close(*ends)


def test_idle_ticks_compute_nothing():
    """At zero, which is what an idle stage would be given, this function's gradient is not a number."""
    stages = [lambda w, x: jnp.sqrt(x) * w] * 3
    batch = np.random.default_rng(0).random((EXAMPLES, 2)).astype(np.float32) + 1
    params = [np.float32(w) for w in (1.5, 2.5, 3.5)]
    (one, _), (general, _) = both_ways(stages, lambda y, batch: y.mean(), params, batch)
    assert np.isfinite(jax.tree.leaves(one)).all()
    np.testing.assert_allclose(one[1], general[1], rtol=1e-5)


def test_low_precision_gradients_are_summed_in_float32(close):
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), make_params(2))
    batch = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), {"x": make_batch()["x"], "y": make_batch()["y"]})
    stages = [of_batch(dense), dense]
    (one, _), (general, _) = both_ways(stages, loss, params, batch)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-2), *jax.device_get((one, general)))
    assert jax.tree.map(lambda x: x.dtype, one) == jax.tree.map(lambda x: x.dtype, general)


def test_keys_differ_between_steps_and_come_again():
    stages, loss_fn, batch = kind_of("dropout", 2)
    model = jaxche.Partitioned(stages, loss_fn, jaxche.Pipeline(MICRO, one_program=True))
    losses = [float(model.value_and_grad(make_params(2), batch, step=step)[0]) for step in (0, 1, 0)]
    assert losses[0] == losses[2] != losses[1]


def explained(stages=None, loss=loss, batch=None, params=None, protocol=None, n=3, **options):
    stages = stages or [of_batch(dense)] + [dense] * (n - 1)
    protocol = protocol or jaxche.Pipeline(MICRO)
    model = jaxche.Partitioned(stages, loss, protocol, **options)
    return model.explain(params or make_params(n), make_batch() if batch is None else batch)


def test_stages_alike_in_code_and_not_in_name_are_one_program():
    assert "one program over 3 devices, all stages alike" in explained()
    # Functions of their own, with a function inside that has a derivative of its own.
    made = [lambda p, batch: dense(p, batch["x"]), *[lambda p, x: dense(p, x) for _ in range(2)]]
    assert "one program over 3 devices" in explained(made)
    assert explained().startswith("3 stages, 4 micro-batches of 3, 1f1b: ")


def scaled(factor):
    return lambda p, x: dense(p, x) * factor


def narrow(params, x):
    return dense(params, x)[:, :2]


@pytest.mark.parametrize(
    ("options", "because"),
    [
        (
            {"stages": [of_batch(dense), dense, scaled(2.0)]},
            r"stage 2 \(<lambda>\) computes something else than stage 1",
        ),
        ({"stages": [of_batch(dense), scaled(np.ones(WIDTH)), scaled(np.arange(WIDTH))]}, "stage 2 .* something else"),
        ({"stages": [lambda p, b: dense(p, 2 * b["x"]), dense, dense]}, "stage 0 .* computes something else"),
        ({"stages": [lambda p, b: dense(p, b["x"] + b["y"]), dense, dense]}, "stage 0 .* reads something else"),
        (
            {"stages": [of_batch(dense), dense, lambda p, x: dense(p, x)[:, :2]], "loss": lambda y, b: y.mean()},
            "shapes",
        ),
        ({"remat": [True, False, False]}, r"stage 0 .* has another remat than stage 1"),
        ({"paces": [Pace(1.0, 1.0)] * 3}, "tasks are paced"),
        ({"devices": [0, 1, 0]}, "a device holds several stages"),
        ({"protocol": jaxche.Direct()}, "Direct goes by wires"),
        ({"protocol": jaxche.Pipeline(MICRO, one_program=False)}, "Pipeline goes by wires"),
        ({"protocol": jaxche.Pipeline(EXAMPLES)}, "there is one micro-batch"),
        ({"n": 1, "stages": [of_batch(dense)]}, "there is one stage"),
    ],
)
def test_others_go_by_wires_and_say_why(options, because, devices):
    if "devices" in options:
        options = {**options, "devices": [devices[i] for i in options["devices"]]}
    told = explained(**options)
    assert re.search(f"programs of their own for each stage, because .*{because}", told), told


def test_large_tasks_go_by_wires_unless_asked():
    stages, width = [lambda w, x: jnp.tanh(x @ w)] * 2, 1024
    params, batch = [jnp.zeros((width, width))] * 2, jnp.ones((8, width))
    told = explained(stages, lambda y, b: y.mean(), batch, params, jaxche.Pipeline(4))
    assert "because their tasks are so large" in told
    asked = jaxche.Pipeline(4, one_program=True)
    assert "one program over 2" in explained(stages, lambda y, b: y.mean(), batch, params, asked)


def test_what_was_asked_for_and_cannot_be_is_refused():
    asked = jaxche.Pipeline(MICRO, one_program=True)
    with pytest.raises(ValueError, match=r"one_program=True, but stage 1 .* gives other shapes than stage 0"):
        explained([of_batch(dense), narrow], lambda y, b: y.mean(), n=2, protocol=asked)
    with pytest.raises(ValueError, match="one_program='yes' must be True, False or None"):
        jaxche.Pipeline(MICRO, one_program="yes")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("n_stages", "micros"), [(2, 1), (2, 5), (3, 2), (4, 8), (5, 3)])
def test_ticks_do_every_task_once_and_read_only_what_has_come(schedule, n_stages, micros):
    ticks = make_ticks(SCHEDULES[schedule](n_stages, micros), keeps_inputs=True)
    rows = np.concatenate([part.rows for part in ticks.parts])
    assert len(rows) == 2 * (micros + n_stages - 1)
    inputs, gradients, kept = ([{} for _ in range(n_stages)] for _ in range(3))
    done = []
    for row in rows:
        for stage in range(n_stages):
            kind, micro = row[:2, stage]
            if kind == 1:
                assert stage == 0 or inputs[stage][micro % ticks.inputs] == micro
                kept[stage][micro % ticks.kept] = micro
                if stage == n_stages - 1:
                    gradients[stage][micro % ticks.gradients] = micro
            if kind == 2:
                assert kept[stage][micro % ticks.kept] == micro == gradients[stage][micro % ticks.gradients]
                assert stage == 0 or inputs[stage][micro % ticks.inputs] == micro
            if kind:
                done.append((stage, kind, micro))
        for stage in range(n_stages):
            if row[2, stage] >= 0:
                inputs[stage][row[2, stage] % ticks.inputs] = row[2, stage]
            if row[3, stage] >= 0:
                gradients[stage][row[3, stage] % ticks.gradients] = row[3, stage]
    assert sorted(done) == [(s, k, m) for s in range(n_stages) for k in (1, 2) for m in range(micros)]
    assert ticks.kept == (micros if schedule == "gpipe" else min(n_stages, micros))
