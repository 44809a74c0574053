"""What a partitioned model refuses, keeps and recomputes; parity with the whole model is in test_parity."""

import operator
import threading
import traceback
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import jaxche
from jaxche.stages import SCHEDULES, Tag, WireClosedError, _runner, simulate_schedule
from jaxche.stages._direct import LocalWire
from jaxche.stages._stage import Stage, stage_key


def mean(y, batch):
    return y.mean()


def multiply(params, x):
    return x * params


@pytest.mark.parametrize("numbers", [jnp.array([1, 2, 3]), np.array([1.0, 2.0, 3.0])], ids=["int", "float"])
@pytest.mark.parametrize("protocol", [jaxche.Direct(), jaxche.Pipeline(micro_batch_size=1)], ids=["direct", "pipeline"])
def test_double_then_add_ten(protocol, numbers):
    stages = [lambda params, batch: 2 * batch, lambda params, x: x + 10]
    model = jaxche.Partitioned(stages, lambda y, batch: jnp.mean(y * y - batch), protocol)
    y = model.apply([{}, {}], numbers)
    assert y.tolist() == [12, 14, 16]
    assert y.devices() == {model.devices[1]}
    loss, grads = model.value_and_grad([{}, {}], numbers)
    assert float(loss) == pytest.approx(((144 - 1) + (196 - 2) + (256 - 3)) / 3)
    assert grads == ({}, {})


def test_integers_that_jax_would_cut_are_refused_in_every_batch():
    model = jaxche.Partitioned([lambda params, batch: 1.0 * batch], mean, jaxche.Direct())
    for call in (model.apply, model.value_and_grad):
        call([{}], np.arange(2))
        with pytest.raises(ValueError, match="the array of a batch has 1099511627776, which becomes 0 in int32"):
            call([{}], np.array([1, 2**40]))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_activations_kept_are_those_the_schedule_promises(schedule, micro_batch_size, make_model):
    model = make_model("plain", 3)
    partitioned = jaxche.Partitioned(model.stages, model.loss, jaxche.Pipeline(micro_batch_size, schedule))
    partitioned.value_and_grad(model.params, model.batch)
    tasks = SCHEDULES[schedule](3, 12 // micro_batch_size)
    assert partitioned.peak_activations == simulate_schedule(tasks, [1] * 3, [1] * 3).peak


@pytest.mark.parametrize(
    "tx",
    [
        optax.polyak_sgd(),
        optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1, rtol=1.0)),
        optax.MultiSteps(optax.polyak_sgd(), 2),
    ],
    ids=["polyak", "plateau", "accumulates"],
)
def test_the_optimizer_of_each_stage_gets_the_loss_of_the_batch(tx, make_model, twin, close):
    model = make_model("plain", 2)
    partitioned = jaxche.Partitioned(model.stages, model.loss, jaxche.Pipeline(micro_batch_size=4))
    state, params = partitioned.init(model.params, tx), model.params
    opt_states = [tx.init(tree) for tree in params]
    for _ in range(4):
        state, loss = partitioned.step(state, model.batch)
        value, grads = twin(model, params, model.batch)
        close(loss, value)
        for i, grad in enumerate(grads):
            updates, opt_states[i] = tx.update(grad, opt_states[i], params[i], value=value)
            params = [*params[:i], optax.apply_updates(params[i], updates), *params[i + 1 :]]
    close(list(state.params), params)


def test_explain_says_how_a_batch_is_cut(make_model):
    model = make_model("plain", 3)
    for protocol, text in [
        (jaxche.Pipeline(3), "3 stages, 4 micro-batches of 3, 1f1b"),
        (jaxche.Pipeline(12), "3 stages, 1 micro-batch"),
        (jaxche.Direct(), "3 stages, 1 micro-batch"),
    ]:
        partitioned = jaxche.Partitioned(model.stages, model.loss, protocol)
        assert partitioned.explain(model.params, model.batch) == text
        assert partitioned.explain(*jax.eval_shape(lambda m=model: (m.params, m.batch))) == text


