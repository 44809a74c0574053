"""The sharded step: the same training under every strategy."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxche

# For what is the same however parameters are cut.
ONE_OF_EACH_MESH = ("none", "hybrid")


def make_step(problem, name, devices, tx=None, loss=None, **knobs):
    strategy = problem.strategies[name](len(devices))
    return jaxche.sharded_step(
        loss or problem.loss, tx or problem.optimizers["adam"](), strategy, strategy.mesh(devices), **knobs
    )


@pytest.mark.slow
# The chain holds Adam, and most of what could differ between devices: any world for it, one for the others.
@pytest.mark.parametrize(
    ("sizes", "optimizer", "world"),
    [
        *(("odd", "masked_chain", world) for world in (1, 2, 4, 8)),
        *(("odd", optimizer, 4) for optimizer in ("sgd", "adam")),
        ("even", "masked_chain", 8),
    ],
)
def test_twenty_steps_equal_one_device(name, sizes, optimizer, world, devices, problems, close):
    problem = problems[sizes]
    step = make_step(problem, name, devices[:world], problem.optimizers[optimizer]())
    state, losses = problem.run(step, step.init(problem.params()), problem.batches(20))
    params, one_device = problem.on_one_device(optimizer)
    np.testing.assert_allclose(losses, one_device, rtol=1e-5)
    close(state.params, params, atol=1e-5)


def test_micro_batches_change_nothing(name, devices, problem, close):
    step = make_step(problem, name, devices[:4], accumulate=4)
    state, losses = problem.run(step, step.init(problem.params()), problem.batches(20))
    params, one_device = problem.on_one_device("adam")
    np.testing.assert_allclose(losses, one_device, rtol=1e-5)
    close(state.params, params, atol=1e-5)


@pytest.mark.slow
def test_the_norm_that_clips_counts_every_element_once(name, devices, problem, close):
    """Neither once a device nor once a node: gradients are scaled to length 0.01 exactly."""
    tx = optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(1.0))
    step, batch = make_step(problem, name, devices, tx), problem.batches(1)[0]
    before = problem.params()
    state, _ = step(step.init(before), batch)
    moved = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), before, jax.device_get(state.params))
    assert float(optax.tree.norm(moved)) == pytest.approx(0.01, rel=1e-4)
    grads = jax.grad(lambda p: problem.loss(p, batch)[0])(before)
    scale = 0.01 / float(optax.tree.norm(grads))
    close(moved, jax.tree.map(lambda g: scale * np.asarray(g), grads), rtol=1e-6)


@pytest.mark.parametrize("name", ["full", "hybrid_grad_op"])
def test_computing_in_half_precision_keeps_float32_masters(name, devices, problem):
    seen = []

    def loss(params, batch):
        seen.extend(x.dtype for x in jax.tree.leaves((params, batch)))
        return problem.loss(params, batch)

    step = make_step(problem, name, devices[:4], loss=loss, compute_dtype=jnp.bfloat16)
    state, losses = problem.run(step, step.init(problem.params()), problem.batches(20))
    assert set(seen) == {jnp.dtype(jnp.bfloat16)}
    assert {x.dtype for x in jax.tree.leaves((state.params, state.opt_state[0].mu))} == {jnp.dtype(jnp.float32)}
    _, one_device = problem.on_one_device("adam")
    np.testing.assert_allclose(losses, one_device, rtol=0.03)
    # Steps of Adam are 0.01; bfloat16 parameters near 1 could not take steps below 0.004.
    step = make_step(problem, name, devices[:4], optax.sgd(1e-4), compute_dtype=jnp.bfloat16)
    state, _ = problem.run(step, step.init(problem.params()), problem.batches(1))
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - jax.device_get(b)).max()), problem.params(), state.params)
    assert all(0 < size < 1e-3 for size in jax.tree.leaves(moved))


def test_computing_in_half_precision_leaves_labels_and_masks_as_they_are(devices, problem):
    seen = {}

    def loss(params, batch):
        seen.update(jax.tree.map(lambda x: x.dtype.name, batch))
        return jnp.mean(jnp.where(batch["mask"], params[batch["label"]] * batch["x"], 0))

    step = make_step(problem, "full", devices[:2], optax.sgd(0.1), loss, compute_dtype=jnp.bfloat16)
    batch = {"x": np.ones(4, np.float32), "label": np.arange(4, dtype=np.int32), "mask": np.ones(4, bool)}
    step(step.init(jnp.ones(4)), batch)
    assert seen == {"x": "bfloat16", "label": "int32", "mask": "bool"}


@pytest.mark.parametrize("name", ["none", "full"])
def test_computing_in_half_precision_keeps_imaginary_parts(name, devices, problem):
    def loss(params, batch):
        return jnp.mean(jnp.abs(batch["z"][:, None] * params["w"] * params["a"]) ** 2)

    batch, params = {"z": np.full(4, 1 + 2j, np.complex64)}, {"w": np.full(4, 3 - 4j, np.complex64), "a": np.ones(4)}
    step = make_step(problem, name, devices[:2], optax.sgd(0.1), loss, compute_dtype=jnp.bfloat16)
    _, metrics = step(step.init(params), batch)
    assert float(metrics["loss"]) == pytest.approx(5 * 25, rel=1e-5)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_complex_parameters_that_the_loss_does_not_use(name, accumulate, devices, problem):
    """Their gradients are constants; at a sum of such constants over CPU devices XLA aborts the process."""
    params = {"used": jnp.ones(8), "cut": jnp.full((8, 512, 16), 1j), "small": jnp.full(8, 1j), "odd": jnp.full(3, 1j)}

    def loss(params, batch):
        return jnp.mean((batch @ params["used"]) ** 2)

    step = make_step(problem, name, devices[:4], optax.adam(0.1), loss, accumulate=accumulate)
    state, _ = step(step.init(params), np.ones((8, 8), np.float32))
    assert not np.array_equal(state.params["used"], params["used"])
    for unused in ("cut", "small", "odd"):
        np.testing.assert_array_equal(state.params[unused], params[unused])


def drawn_by(problem, name, devices, steps=1, **knobs):
    """Mean and mean square over devices and micro-batches of the numbers a loss function draws in each step."""

    def loss(params, batch, rng):
        drawn = jax.random.uniform(rng)
        return jnp.mean(batch["x"]) * params.sum(), {"mean": drawn, "square": drawn**2}

    step = make_step(problem, name, devices, optax.sgd(0.1), loss, **knobs)
    state, found = step.init(jnp.ones(8)), []
    for batch in problem.batches(steps):
        state, metrics = jax.block_until_ready(step(state, batch))
        found.append((float(metrics["mean"]), float(metrics["square"])))
    return found


def test_numbers_depend_on_the_seed_and_the_micro_batch_alone(devices, problem):
    [first] = drawn_by(problem, "full", devices[:4])
    assert drawn_by(problem, "full", devices[:4]) == [first]
    assert drawn_by(problem, "grad_op", devices[:4]) == [first]
    assert drawn_by(problem, "full", devices[:4], seed=1) != [first]
    assert drawn_by(problem, "full", devices[:4], accumulate=2) != [first]


@pytest.mark.parametrize("name", ONE_OF_EACH_MESH)
def test_numbers_of_the_devices_are_those_of_keys_of_their_own(name, devices, problem):
    """All of them differ, also those of two steps, and of devices at the same place in different nodes."""
    for index, (mean, square) in enumerate(drawn_by(problem, name, devices[:4], steps=2)):
        key = jax.random.fold_in(jax.random.key(0), index)
        wanted = np.array([float(jax.random.uniform(jax.random.fold_in(key, device))) for device in range(4)])
        assert mean == pytest.approx(wanted.mean(), rel=1e-6)
        assert square == pytest.approx((wanted**2).mean(), rel=1e-6)


@pytest.mark.parametrize("name", ONE_OF_EACH_MESH)
def test_model_state_goes_from_micro_batch_to_micro_batch_in_its_own_dtypes(name, devices, problem):
    def loss(params, batch, model_state):
        value, metrics = problem.loss(params, batch)
        seen = model_state["sum"].astype(jnp.float32) + 1
        return value, (metrics, {"sum": seen, "count": model_state["count"] + 1})

    step = make_step(problem, name, devices[:4], loss=loss, accumulate=2)
    model_state = {"sum": jnp.zeros(3, jnp.bfloat16), "count": jnp.int32(0)}
    state = step.init(problem.params(), model_state)
    for batch in problem.batches(2):
        state, _ = jax.block_until_ready(step(state, batch))
    assert int(state.model_state["count"]) == 4
    assert state.model_state["sum"].dtype == jnp.bfloat16
    assert state.model_state["sum"].tolist() == [4.0] * 3


def test_low_precision_model_state_is_averaged_in_float32(devices):
    """The sum is 998, which is 1000 in bfloat16, and a sixth of that is nearer to 167."""

    def loss(params, batch, model_state):
        return jnp.mean(params * batch), ({}, {"seen": batch.mean().astype(jnp.bfloat16)})

    strategy = jaxche.FullShard()
    step = jaxche.sharded_step(loss, optax.sgd(0.1), strategy, strategy.mesh(devices[:6]))
    state = step.init(jnp.ones(6), {"seen": jnp.zeros((), jnp.bfloat16)})
    state, _ = step(state, np.float32([[118], [256], [166], [11], [229], [218]]))
    assert state.model_state["seen"].dtype == jnp.bfloat16
    assert float(state.model_state["seen"]) == 166


@pytest.mark.parametrize("name", ONE_OF_EACH_MESH)
def test_the_optimizer_is_told_the_loss(name, devices, problem):
    def update(updates, state, params=None, *, value, **_):
        return updates, value

    told = optax.GradientTransformationExtraArgs(lambda _: jnp.zeros(()), update)
    step = make_step(problem, name, devices[:4], optax.chain(told, optax.sgd(0.1)))
    state, metrics = step(step.init(problem.params()), problem.batches(1)[0])
    assert float(state.opt_state[0]) == float(metrics["loss"]) > 0


@pytest.mark.parametrize("name", ONE_OF_EACH_MESH)
def test_model_state_is_that_of_the_joined_batch(name, devices, problem):
    """Batch statistics: means over devices, variances by the law of total variance; counters as they are."""

    def loss(params, batch, model_state):
        value, metrics = problem.loss(params, batch)
        mean, var = batch["x"].mean(0), batch["x"].var(0)
        old = model_state["batch_stats"]
        new = {"mean": 0.9 * old["mean"] + 0.1 * mean, "var": 0.9 * old["var"] + 0.1 * var}
        return value, (metrics, {"batch_stats": new, "count": model_state["count"] + 1})

    size = problem.params()["first"]["w"].shape[0]
    model_state = {"batch_stats": {"mean": jnp.zeros(size), "var": jnp.ones(size)}, "count": jnp.int32(0)}
    step = make_step(problem, name, devices[:4], loss=loss)
    [batch] = problem.batches(1)
    state, metrics = step(step.init(problem.params(), model_state), batch)
    assert int(state.model_state["count"]) == 1
    assert set(metrics) == {"loss", "mean"}
    stats = jax.device_get(state.model_state["batch_stats"])
    np.testing.assert_allclose(stats["mean"], 0.1 * batch["x"].mean(0), rtol=1e-5, atol=1e-6)
    # Within devices a tenth of the mean variance, and the variance of the averages that devices kept.
    parts = batch["x"].reshape(4, -1, size)
    expected = 0.9 + 0.1 * parts.var(1).mean(0) + (0.1 * parts.mean(1)).var(0)
    np.testing.assert_allclose(stats["var"], expected, rtol=1e-5)
    assert state.model_state["count"].sharding.is_fully_replicated


@pytest.mark.parametrize("name", ONE_OF_EACH_MESH)
def test_variances_are_right_where_a_step_moves_the_mean_far(name, devices, problem):
    """The second moments of these features have no digits left for their variances."""
    rng = np.random.default_rng(0)
    rows = np.array([255, 1013.25, 1e4]) + np.array([0, 0.1, 1]) * rng.normal(size=(16, 3))
    [batch] = problem.batches(1, rows=16)
    batch = batch | {"features": rows.astype(np.float32)}

    def loss(params, batch, model_state):
        value, metrics = problem.loss(params, batch)
        return value, (metrics, {"mean": batch["features"].mean(0), "var": batch["features"].var(0)})

    step = make_step(problem, name, devices[:4], loss=loss)
    state, _ = step(step.init(problem.params(), {"mean": jnp.zeros(3), "var": jnp.ones(3)}), batch)
    exact = batch["features"].astype(np.float64)
    np.testing.assert_allclose(state.model_state["mean"], exact.mean(0), rtol=1e-6)
    np.testing.assert_allclose(state.model_state["var"], exact.var(0), rtol=1e-3)
    assert (np.asarray(state.model_state["var"]) >= 0).all()


def test_steps_give_their_state_away_but_not_what_init_was_given(devices, problem):
    params, step = problem.params(), make_step(problem, "full", devices[:4])
    state = step.init(params)
    kept = state.params["first"]["w"]
    state, _ = step(state, problem.batches(1)[0])
    assert kept.is_deleted()
    assert not any(x.is_deleted() for x in jax.tree.leaves(params))


def test_a_batch_may_be_placed_already_and_the_mesh_left_out(devices, problem):
    strategy = jaxche.FullShard()
    step = jaxche.sharded_step(problem.loss, optax.sgd(0.1), strategy)
    [batch] = problem.batches(1)
    ends = []
    for given in (batch, jax.device_put(batch, step.layout(problem.params()).batch), jax.device_put(batch, devices[3])):
        state, _ = step(step.init(problem.params()), given)
        ends.append(jax.device_get(state.params))
    chex.assert_trees_all_equal(*ends)


def test_one_program_serves_every_step(devices, problem):
    traces = []

    def loss(params, batch):
        traces.append(1)
        return problem.loss(params, batch)

    step = make_step(problem, "full", devices[:4], loss=loss)
    state, _ = problem.run(step, step.init(problem.params()), problem.batches(1))
    first = len(traces)
    problem.run(step, state, problem.batches(4))
    assert len(traces) == first


def test_parameters_of_python_numbers_take_one_program_too(devices):
    traces = []

    def loss(params, batch, model_state):
        traces.append(1)
        return jnp.mean(batch * params["scale"]), ({}, model_state)

    step = jaxche.sharded_step(loss, optax.adam(0.1), jaxche.NoShard(), jaxche.NoShard().mesh(devices[:2]))
    for params in ({"scale": 0.5}, lambda: {"scale": 0.5}):
        state = step.init(params, lambda: {"seen": 1.0})
        state, _ = step(state, np.ones(2, np.float32))
        first = len(traces)
        step(state, np.ones(2, np.float32))
        assert len(traces) == first


def test_a_loss_may_put_python_numbers_into_the_model_state(devices):
    def loss(params, batch, model_state):
        return jnp.mean(batch * params), ({}, {"rate": 0.5, "seen": 3})

    step = jaxche.sharded_step(loss, optax.sgd(0.1), jaxche.NoShard(), jaxche.NoShard().mesh(devices[:2]))
    state, _ = step(step.init(jnp.ones(()), {"rate": 0.0, "seen": 0}), np.ones(2, np.float32))
    assert jax.tree.map(float, state.model_state) == {"rate": 0.5, "seen": 3.0}


class Transformer(nn.Module):
    """A transformer with a vocabulary that no number of devices divides."""

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(65, 32)
        x = embed(tokens)
        for _ in range(2):
            x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x))
            x = x + nn.Dense(32)(nn.gelu(nn.Dense(128)(nn.LayerNorm()(x))))
        return embed.attend(nn.LayerNorm()(x))


def held(tree):
    """Bytes of a tree on each device, from the arrays that are there."""
    sizes = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            sizes[shard.device] = sizes.get(shard.device, 0) + shard.data.nbytes
    return sizes


@pytest.fixture(scope="module")
def transformer():
    return jax.jit(Transformer().init)(jax.random.key(0), np.zeros((1, 6), np.int32))["params"]


@pytest.mark.parametrize("world", [2, 4, 8])
def test_a_transformer_takes_one_part_in_w_of_each_device(world, devices, problem, transformer):
    step = make_step(problem, "full", devices[:world], optax.adamw(1e-3))
    state = step.init(transformer)
    whole = sum(x.nbytes for x in jax.tree.leaves((state.params, state.opt_state)))
    sizes = held((state.params, state.opt_state))
    assert set(sizes) == set(devices[:world])
    assert all(size == pytest.approx(whole / world, rel=0.03) for size in sizes.values())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [jaxche.FullShard(), jaxche.FullShard(scanned=("layers",))], ids=str)
def test_no_device_ever_holds_a_full_copy_at_the_start(strategy, devices):
    """What the program that makes the first state needs, results and temporaries, is far less than the parameters."""

    def loss(p, x):
        return jnp.mean((x @ p["in"]) ** 2) + sum(w.sum() for w in p["layers"].values())

    def init():
        keys = jax.random.split(jax.random.key(0), 9)
        layers = {f"w{i}": jax.random.normal(keys[i], (256, 256)) / 16 for i in range(8)}
        return {"in": jax.random.normal(keys[8], (256, 256)), "layers": layers}

    step = jaxche.sharded_step(loss, optax.adam(1e-3), strategy, strategy.mesh(devices))
    memory = step._programs_for(init).lower_init(init, lambda: None).compile().memory_analysis()
    whole = 9 * 256 * 256 * 4
    assert memory.argument_size_in_bytes == 0
    assert memory.output_size_in_bytes == pytest.approx(3 * whole / 8, rel=0.01)  # parameters and two moments
    assert memory.temp_size_in_bytes < whole / 4
    assert memory.output_size_in_bytes + memory.temp_size_in_bytes < 0.7 * whole
    state = step.init(init)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), jax.device_get(state.params), init())


@pytest.mark.parametrize("name", ["full", "hybrid_grad_op"])
def test_scanned_layers_train_as_on_one_device(name, devices, problem, close):
    def loss(params, batch):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w) + x, None), batch @ params["in"], params["layers"])
        return jnp.mean(x**2)

    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape) / 3, jnp.float32)

    params, batches = {"in": draw(4, 8), "layers": draw(16, 8, 8)}, [draw(8, 4) for _ in range(5)]
    strategy = dataclasses.replace(problem.strategies[name](4), scanned=("layers",))
    step = jaxche.sharded_step(loss, optax.sgd(0.02), strategy, strategy.mesh(devices[:4]))
    state, losses = problem.run(step, step.init(params), batches)
    if strategy.shards_params:
        assert state.params["layers"].sharding.spec == P(None, "shard")  # and not its largest axis
    expected = []
    for batch in batches:
        value, grads = jax.value_and_grad(loss)(params, batch)
        params = jax.tree.map(lambda p, g: p - 0.02 * g, params, grads)
        expected.append(float(value))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    close(state.params, params, atol=1e-5)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loss_may_ignore_its_batch(name, accumulate, devices, problem, close):
    batch = np.ones((8, 3), np.float32)
    step = make_step(
        problem, name, devices[:4], optax.sgd(0.5), lambda p, x: 0.5 * jnp.sum(p**2), accumulate=accumulate
    )
    state, metrics = step(step.init(jnp.ones(4)), batch)
    close(state.params, np.full(4, 0.5))
    assert float(metrics["loss"]) == 2.0
    assert step.explain(jnp.ones(4), batch).peak > 0


def test_a_step_under_another_mesh_is_refused_with_the_line_to_write(devices):
    strategy = jaxche.FullShard()
    step = jaxche.sharded_step(
        lambda w, x: jnp.mean((x @ w) ** 2), optax.adam(0.1), strategy, strategy.mesh(devices[:2])
    )
    params, batch = jnp.ones((4, 2)), np.ones((4, 4), np.float32)
    state = step.init(params)
    calls = {
        "step": lambda: step(state, batch),
        "step.init": lambda: step.init(params),
        "step.explain": lambda: step.explain(params, batch),
    }
    for own in (devices[2:4], devices[:2], devices[:4]):
        with jax.set_mesh(jax.make_mesh((len(own),), ("data",), devices=own)):
            for name, call in calls.items():
                line = (
                    rf"^{name} was called under jax.set_mesh.*'shard': 2.*write {name}\(\.\.\.\) outside of it, or with"
                )
                with pytest.raises(ValueError, match=line):
                    call()
    with jax.set_mesh(step.mesh):
        with pytest.raises(ValueError, match="state is traced"):
            jax.jit(lambda state: step(state, batch))(state)
        state, _ = step(state, batch)
    assert int(step(state, batch)[0].index) == 2


def test_a_mesh_with_explicit_axes_is_not_that_of_the_step(devices):
    mesh = jax.make_mesh((2,), ("shard",), devices=devices[:2], axis_types=(AxisType.Explicit,))
    step = jaxche.sharded_step(lambda w, x: jnp.mean((x @ w) ** 2), optax.adam(0.1), jaxche.FullShard(), mesh)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"or with jax.set_mesh\(step.mesh\)"):
        step.init(jnp.ones((4, 2)))
    with jax.set_mesh(step.mesh):
        state, _ = step(step.init(jnp.ones((4, 2))), np.ones((4, 4), np.float32))
    assert int(state.index) == 1


def test_variables_of_nnx_that_no_optimizer_trains_are_refused(devices):
    class Net(nnx.Module):
        def __init__(self):
            self.norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
            self.own = nnx.Variable(jnp.zeros(4))

    strategy = jaxche.FullShard()
    step = jaxche.sharded_step(lambda p, x: 0.0, optax.sgd(0.1), strategy, strategy.mesh(devices[:2]))
    for params in (nnx.state(Net()), lambda: nnx.state(Net())):
        with pytest.raises(
            ValueError, match=r"params\['norm'\]\['mean'\] is an nnx.BatchStat.*write.*step.init\(loss.params"
        ):
            step.init(params)
    step.init(nnx.state(Net(), nnx.Not(nnx.BatchStat)))  # other variables may be trained


def test_the_model_state_may_be_made_by_a_function_and_the_parameters_be_arrays(devices):
    def loss_fn(w, x, model_state):
        return jnp.mean((x @ w) ** 2), ({}, model_state)

    strategy = jaxche.FullShard()
    step = jaxche.sharded_step(loss_fn, optax.sgd(0.1), strategy, strategy.mesh(devices[:2]))
    state = step.init(jnp.ones((4, 2)), lambda: {"mean": jnp.arange(3.0)})
    np.testing.assert_array_equal(state.model_state["mean"], [0.0, 1.0, 2.0])
    assert len(state.model_state["mean"].sharding.device_set) == 2
