"""What cannot work is refused by name, with both numbers and the line to write."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

import jaxche
from jaxche.sharding import FullShard, HybridShard, NoShard, ShardGradOp, batch_size, check_params, sharded_step


def loss_fn(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


PARAMS = {"w": np.ones((8, 4), np.float32)}


def make(devices, tx=None, strategy=None, **knobs):
    strategy = strategy or FullShard()
    return sharded_step(loss_fn, tx or optax.sgd(0.1), strategy, strategy.mesh(devices), **knobs)


def test_integers_that_jax_would_cut_are_refused_in_every_step(devices):
    mesh = NoShard().mesh(devices[:1])
    step = sharded_step(lambda w, batch: jnp.mean(batch["n"] * w), optax.sgd(0.1), NoShard(), mesh)
    state, _ = step(step.init(jnp.ones(())), {"n": np.arange(2)})
    with pytest.raises(ValueError, match=r"\['n'\] of a batch has 1099511627776, which becomes 0 in int32"):
        step(state, {"n": np.array([1, 2**40])})


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"loss_fn": 3}, r"loss_fn=3.*write def loss_fn\(params, batch\)"),
        ({"tx": 0.1}, r"tx=0.1 is not an optax.*write e.g. tx=optax.adam"),
        ({"strategy": "full"}, r"strategy='full'.*write e.g. strategy=jaxche.FullShard\(\)"),
        ({"strategy": FullShard}, r"not a sharding strategy"),
        ({"accumulate": 0}, "accumulate=0 must be at least 1; write e.g. accumulate=1"),
        ({"accumulate": True}, "accumulate=True"),
        ({"seed": "a"}, "seed='a' must be a whole number; write e.g. seed=0"),
        (
            {"compute_dtype": "bf16x"},
            "compute_dtype='bf16x' is not a dtype of floats; write compute_dtype=jnp.bfloat16",
        ),
        ({"compute_dtype": jnp.int8}, "compute_dtype=.*int8.* is not a dtype of floats"),
        ({"compute_dtype": 16}, "compute_dtype=16 "),
    ],
)
def test_arguments(arguments, named):
    given = {"loss_fn": loss_fn, "tx": optax.sgd(0.1), "strategy": FullShard()} | arguments
    with pytest.raises(ValueError, match=named):
        sharded_step(**given)


def test_micro_batches_may_be_a_whole_number_of_numpy(devices):
    step = make(devices[:4], accumulate=np.int64(2))
    state = step.init(PARAMS)
    with pytest.raises(ValueError, match=r"12 rows, which 4 devices .* times accumulate=2 do not divide"):
        step(state, np.zeros((12, 8), np.float32))


@pytest.mark.parametrize(
    ("strategy", "axes"), [(FullShard(), ("data",)), (HybridShard(4), ("shard",)), (NoShard(), ("replica", "shard"))]
)
def test_a_mesh_without_the_axes(strategy, axes, devices):
    mesh = jax.sharding.Mesh(np.array(devices).reshape((1,) * (len(axes) - 1) + (-1,)), axes)
    with pytest.raises(ValueError, match=r"the mesh has the axes .* needs .*write mesh = strategy.mesh\(devices\)"):
        sharded_step(loss_fn, optax.sgd(0.1), strategy, mesh)


@pytest.mark.parametrize(
    ("rows", "knobs", "named"),
    [
        (6, {}, r"6 rows, which 4 devices \(4 shard\) do not divide; give all batches 4 rows"),
        (3, {}, "3 rows, which 4 devices .* give all batches 4 rows"),
        (12, {"accumulate": 2}, r"12 rows, which 4 devices \(4 shard\) times accumulate=2 .* batches 8 rows"),
        (6, {"strategy": HybridShard(2)}, r"6 rows, which 4 devices \(2 replica x 2 shard\)"),
    ],
)
def test_a_batch_that_does_not_divide(rows, knobs, named, devices):
    step = make(devices[:4], **knobs)
    for call in (
        lambda batch: step(step.init(PARAMS), batch),
        lambda batch: step.explain(PARAMS, batch),
    ):
        with pytest.raises(ValueError, match=named):
            call(np.ones((rows, 8), np.float32))


@pytest.mark.parametrize(("size", "examples"), [(6, 26), (3, 9), (10, 20)])
def test_the_line_that_is_told_makes_batches_that_divide(size, examples, devices):
    step = make(devices[:4])
    arrays = np.ones((examples, 8), np.float32)
    data = jaxche.Batches(arrays, batch_size=size)
    with pytest.raises(ValueError, match="do not divide") as refused:
        step.explain(PARAMS, data[0])
    line = re.search(r"e\.g\. (jaxche\.Batches.*)$", str(refused.value))[1]
    better = eval(line, {"jaxche": jaxche, "jax": jax, "arrays": arrays})
    assert len(better) > 0
    state = step.init(PARAMS)
    for i in range(len(better)):
        state, _ = jax.block_until_ready(step(state, better[i]))


def test_a_state_that_a_step_has_taken(devices):
    """XLA would end the process."""
    step, batch = make(devices[:4]), np.ones((4, 8), np.float32)
    state = step.init(PARAMS)
    jax.block_until_ready(step(state, batch))
    with pytest.raises(
        ValueError, match=r"state\.params\['w'\] was deleted.*write state, metrics = step\(state, batch"
    ):
        step(state, batch)
    with pytest.raises(ValueError, match=r"params\['w'\] was deleted.*give step.init the parameters of the last state"):
        step.init(state.params)


@pytest.mark.parametrize("strategy", [NoShard(), FullShard()], ids=str)
def test_a_step_within_another_program(strategy, devices):
    step, batch = make(devices[:2], strategy=strategy), np.ones((4, 8), np.float32)
    for run in (jax.jit(step), lambda state, batch: jax.lax.scan(lambda s, _: step(s, batch), state, None, length=2)):
        with pytest.raises(ValueError, match=r"state is traced: .*write for batch in data: state, metrics = step"):
            run(step.init(PARAMS), batch)


@pytest.mark.parametrize("state", [PARAMS, (PARAMS, ()), None])
def test_a_value_that_is_no_state(state, devices):
    with pytest.raises(ValueError, match=r"^state is .*, not the state of a sharded step; write state = step.init"):
        make(devices[:2])(state, np.ones((4, 8), np.float32))


def test_parameters_on_another_mesh(devices):
    elsewhere = make(devices[4:]).init(PARAMS).params
    with pytest.raises(ValueError, match=r"\['w'\] is on a mesh of 4 .*one of 2.*init\(jax.device_get\(params\)\)"):
        make(devices[:2]).init(elsewhere)


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"m": nn.Dense(2)}, r"\['m'\] is a function, Dense.*parameters are arrays alone"),
        ({"name": "dense"}, r"\['name'\] is 'dense', not an array; leave it out of params, and close over it"),
        ({}, "params has no arrays"),
        ({"n": np.arange(3)}, r"\['n'\] is int.*move it into step.init"),
    ],
)
def test_parameters_without_a_gradient(params, named, devices):
    with pytest.raises(ValueError, match=named):
        make(devices[:2]).init(params)


def test_a_type_error_of_a_function_that_makes_parameters_stays_as_it_is(devices):
    with pytest.raises(TypeError, match="Shapes must be 1D sequences"):
        make(devices[:2]).init(lambda: {"w": jnp.ones("wide")})


@pytest.mark.parametrize("names", [("in", "out"), ("shard", None), (None, "shard")])
def test_parameters_in_boxes_with_axes_of_another_mesh(names, devices):
    model = nn.Dense(4, kernel_init=nn.with_partitioning(nn.initializers.ones, names))
    params = model.init(jax.random.key(0), np.ones((1, 8)))["params"]
    mesh = FullShard().mesh(devices[:2])
    step = sharded_step(lambda p, x: jnp.mean(model.apply({"params": p}, x)), optax.sgd(0.1), FullShard(), mesh)
    batch = np.ones((2, 8), np.float32)
    with pytest.raises(ValueError, match=r"over the axis '(in|shard)' of a mesh of its own.*nn.meta.unbox\(variables"):
        step(step.init(params), batch)
    step(step.init(nn.meta.unbox(params)), batch)


def test_float_parameters_of_any_precision_pass():
    check_params({"w": np.ones(2, np.float16), "c": np.ones(2, np.complex64)}, "step.init")


def test_the_call_that_is_told_is_the_one_that_was_made():
    with pytest.raises(ValueError, match=r"\['n'\] is int64.*move it into trainer.init\(params, model_state"):
        check_params({"n": np.arange(3)}, "trainer.init")


SAM = optax.contrib.sam(optax.sgd(1.0), optax.sgd(1.0))
OPAQUE = optax.contrib.sam(optax.sgd(1.0), optax.sgd(1.0), opaque_mode=True)


@pytest.mark.parametrize(
    ("tx", "message"),
    [
        (optax.lbfgs(), r"value_fn=.*; write optax\.lbfgs\(0\.1, linesearch=None\)"),
        (SAM, r"makes no update from gradients, .*'value'; write e\.g\. tx=optax\.GradientTransformation\(tx\.init"),
        (OPAQUE, r"makes no update from gradients, .*; write e\.g\. optax\.contrib\.sam without opaque_mode=True"),
    ],
)
def test_an_optimizer_that_needs_other_arguments(tx, message, devices):
    with pytest.raises(ValueError, match=f"tx .*{message}"):
        make(devices[:2], tx).init(PARAMS)


def test_a_state_of_another_optimizer(devices):
    state = make(devices[:4], optax.adam(0.1)).init(PARAMS)
    with pytest.raises(ValueError, match=r"opt_state has 3 arrays .* this step's tx has 1 .*write state = step.init"):
        make(devices[:4], optax.sgd(0.1, momentum=0.9))(state, np.ones((4, 8), np.float32))


def test_a_state_of_other_parameters(devices):
    step = make(devices[:4], optax.adam(0.1))
    state, other = step.init(PARAMS), step.init({"w": np.ones((8, 8), np.float32)})
    with pytest.raises(ValueError, match=r"opt_state.*has the shape \(8, 8\), .* it must be \(8, 4\); write state"):
        step(state._replace(opt_state=other.opt_state), np.ones((4, 8), np.float32))


def test_a_state_of_another_mesh_and_of_another_layout(devices):
    batch = np.ones((4, 8), np.float32)
    with pytest.raises(ValueError, match=r"state.params\['w'\] is on a mesh of 2 devices.* one of 4"):
        make(devices[:4])(make(devices[:2]).init(PARAMS), batch)
    with pytest.raises(ValueError, match=r"sharded as .*FullShard\(\) shards .*'shard'.*write state = jax.device_put"):
        make(devices[:4])(make(devices[:4], strategy=ShardGradOp()).init(PARAMS), batch)
    step = make(devices[:4])
    jax.block_until_ready(step(step.init(PARAMS), batch))
    with pytest.raises(ValueError, match=r"sharded as .*write state = jax.device_put"):  # also after one that was right
        step(make(devices[:4], strategy=ShardGradOp()).init(PARAMS), batch)


def test_the_line_that_is_told_puts_a_state_right(devices):
    step = make(devices[:4], optax.adam(0.1))
    state = make(devices[:4], optax.adam(0.1), ShardGradOp()).init(PARAMS)
    state = jax.device_put(state, jax.tree.map(lambda x: x.sharding, step.abstract_state(state.params)))
    state, metrics = step(state, np.ones((4, 8), np.float32))
    assert np.isfinite(float(metrics["loss"]))


def test_the_line_that_is_told_puts_a_state_with_model_state_right(devices):
    def loss(params, x, model_state):
        return loss_fn(params, x), ({}, {"seen": model_state["seen"] + 1.0})

    strategy = FullShard()
    step = sharded_step(loss, optax.adam(0.1), strategy, strategy.mesh(devices[:4]))
    state, batch = jax.device_get(step.init(PARAMS, {"seen": np.zeros(2, np.float32)})), np.ones((4, 8), np.float32)
    with pytest.raises(ValueError, match="write state = ") as refused:
        step(state, batch)
    state = eval(str(refused.value).partition("write state = ")[2], {"jax": jax, "step": step, "state": state})
    state, _ = step(state, batch)
    assert state.model_state["seen"].tolist() == [1.0, 1.0]


def test_the_line_that_is_told_begins_with_the_moments_of_a_train_state(devices):
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=optax.adam(0.1))
    state, batch = state.apply_gradients(grads=PARAMS), np.ones((4, 8), np.float32)
    step = make(devices[:4], state.tx)
    with pytest.raises(ValueError, match=r"params is a TrainState; write step\.init\(state\.params\), and") as refused:
        step.init(state)
    line = str(refused.value).partition("with its moments ")[2].replace("(...)", "(state.params)")
    after, _ = step(eval(line, {"jax": jax, "step": step, "state": state}), batch)
    assert int(after.opt_state[0].count) == 2


def test_an_nnx_model_gets_the_lines_of_the_call_that_was_made():
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    for init, made in (("step.init", "jaxche.sharded_step(loss, tx, strategy)"), ("trainer.init", "jaxche.Trainer(")):
        with pytest.raises(ValueError, match=f"params is an nnx model, .*{re.escape(made)}.* and {init}") as refused:
            check_params(model, init)
        assert ("Trainer" in str(refused.value)) == (init == "trainer.init")


def test_a_whole_dict_of_variables_is_refused(devices):
    strategy = jaxche.FullShard()
    step = jaxche.sharded_step(lambda p, x: 0.0, optax.sgd(0.1), strategy, strategy.mesh(devices[:2]))
    variables = {"params": {"w": np.ones(2, np.float32)}, "batch_stats": {"mean": np.ones(2, np.float32)}}
    for given in (variables, lambda: variables):
        with pytest.raises(ValueError, match=r"step\.init\(variables\[.params.\], variables\[.batch_stats.\]\)"):
            step.init(given)


@pytest.mark.parametrize("name", ["params", "cache"])
def test_arrays_named_like_collections_are_parameters(devices, name):
    strategy = jaxche.FullShard()
    step = jaxche.sharded_step(lambda p, x: 0.0, optax.sgd(0.1), strategy, strategy.mesh(devices[:2]))
    params = {"params": {"w": np.ones(2, np.float32)}, "cache": {"w": np.ones(2, np.float32)}}
    params[name] = np.ones(2, np.float32)
    assert step.init(params).params[name].shape == (2,)


@dataclasses.dataclass
class Unregistered:
    x: np.ndarray


@pytest.mark.parametrize(
    ("x", "named"),
    [
        ([1, 2, 3], r"^\['x'\] is a list of numbers.*np\.asarray\(x\)"),
        ([[1], [2, 3]], r"^\['x'\]\[0\] is a list of numbers.*pad"),
        (3, r"^\['x'\] is a scalar"),
        (np.zeros(3, [("a", "f4"), ("b", "i4")]), r"\['x'\] of a batch is an array with the fields 'a', 'b'; write"),
        (np.zeros(3, ">f4"), r"is >f4, in the byte order of other machines; write x\.astype"),
        (np.ma.masked_array([1.0, 2.0, 3.0], [0, 1, 0]), r"is a masked array; write x\.filled\(0\)"),
        (Unregistered(np.zeros(3)), r"a dataclass that JAX does not know; write .*register_dataclass\(Unregistered\)"),
    ],
)
def test_batches_that_are_not_plain_arrays_get_the_line_that_makes_them_so(x, named):
    with pytest.raises(ValueError, match=named):
        batch_size({"x": x, "y": np.zeros(3, np.float32)})


def test_a_batch_without_keys_is_named():
    with pytest.raises(ValueError, match=r"^a batch is an array with the fields 'a'"):
        batch_size(np.zeros(3, [("a", "f4")]))


def test_a_batch_of_one_key_gets_the_line_to_write():
    with pytest.raises(ValueError, match=r"batch is a scalar, .*; write jax.random.split\(key, n\), .* or key\[None\]"):
        batch_size(jax.random.key(0))
    assert batch_size(jax.random.key(0)[None]) == 1


@pytest.mark.parametrize("kind", [lambda x: (x for _ in range(2)), lambda x: jaxche.Batches(x, 4)])
def test_a_mask_is_not_lost(kind, devices):
    trainer = jaxche.Trainer(loss_fn, optax.sgd(0.1), replicas=devices[:1])
    data = kind(np.ma.masked_array(np.ones((4, 8), np.float32), mask=True))
    with pytest.raises(ValueError, match="a batch is a masked array"):
        trainer.fit(trainer.init(PARAMS), data, progress=False)