def test_shapes_compile_the_programs_of_the_arrays_and_are_refused_in_their_place(make_model, close, twin):
    model = make_model("plain", 2)
    partitioned = jaxche.Partitioned(model.stages, model.loss, jaxche.Pipeline(4))
    params, batch = jax.eval_shape(lambda: (model.params, model.batch))
    partitioned.compile(params, batch)
    loss, _ = partitioned.value_and_grad(model.params, model.batch)
    close(loss, twin(model, model.params, model.batch)[0])
    assert len(partitioned._plans) == 1
    given = r"is the shape .* without values; give arrays"
    with pytest.raises(ValueError, match=rf"params\[0\]\[.* {given}"):
        partitioned.init(params, optax.sgd(0.1))
    with pytest.raises(ValueError, match=rf"params\[0\]\[.* {given}"):
        partitioned.value_and_grad(params, model.batch)
    with pytest.raises(ValueError, match=rf"params\[0\]\[.* {given}"):
        partitioned.apply(params, model.batch)
    for call in (partitioned.value_and_grad, partitioned.apply):
        with pytest.raises(ValueError, match=rf"batch\[.* {given}"):
            call(model.params, batch)


def test_schedules_give_the_same_gradients_bit_for_bit(make_model, same):
    model = make_model("dropout", 3)
    results = [
        jaxche.Partitioned(model.stages, model.loss, jaxche.Pipeline(2, schedule)).value_and_grad(
            model.params, model.batch
        )
        for schedule in ("1f1b", "gpipe")
    ]
    same(*results)


def test_a_stage_keeps_no_copy_of_what_is_there_already():
    def stage(w, x):
        return jnp.exp(x @ w)  # differentiated by its input, its output and its parameters: nothing else is kept

    x, params = jnp.ones((12, 6)), [jnp.eye(6) / 10] * 3
    partitioned = jaxche.Partitioned([stage] * 3, lambda y, x: y.mean(), jaxche.Direct(), remat=[False, False, True])
    partitioned.value_and_grad(params, x)
    (plan,) = partitioned._plans.values()
    params = [jax.device_put(w, device) for w, device in zip(params, partitioned.devices, strict=True)]
    x = jax.device_put(x, partitioned.devices[1])
    out, kept = plan.programs[1].forward(params[1], x, None, 0, 0)
    assert kept.x is x
    assert kept.out is out
    assert kept.residuals == []
    x = jax.device_put(x, partitioned.devices[2])
    _, kept = plan.programs[2].forward(params[2], x, x, 0, 0)
    assert kept.x is x
    assert (kept.out, kept.residuals) == (None, [])


def test_a_stage_that_recomputes_keeps_only_its_input():
    def stage(w, x):
        return {"h": jnp.tanh(jnp.tanh(x["h"] @ w) * x["mask"][:, None]), "mask": x["mask"]}  # the mask is in both

    batch, params = {"h": jnp.ones((12, 6)), "mask": jnp.ones(12, bool)}, [jnp.eye(6)] * 3
    protocol = jaxche.Pipeline(micro_batch_size=3)
    model = jaxche.Partitioned([stage] * 3, lambda y, x: y["h"].mean(), protocol, remat=True)
    model.value_and_grad(params, batch)
    (plan,) = model._plans.values()
    saved = [
        program.forward(
            jax.device_put(params[0], device),
            None if program.is_first else jax.device_put(jax.tree.map(lambda leaf: leaf[:3], batch), device),
            None if stage == 1 else jax.device_put(batch, device),
            *(0, 0),
        )[1]
        for (stage, program), device in zip(plan.programs.items(), model.devices, strict=True)
    ]
    assert [kept.x is not None for kept in saved] == [False, True, True]
    assert all((kept.out, kept.residuals) == (None, []) for kept in saved)


def test_each_step_and_seed_draws_its_own_dropout(make_model):
    model = make_model("dropout", 2)

    def make(seed):
        return jaxche.Partitioned(model.stages, model.loss, jaxche.Pipeline(6), seed=seed)

    first, second = make(0), make(1)
    losses = [float(first.value_and_grad(model.params, model.batch)[0]) for _ in range(3)]
    again = [float(first.value_and_grad(model.params, model.batch, step=step)[0]) for step in (2, 0, 1)]
    assert again == [losses[2], losses[0], losses[1]]
    other = float(second.value_and_grad(model.params, model.batch, step=0)[0])
    assert len({*losses, other}) == 4


def test_low_precision_gradients_are_summed_in_float32():
    steps = np.array([1.0] + [2.0**-9] * 256, np.float32)
    model = jaxche.Partitioned(
        [lambda params, batch: batch * params, lambda params, x: x * params],
        lambda y, batch: y.astype(jnp.float32).sum() * len(steps) / y.size,
        jaxche.Pipeline(1),
    )
    params = [jnp.bfloat16(1), jnp.bfloat16(1)]
    _, grads = model.value_and_grad(params, steps.astype(jnp.bfloat16))
    # Adding one small number after the other to 1 in bfloat16 would leave it at 1.
    assert [g.dtype for g in grads] == [jnp.bfloat16] * 2
    assert [float(g) for g in grads] == [1.5, 1.5]


def test_several_stages_on_one_device(make_model, first_twin, close, devices):
    model = make_model("trees", 3)
    partitioned = jaxche.Partitioned(model.stages, model.loss, jaxche.Pipeline(4), devices=devices[:1] * 3)
    loss, grads = partitioned.value_and_grad(model.params, model.batch)
    wanted, wanted_grads = first_twin(model, 1, 5)
    close(loss, wanted)
    close(list(grads), wanted_grads)


@pytest.mark.slow
def test_flax_modules_are_stages(close):
    class Hidden(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dropout(0.5, deterministic=False)(linen.relu(linen.Dense(6)(x)))

    class Output(nnx.Module):
        def __init__(self, rngs):
            self.dense, self.norm = nnx.Linear(6, 2, rngs=rngs), nnx.LayerNorm(6, rngs=rngs)

        def __call__(self, x):
            return self.dense(self.norm(x))

    hidden, rng = Hidden(), np.random.default_rng(0)
    graph, start = nnx.split(Output(nnx.Rngs(0)))

    def first(params, batch, rng):
        return hidden.apply({"params": params}, batch["x"], rngs={"dropout": rng})

    def last(params, x):
        return nnx.merge(graph, params)(x)

    def loss(y, batch):
        return jnp.mean((y - batch["y"]) ** 2)

    batch = {"x": rng.normal(size=(8, 3)).astype(np.float32), "y": rng.normal(size=(8, 2)).astype(np.float32)}
    variables = hidden.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, batch["x"])
    params = [variables["params"], start]

    def whole(params):
        losses = []
        for micro in range(4):
            part = jax.tree.map(lambda x, m=micro: x[2 * m : 2 * m + 2], batch)
            losses.append(loss(last(params[1], first(params[0], part, stage_key(0, 3, 0, micro))), part))
        return sum(losses) / 4

    wanted = jax.value_and_grad(whole)(params)
    model = jaxche.Partitioned([first, last], loss, jaxche.Pipeline(micro_batch_size=2))
    value, grads = model.value_and_grad(params, batch, step=3)
    close((value, list(grads)), wanted)


def test_what_goes_between_devices_does_not_pass_the_host(make_model, devices, monkeypatch):
    model = make_model("plain", 3)
    partitioned = jaxche.Partitioned(model.stages, model.loss, jaxche.Direct())
    params = [jax.device_put(p, d) for p, d in zip(model.params, devices, strict=False)]
    batch = jax.device_put(model.batch, devices[0])
    partitioned.value_and_grad(params, batch)
    sent, put = [], []
    send, device_put = LocalWire.send, jax.device_put
    monkeypatch.setattr(LocalWire, "send", lambda wire, tag, tree: (sent.append((tag, tree)), send(wire, tag, tree)))
    monkeypatch.setattr(jax, "device_put", lambda tree, device: (put.append(tree), device_put(tree, device))[1])
    partitioned.value_and_grad(params, batch)
    # Whatever is put on a device comes from one, and what is sent is still where it was computed.
    assert {type(leaf) for leaf in jax.tree.leaves(put)} == {type(params[0]["w"])}
    assert [(tag.direction, tag.stage) for tag, _ in sent] == [
        *(("forward", 0), ("forward", 1)),
        *(("backward", 2), ("backward", 1)),
    ]
    for tag, tree in sent:
        assert all(leaf.devices() == {devices[tag.stage]} for leaf in jax.tree.leaves(tree))


def test_one_stage(make_model, close, twin):
    model = make_model("plain", 2)

    def whole(params, batch):
        return model.stages[1](params[1], model.stages[0](params[0], batch))

    partitioned = jaxche.Partitioned([whole], model.loss, jaxche.Pipeline(4))
    loss, (grads,) = partitioned.value_and_grad([model.params], model.batch)
    wanted, wanted_grads = twin(model, model.params, model.batch)
    close(loss, wanted)
    close(grads, wanted_grads)


def test_new_shapes_are_compiled_once(make_model):
    model = make_model("plain", 2)
    partitioned = jaxche.Partitioned(model.stages, model.loss, jaxche.Pipeline(3))
    for size in (12, 6, 12, 6):
        partitioned.value_and_grad(model.params, jax.tree.map(operator.itemgetter(slice(size)), model.batch))
    assert len(partitioned._plans) == 2
    halves = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == np.float32 else x, model.batch)
    loss, _ = partitioned.value_and_grad(model.params, halves)
    assert float(loss) == pytest.approx(float(partitioned.value_and_grad(model.params, model.batch)[0]), rel=0.05)
    assert len(partitioned._plans) == 3


ARGUMENTS = {
    r"stages=\[\] is no list of functions": {"stages": []},
    r"stages=<function multiply> is no list of functions; write e.g. stages=\[f0, f1\]": {"stages": multiply},
    r"stages\[1\]=3 is not a function": {"stages": [multiply, 3]},
    r"stages\[1\] is a module of linen.*write lambda params, x: module\.apply": {"stages": [multiply, linen.Dense(1)]},
    r"stages\[0\] is a module of nnx.*nnx\.merge\(graph, params, rest, copy=True\)": {
        "stages": [nnx.Linear(1, 1, rngs=nnx.Rngs(0)), multiply]
    },
    "loss='mse' is not a function": {"loss": "mse"},
    r"protocol=<class 'jaxche.*Direct'> is not a protocol; write protocol=jaxche.Direct\(\)": {
        "protocol": jaxche.Direct
    },
    "protocol='direct' is not a protocol": {"protocol": "direct"},
    "remat=1 must be one bool, or 2": {"remat": 1},
    r"remat=\[True\] must be one bool, or 2": {"remat": [True]},
    r"local_stages=\[2\] must be different numbers from 0 to 1": {"local_stages": [2]},
    r"local_stages=\['0'\] must be different numbers": {"local_stages": "0"},
    "paces=3 for 2 stages": {"paces": 3},
    r"paces=\['a', 'b'\] for 2 stages": {"paces": ["a", "b"]},
    "seed='a' must be a whole number": {"seed": "a"},
    "devices=2 must be devices": {"devices": 2},
    r"local_stages=\[0\] leaves stages \[1\] to other processes, but this one is on its own": {"local_stages": [0]},
    "devices=.* must be devices": {"devices": ["cpu", "gpu"]},
    "9 stages need 9 devices, but there are 8; to put several stages on one": {"stages": [multiply] * 9},
}


@pytest.mark.parametrize("message", ARGUMENTS)
def test_refused_arguments(message):
    arguments = {"stages": [multiply, multiply], "loss": mean, "protocol": jaxche.Direct()} | ARGUMENTS[message]
    with pytest.raises(ValueError, match=message):
        jaxche.Partitioned(**arguments)


def test_fewer_devices_than_stages(devices):
    with pytest.raises(ValueError, match="3 stages need 3 devices, but there are 2"):
        jaxche.Partitioned([multiply] * 3, mean, jaxche.Direct(), devices=devices[:2])
    with pytest.raises(ValueError, match="2 stages need 2 devices, but there is 1"):
        jaxche.Partitioned([multiply] * 2, mean, jaxche.Direct(), devices=devices[:1])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jaxche.Pipeline(0), "micro_batch_size=0 must be at least 1; write e.g. micro_batch_size=8"),
        (lambda: jaxche.Pipeline(2.0), "micro_batch_size=2.0 must be a whole number"),
        (lambda: jaxche.Pipeline(2, "zigzag"), "schedule='zigzag' is unknown; write one of '1f1b', 'gpipe'"),
        (lambda: jaxche.Pipeline(2, timeout_s=0), "timeout_s=0 must be positive"),
        (lambda: jaxche.Direct(timeout_s=-1), "timeout_s=-1 must be positive"),
        (lambda: jaxche.Direct(timeout_s=float("inf")), "timeout_s=inf must be positive seconds; write timeout_s=600"),
    ],
)
def test_refused_protocols(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_micro_batch_size_may_be_a_whole_number_of_numpy():
    assert repr(jaxche.Pipeline(np.int64(8))) == repr(jaxche.Pipeline(8))


def test_refused_calls(make_model):
    model = make_model("trees", 3)
    partitioned = jaxche.Partitioned(model.stages, model.loss, jaxche.Pipeline(5))
    call = partitioned.value_and_grad
    with pytest.raises(ValueError, match=r"micro_batch_size=5 does not divide the batch of 12 .*micro_batch_size=4"):
        call(model.params, model.batch)
    with pytest.raises(ValueError, match="params: 2 entries for 3 stages"):
        call(model.params[:2], model.batch)
    with pytest.raises(ValueError, match=r"params\[2\]\['n'\] is int32, not float"):
        call([*model.params[:2], {"n": jnp.arange(3)}], model.batch)
    for leaf, shown in (("name", "'name'"), (jnp.tanh, "<.* tanh>"), (linen.Dense(2), "Dense")):
        with pytest.raises(ValueError, match=rf"params\[2\]\['n'\] is {shown}.*, not an array; keep it in the stage"):
            call([*model.params[:2], {"n": leaf}], model.batch)
    with pytest.raises(ValueError, match="the leading axes of a batch differ"):
        call(model.params, model.batch | {"y": model.batch["y"][:3]})
    direct = jaxche.Partitioned(model.stages, model.loss, jaxche.Direct())
    for one in (direct, partitioned):
        with pytest.raises(ValueError, match=r"no examples .* leave empty batches out of the data"):
            one.value_and_grad(model.params, jax.tree.map(lambda x: x[:0], model.batch))
    for traced in (jax.jit(call), jax.grad(lambda params, batch: call(params, batch)[0])):
        with pytest.raises(ValueError, match=r"traced.*write loss, grads = model.value_and_grad\(params, batch\)"):
            traced(model.params, model.batch)
    with pytest.raises(ValueError, match="step before init"):
        partitioned.step((0, model.params, ()), model.batch)
    with pytest.raises(ValueError, match=r"tx=0\.1 is not an optax transformation"):
        partitioned.init(model.params, 0.1)
    with pytest.raises(ValueError, match=r"value_fn=.*write optax\.lbfgs\(0\.1, linesearch=None\)"):
        partitioned.init(model.params, optax.lbfgs())
    sam = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1), opaque_mode=True)
    with pytest.raises(ValueError, match=r"'value'; write e.g. optax.contrib.sam without opaque_mode=True"):
        partitioned.init(model.params, sam)
    other = partitioned.init(model.params, optax.adam(0.1))
    partitioned.init(model.params, optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"state\.opt_state\[0\] is .*Adam.*, but the tx given to init last has"):
        partitioned.step(other, model.batch)
    with pytest.raises(
        ValueError, match=r"^state is \[.*, not the state of a partitioned model; write state = model.init"
    ):
        partitioned.step(model.params, model.batch)


@pytest.mark.parametrize(
    "restore",
    [
        lambda state: jax.tree.map(np.asarray, state),
        lambda state: jax.tree.map(jnp.asarray, state),
        lambda state: jax.device_put(state, jax.devices()[0]),
    ],
    ids=["numpy", "jax", "one device"],
)
def test_a_state_that_was_restored_as_arrays(restore, make_model, same):
    model = make_model("trees", 3)
    partitioned = jaxche.Partitioned(model.stages, model.loss, jaxche.Direct())
    state = partitioned.init(model.params, optax.adam(0.1))
    state, _ = partitioned.step(state, model.batch)
    wanted, _ = partitioned.step(state, model.batch)
    found, _ = partitioned.step(restore(state), model.batch)
    assert found.step == wanted.step == 2
    same(found.params, wanted.params)


@pytest.mark.parametrize("name", ["init", "value_and_grad", "step", "compile", "explain", "trace", "apply"])
def test_errors_of_all_calls_end_in_the_line_of_the_call(name, make_model):
    model = make_model()
    call = getattr(jaxche.Partitioned(model.stages, model.loss, jaxche.Direct()), name)
    with pytest.raises(ValueError, match=r"stage|tx=|init") as error:
        call([3], {})
    assert traceback.extract_tb(error.value.__traceback__)[-1].filename == __file__


@pytest.mark.parametrize("protocol", [jaxche.Direct(), jaxche.Pipeline(1)], ids=["direct", "pipeline"])
@pytest.mark.parametrize("text", ["abc", np.array(["a", "b"])])
def test_text_in_a_batch_is_refused(protocol, text):
    model = jaxche.Partitioned([lambda p, batch: batch["x"] * p, multiply], mean, protocol)
    for call in (model.value_and_grad, model.apply):
        with pytest.raises(ValueError, match=r"\['s'\] of a batch is .*text or objects and not numbers"):
            call([1.0, 2.0], {"x": jnp.ones(2), "s": text})


def test_a_stage_that_does_not_fit_is_named_with_shapes(make_model):
    model = make_model("trees", 3)

    def other(params, x):
        return x["hidden"]

    def make(stages, loss):
        return jaxche.Partitioned(stages, loss, jaxche.Direct())

    begin, go_on, _ = model.stages
    structure = (
        r"stage 2 \(other\) does not accept what stage 1 gives: \['h'\] float32\[12, 6\], \['mask'\] bool\[12\], "
    )
    with pytest.raises(ValueError, match=structure + r".*It raised KeyError: 'hidden'"):
        make([begin, go_on, other], model.loss).value_and_grad(model.params, model.batch)
    params = [model.params[0], {"w": jnp.ones((5, 6)), "b": jnp.ones(6)}, model.params[2]]
    both = make(model.stages, model.loss)
    for call in (both.value_and_grad, both.apply):
        with pytest.raises(ValueError, match=r"stage 1 \(go_on\) does not accept what stage 0 gives: .*\[12, 6\]"):
            call(params, model.batch)
    with pytest.raises(ValueError, match=r"stage 0 \(begin\) does not accept the batch: \['x'\] float32\[12, 5\]"):
        make(model.stages, model.loss).value_and_grad(model.params, {"x": model.batch["x"]})
    with pytest.raises(ValueError, match=r"loss does not accept what the last stage gives: .*AttributeError"):
        make(model.stages, lambda y, batch: y.mean()).value_and_grad(model.params, model.batch)
    with pytest.raises(ValueError, match=r"loss returned shape \(12, 2\) and dtype float32; it must be one float"):
        make(model.stages, lambda y, batch: y["h"]).value_and_grad(model.params, model.batch)


class Broken(LocalWire):
    """A wire that fails in mid-step, as often as it is told."""

    def __init__(self, devices, faults):
        super().__init__(devices)
        self._faults = faults

    def send(self, tag, tree):
        if tag.direction == "backward" and tag.micro == 2 and self._faults:
            self._faults.pop()
            raise OSError("the cable is cut")
        super().send(tag, tree)


def test_an_error_in_mid_step_wakes_all_stages_and_leaves_the_state(make_model, same):
    model = make_model("dropout", 4)
    tx = optax.adam(0.1)
    broken = jaxche.Partitioned(model.stages, model.loss, _breaking_once(3))
    state = broken.init(model.params, tx)
    before = jax.device_get(state)
    with pytest.raises(OSError, match="the cable is cut"):
        broken.step(state, model.batch)
    same(before, state)
    good = jaxche.Partitioned(model.stages, model.loss, jaxche.Pipeline(3))
    same(broken.step(state, model.batch), good.step(good.init(model.params, tx), model.batch))


def _breaking_once(size):
    faults = [1]

    class Once:
        micro_batch_size, schedule = size, "1f1b"

        def wire(self, stages, n_stages, devices):
            return Broken(devices, faults)

    return Once()


def test_a_wire_whose_close_raised_is_not_used_again(make_model, monkeypatch):
    model = make_model()
    partitioned = jaxche.Partitioned(model.stages, model.loss, jaxche.Direct())
    closed = partitioned._wire

    def close():
        LocalWire.close(closed)
        raise OSError("the disk is full")

    monkeypatch.setattr(closed, "close", close)
    with pytest.raises(OSError, match="the disk is full"):
        partitioned.close()
    partitioned.value_and_grad(model.params, model.batch)


@pytest.mark.parametrize("stage", [0, 1])
def test_an_error_is_not_hidden_by_one_of_the_close_that_follows(stage, make_model, monkeypatch):
    model = make_model()
    assert len(model.stages) == 2
    partitioned = jaxche.Partitioned(model.stages, model.loss, jaxche.Direct())
    wire = partitioned._wire

    def close():
        LocalWire.close(wire)
        raise OSError("the disk is full")

    def work(*arguments):
        raise ArithmeticError("the first error")

    monkeypatch.setattr(wire, "close", close)
    plan = partitioned._plan_for(model.params, model.batch)
    monkeypatch.setattr(plan.programs[stage], "backward", work)
    with pytest.raises(ArithmeticError, match="the first error"):
        partitioned.value_and_grad(model.params, model.batch)


def test_threads_take_turns(make_model, same):
    """Each would take the activations of the other, or wait for what the other took."""
    model = make_model("trees", 2)
    partitioned = jaxche.Partitioned(model.stages, model.loss, jaxche.Pipeline(1))
    batches = [model.batch, jax.tree.map(lambda x: 2 * x, model.batch)]
    wanted = [partitioned.value_and_grad(model.params, batch) for batch in batches]
    found = [[], []]

    def work(i):
        found[i] += [partitioned.value_and_grad(model.params, batches[i]) for _ in range(20)]

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    same(found, [[one] * 20 for one in wanted])


def test_a_closed_wire_wakes_who_waits():
    wire = LocalWire(jax.devices()[:2])
    wire.close()
    with pytest.raises(WireClosedError, match="closed while a stage waited"):
        wire.receive(Tag(0, 0, "forward", 0), None, None)
    with pytest.raises(RuntimeError, match="the loss of step 3 is in this process: its last stage returned it"):
        wire.read_loss(3)


def test_variables_of_a_linen_module_are_no_parameters_of_a_stage():
    model = jaxche.Partitioned([lambda p, x: x * p["params"]["w"]], lambda y, x: jnp.mean(y), jaxche.Direct())
    whole = {"params": {"w": jnp.ones(2)}, "batch_stats": {"mean": jnp.zeros(2)}}
    with pytest.raises(ValueError, match=r"params\[0\] is a whole dict.*keep batch_stats in the stage function"):
        model.init([whole], optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"params\[0\] is a whole dict"):
        jaxche.Trainer(model, optax.sgd(0.1), replicas=[jax.devices()[:1]]).init([whole])


def test_a_process_has_the_output_of_the_model_only_with_all_its_stages(make_model, tmp_path):
    model = make_model()
    one = jaxche.Partitioned(model.stages, model.loss, jaxche.DataStore(tmp_path), local_stages=[1])
    with pytest.raises(ValueError, match=r"apply needs all stages in this process, which has \[1\] of 2; gather"):
        one.apply(model.params, model.batch)
    one.close()


def test_devices_of_another_process_are_refused(make_model, devices, monkeypatch):
    model = make_model()
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with pytest.raises(ValueError, match="of stage 0 belongs to process 0, this is process 1; give the stages of this"):
        jaxche.Partitioned(model.stages, model.loss, jaxche.Direct(), devices=devices[:2])


def test_a_random_key_is_called_rng_or_key_as_in_a_loss_function():
    def noise(params, x, rng):
        return params + jax.random.normal(rng, x.shape)

    def other(params, x, *, key):
        return noise(params, x, key)

    def neither(key, rng):  # the parameters and the batch
        return key + rng

    x = np.zeros(4, np.float32)
    outputs = [
        jaxche.Partitioned([stage], mean, jaxche.Direct(), seed=3).apply([np.float32(1)], x).tolist()
        for stage in (noise, other, neither)
    ]
    assert outputs[0] == outputs[1] != outputs[2] == [1, 1, 1, 1]


def test_a_function_of_c_without_a_signature_is_a_stage():
    assert Stage(0, max)(1, 2, jax.random.key(0)) == 2


def test_an_interrupt_while_stages_run_closes_their_wire(make_model, monkeypatch):
    class Thread(threading.Thread):
        def join(self, timeout=None):
            super().join(timeout)
            raise KeyboardInterrupt

    model = make_model()
    partitioned = jaxche.Partitioned(model.stages, model.loss, jaxche.Direct())
    wire, closed = partitioned._wire, []
    monkeypatch.setattr(wire, "close", lambda: closed.append(True))
    monkeypatch.setattr(_runner, "threading", SimpleNamespace(Thread=Thread))
    plan = partitioned._plan_for(model.params, model.batch)
    with pytest.raises(KeyboardInterrupt):
        _runner.run_stages(plan, wire, 0, dict(enumerate(model.params)), model.batch)
    assert closed == [True]


def test_a_partitioned_model_says_its_stages_and_protocol(make_model):
    model = make_model()
    protocol = jaxche.Pipeline(4)
    assert repr(jaxche.Partitioned(model.stages, model.loss, protocol)) == f"Partitioned(2 stages, {protocol!r})"


def test_variables_of_nnx_that_no_optimizer_trains_are_refused():
    graph, whole = nnx.split(nnx.BatchNorm(2, rngs=nnx.Rngs(0)))
    model = jaxche.Partitioned([lambda p, x: nnx.merge(graph, p)(x)], lambda y, x: jnp.mean(y**2), jaxche.Direct())
    with pytest.raises(
        ValueError, match=r"params\[0\]\['mean'\] is an nnx.BatchStat.*nnx.split\(model, nnx.Param, \.\.\.\)"
    ):
        model.init([whole], optax.sgd(0.1))


def test_a_stage_may_merge_and_reseed_an_nnx_model():
    net = nnx.Sequential(nnx.BatchNorm(3, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))
    graph, params, rest = nnx.split(net, nnx.Param, ...)

    def stage(params, x, rng):
        model = nnx.merge(graph, params, rest, copy=True)
        nnx.reseed(model, default=rng)
        return model(x)

    def loss(y, x):
        return jnp.mean(y**2)

    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    model = jaxche.Partitioned([stage], loss, jaxche.Direct())
    one, again, other = (float(model.value_and_grad([params], x, step=step)[0]) for step in (0, 0, 1))
    assert one == again != other
    stages = [lambda params, x: nnx.merge(graph, params, rest)(x)]
    with pytest.raises(ValueError, match=r"TraceContextError.*Write nnx.merge\(graph, params, rest, copy=True\)"):
        jaxche.Partitioned(stages, loss, jaxche.Direct()).value_and_grad([params], x)


def test_a_stage_of_linen_without_a_random_key_is_told_to_take_one():
    net = linen.Dropout(0.5, deterministic=False)
    model = jaxche.Partitioned([lambda p, x: net.apply({}, x)], lambda y, x: jnp.mean(y), jaxche.Direct())
    with pytest.raises(ValueError, match=r"InvalidRngError.*write def stage\(params, x, rng\)"):
        model.value_and_grad([{}], np.ones((2, 2), np.float32))


def test_a_call_under_a_mesh_is_refused_unless_it_is_that_of_the_stages(make_model, devices):
    model = make_model()
    state, calls = None, []
    for own, where in ((devices[:2], None), (devices[:1], [devices[0]] * 2)):
        partitioned = jaxche.Partitioned(model.stages, model.loss, jaxche.Direct(), where or own)
        state = partitioned.init(model.params, optax.sgd(0.1))
        calls.append((own, partitioned, state))
    (both, two, start), (first, one, alone) = calls
    with jax.set_mesh(jax.make_mesh((2,), ("data",), devices=both)):
        for call in (
            lambda: two.init(model.params, optax.sgd(0.1)),
            lambda: two.value_and_grad(model.params, model.batch),
            lambda: two.step(start, model.batch),
            lambda: two.apply(model.params, model.batch),
            lambda: one.step(alone, model.batch),
        ):
            with pytest.raises(ValueError, match=r"called under jax.set_mesh.*; call it outside of it"):
                call()
    with jax.set_mesh(jax.make_mesh((1,), ("data",), devices=first)):
        one.step(alone, model.batch)
