"""Evaluation: every example once, on whatever replicas there are, with the numbers of a loop over the data."""

import dataclasses
import functools
import threading
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jaxche
from jaxche import Weighted
from jaxche.training import _evaluate
from jaxche.training._evaluate import parts_of


def metric_fn(params, batch):
    out = jnp.tanh(batch["x"] @ params["w"] + params["b"])
    near = jnp.abs(out - batch["y"]) < 0.5
    return {"mse": jnp.mean((out - batch["y"]) ** 2), "near": Weighted(near.sum(), near.size), "n": 1.0}


def twin(params, batches):
    """The same, example after example."""
    x, y = (np.concatenate([batch[name] for batch in batches]).astype(np.float64) for name in ("x", "y"))
    out = np.tanh(x @ np.asarray(params["w"], np.float64) + np.asarray(params["b"], np.float64))
    return {"mse": np.mean((out - y) ** 2), "near": np.mean(np.abs(out - y) < 0.5), "n": 1.0}


@pytest.fixture(scope="module")
def train(make_problem, devices):
    """A problem whose last batch is smaller, a trainer of so many replicas, and a state after some rounds."""

    def make(replicas=2, examples=99, **options):
        problem = make_problem(examples=examples)
        replicas = devices[:replicas] if isinstance(replicas, int) else replicas
        trainer = jaxche.Trainer(problem.loss, optax.adam(0.02), replicas=replicas, **options)
        state, _ = trainer.fit(trainer.init(problem.params), problem.data, max_steps=8, progress=False)
        return problem, trainer, state

    return make


@pytest.fixture(scope="module")
def trained(train):
    """The same, made once: programs and metric functions of other tests stay compiled."""
    return functools.cache(train)


def test_it_is_a_loop_over_the_data(trained):
    problem, trainer, state = trained()
    found = trainer.evaluate(state, problem.data, metric_fn)
    batches = [problem.data[i] for i in range(len(problem.data))]
    assert found == pytest.approx(twin(trainer.params(state), batches), rel=1e-6)
    assert all(type(value) is float for value in found.values())
    params = trainer.params(state)
    total = sum(float(jax.jit(metric_fn)(params, batch)["mse"]) * len(batch["x"]) for batch in batches)
    assert found["mse"] == pytest.approx(total / 99, rel=1e-12)


def test_the_result_repeats_on_any_replicas(make_problem, devices):
    problem = make_problem(examples=99)
    found = []
    for replicas in (1, 2, 5, 8):
        trainer = jaxche.Trainer(problem.loss, optax.adam(0.02), replicas=devices[:replicas])
        state = trainer.init(problem.params)
        found += [trainer.evaluate(state, problem.data, metric_fn) for _ in range(2)]
        # Once for each replica, and for the smaller batch where it is run.
        assert replicas < len(trainer._metric_programs[0]._compiled) <= 2 * replicas
    assert found == [found[0]] * 8


class Digits(nnx.Metric):
    """A metric for which the order of the batches matters."""

    def __init__(self):
        self.number = nnx.metrics.MetricState(jnp.float32(0))

    def reset(self):
        self.number[...] = jnp.float32(0)

    def update(self, *, digit):
        self.number[...] = 10 * self.number[...] + digit

    def compute(self):
        return self.number[...]


def test_batches_are_combined_in_the_order_of_the_data(devices):
    trainer = jaxche.Trainer(lambda w, batch: jnp.mean(w * batch), optax.sgd(0.1), replicas=devices[:3])
    data = [np.full((2, 1), digit, np.float32) for digit in range(1, 7)]
    found = trainer.evaluate(trainer.init(jnp.ones(1)), data, lambda w, batch: {"digit": batch[0, 0]}, Digits())
    assert found == {"digits": 123456.0}


def test_a_run_is_not_changed_and_continues(trained, same):
    problem, trainer, state = trained()
    before = jax.device_get(state.local_states)
    compiled = trainer.compilations
    trainer.evaluate(state, problem.data, metric_fn)
    same(before, state.local_states)
    assert trainer.compilations == compiled
    trainer.fit(state, problem.data, progress=False)


def test_the_loss_of_the_trainer_is_the_default(trained):
    problem, trainer, state = trained()
    found = trainer.evaluate(state, problem.data)
    params, sizes = trainer.params(state), [len(problem.data[i]["x"]) for i in range(len(problem.data))]
    losses = [problem.loss(params, problem.data[i]) for i in range(len(problem.data))]
    wanted = [np.average([float(pick(one)) for one in losses], weights=sizes) for pick in (_loss, _mae)]
    assert list(found.values()) == pytest.approx(wanted, rel=1e-6)
    assert list(found) == ["loss", "mae"]


def _loss(one):
    return one[0]


def _mae(one):
    return one[1]["mae"]


def test_tokens_have_equal_weights_however_batches_are_padded(devices):
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 6, 21)
    nll = rng.normal(size=(21, 6)).astype(np.float32)
    mask = np.arange(6) < lengths[:, None]
    data = jaxche.Batches({"nll": nll, "mask": mask}, batch_size=4)
    trainer = jaxche.Trainer(lambda w, b: jnp.mean(w * b["nll"]), optax.sgd(0.1), replicas=devices[:3])

    def tokens(w, batch):
        return {"nll": Weighted((batch["nll"] * batch["mask"]).sum(), batch["mask"].sum())}

    found = trainer.evaluate(trainer.init(jnp.ones(())), data, tokens)
    assert found["nll"] == pytest.approx(nll[mask].mean(), rel=1e-6)
    means = [(d["nll"] * d["mask"]).sum() / max(d["mask"].sum(), 1) for d in (data[i] for i in range(len(data)))]
    assert abs(found["nll"] - np.mean(means)) > 1e-3  # what the mean of the batches' means would be


class Slow:
    """Batches whose reads take a while; two at a time are an error."""

    def __init__(self, data):
        self._data, self._inside, self.reads = data, 0, []

    def __len__(self):
        return len(self._data)

    def __getitem__(self, i):
        self._inside += 1
        assert self._inside == 1, "read from two threads"
        self.reads.append(i)
        time.sleep(0.003)
        self._inside -= 1
        return self._data[i]


def test_each_batch_is_read_once_and_by_one_thread_at_a_time(trained, recorder):
    problem, trainer, state = trained(replicas=4)
    data = Slow(problem.data)
    trainer.evaluate(state, data, metric_fn)
    assert data.reads == list(range(13))
    by_epoch = recorder(problem.data)
    trainer.evaluate(state, by_epoch, metric_fn)
    assert by_epoch.reads == [(0, i) for i in range(13)]


def test_training_data_may_be_evaluated_while_it_is_read_ahead(trained):
    problem, trainer, state = trained()
    data = Slow(problem.data)
    state, history = trainer.fit(state, data, max_steps=20, validation=data, eval_every=4, progress=False)
    assert sum(bool(info.validation) for info in history) > 2


def test_a_fast_replica_takes_more(trained, monkeypatch):
    """The first has two batches in flight, and waits for them until the other has taken all that are left."""
    problem, trainer, state = trained(replicas=2, examples=400)
    taken, on_host = dict.fromkeys(jax.devices()[:2], 0), _evaluate._on_host
    (slow, fast), both, rest = taken, threading.Barrier(2, timeout=20), threading.Event()

    def waits(result):
        device = next(iter(jax.tree.leaves(result.outputs))).device
        taken[device] += 1
        if taken[device] == 1:
            both.wait()
            assert device == fast or rest.wait(20)
        if taken[fast] == 48:
            rest.set()
        return on_host(result)

    monkeypatch.setattr(_evaluate, "_on_host", waits)
    found = trainer.evaluate(state, problem.data, metric_fn)
    assert taken == {slow: 2, fast: 48}
    monkeypatch.undo()
    assert found == trainer.evaluate(state, problem.data, metric_fn)


@pytest.mark.slow
def test_an_iterable_is_data_in_one_process(trained):
    problem, trainer, state = trained()
    batches = [problem.data[i] for i in range(len(problem.data))]
    wanted = trainer.evaluate(state, batches, metric_fn)
    assert trainer.evaluate(state, iter(batches), metric_fn) == wanted
    assert trainer.evaluate(state, (batch for batch in batches), metric_fn) == wanted
    assert trainer.evaluate(state, problem.data, metric_fn) == wanted
    with pytest.raises(ValueError, match="data has no batches; give at least one"):
        trainer.evaluate(state, iter([]), metric_fn)
    with pytest.raises(ValueError, match=r"len\(data\) is 0"):
        trainer.evaluate(state, [], metric_fn)
    with pytest.raises(ValueError, match="data is a dict of 'x', 'y', not a sequence of batches"):
        trainer.evaluate(state, batches[0], metric_fn)
    for several in ({"one": problem.data}, [problem.data] * 2):
        with pytest.raises(ValueError, match=r"of data sets, and one is expected.* also in a callback of fit"):
            trainer.fit(state, problem.data, validation=several, progress=False)
    with pytest.raises(ValueError, match="data is an int"):
        trainer.evaluate(state, 3, metric_fn)


def test_random_keys_depend_on_the_batch_alone(make_problem, devices):
    problem, found = make_problem(examples=99), []

    def noisy(params, batch, rng):
        return {"noise": jax.random.normal(rng)}

    for replicas in (1, 3):
        trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:replicas], seed=5)
        found.append(trainer.evaluate(trainer.init(problem.params), problem.data, noisy))
    keys = [jax.random.fold_in(jax.random.key(5), i) for i in range(13)]
    weights = [len(problem.data[i]["x"]) for i in range(13)]
    wanted = np.average([jax.random.normal(key) for key in keys], weights=weights)
    assert found[0] == found[1] == {"noise": pytest.approx(wanted, rel=1e-6)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"policy": "sync"},
        {"average": "gradients"},
        {"fleet": jaxche.VirtualFleet([20.0, 50.0])},
        {"backend": "host"},
        {"scaling": jaxche.AdaScale()},
        {"policy": "auto"},
    ],
    ids=str,
)
def test_all_trainers_evaluate(train, options):
    problem, trainer, state = train(**options)
    batches = [problem.data[i] for i in range(len(problem.data))]
    found = trainer.evaluate(state, problem.data, metric_fn)
    assert found == pytest.approx(twin(trainer.params(state), batches), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [jaxche.FullShard(min_size=1), jaxche.HybridShard(2, min_size=1)], ids=repr)
def test_islands_evaluate_together(train, devices, strategy):
    meshes = [strategy.mesh(devices[:4]), strategy.mesh(devices[4:6])]
    problem, trainer, state = train(meshes, strategy=strategy)
    batches = [problem.data[i] for i in range(len(problem.data))]
    params = jax.device_get(trainer.params(state))
    assert trainer.evaluate(state, problem.data, metric_fn) == pytest.approx(twin(params, batches), rel=1e-5)

    def outputs(params, batch):
        return {"values": batch["x"] @ params["w"]}

    found = trainer.evaluate(state, problem.data, outputs, nnx.metrics.Average())
    assert found["average"] == pytest.approx(np.concatenate([b["x"] @ params["w"] for b in batches]).mean(), rel=1e-4)


@pytest.mark.parametrize("protocol", [jaxche.Direct(), jaxche.Pipeline(micro_batch_size=2)], ids=repr)
def test_stages_evaluate_their_output(make_problem, devices, protocol):
    problem = make_problem(examples=99)
    stages = [lambda p, batch: batch["x"] @ p["w"], lambda p, x: jnp.tanh(x + p["b"])]
    model = jaxche.Partitioned(stages, lambda y, batch: jnp.mean((y - batch["y"]) ** 2), protocol)
    trainer = jaxche.Trainer(model, optax.adam(0.02), replicas=[devices[:2], devices[2:4]])
    state = trainer.init([{"w": problem.params["w"]}, {"b": problem.params["b"]}])
    if isinstance(protocol, jaxche.Direct):
        state, _ = trainer.fit(state, problem.data, max_steps=4, progress=False)
    params = {name: leaf for part in trainer.params(state) for name, leaf in jax.device_get(part).items()}
    wanted = twin(params, [problem.data[i] for i in range(13)])
    assert trainer.evaluate(state, problem.data) == {"loss": pytest.approx(wanted["mse"], rel=1e-5)}

    def near(y, batch):
        return {"near": jnp.mean(jnp.abs(y - batch["y"]) < 0.5)}

    assert trainer.evaluate(state, problem.data, near) == {"near": pytest.approx(wanted["near"], rel=1e-5)}
    seen = []
    options = {"validation": problem.data, "callbacks": [lambda state, info: seen.append(info)], "progress": False}
    for wrong, message in (
        (lambda y, batch: {"near": jnp.abs(y)}, r"metric 'near' has shape \(8, 2\)"),
        (lambda y, batch: {"near": y @ jnp.ones((7, 7))}, "dot_general|matmul"),
        (lambda y: {"near": y.mean()}, r"write def metric_fn\(y, batch\)"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            trainer.fit(state, problem.data, metric_fn=wrong, **options)
    assert seen == []


class Net(nnx.Module):
    def __init__(self, rngs):
        self.dense, self.norm = nnx.Linear(5, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
        self.drop, self.out = nnx.Dropout(0.5, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.out(self.drop(nnx.relu(self.norm(self.dense(x)))))


@pytest.fixture(scope="module")
def classes():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(45, 5)).astype(np.float32)
    return jaxche.Batches({"x": x, "y": (x[:, 0] > 0).astype(np.int32) + (x[:, 1] > 1)}, batch_size=8, seed=1)


def cross_entropy(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


@pytest.fixture(scope="module")
def trained_net(classes, devices):
    loss = jaxche.NNXLoss(Net(nnx.Rngs(0)), cross_entropy)
    trainer = jaxche.Trainer(loss, optax.adam(0.02), replicas=devices[:2])
    state = trainer.init(loss.params, loss.model_state)
    state, _ = trainer.fit(state, classes, epochs=2, progress=False)
    model = loss.rebuild(trainer.params(state), trainer.model_state(state))
    model.eval()
    return trainer, state, model


@pytest.mark.slow
def test_an_nnx_model_is_evaluated_in_evaluation_mode(classes, trained_net):
    trainer, state, model = trained_net
    batches = [classes[i] for i in range(len(classes))]
    wanted = np.average([cross_entropy(model, b) for b in batches], weights=[len(b["y"]) for b in batches])
    assert trainer.evaluate(state, classes) == {"loss": pytest.approx(wanted, rel=1e-5)}
    other = jaxche.NNXLoss(Net(nnx.Rngs(0)), cross_entropy)
    assert trainer.evaluate(state, classes, other) == {"loss": pytest.approx(wanted, rel=1e-5)}


def test_nnx_metrics_are_those_of_a_loop(classes, trained_net):
    trainer, state, model = trained_net

    def arguments(model, batch):
        logits = model(batch["x"])
        each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return {"logits": logits, "labels": batch["y"], "loss": each}

    metrics = nnx.MultiMetric(
        accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"), spread=nnx.metrics.Welford("loss")
    )
    wanted = nnx.clone(metrics)
    for i in range(len(classes)):
        wanted.update(**arguments(model, classes[i]))
    found = trainer.evaluate(state, classes, arguments, metrics)
    computed = wanted.compute()
    assert found["accuracy"] == pytest.approx(float(computed["accuracy"]), rel=1e-6)
    assert found["loss"] == pytest.approx(float(computed["loss"]), rel=1e-5)
    assert found["spread_mean"] == pytest.approx(float(computed["spread"].mean), rel=1e-5)
    assert found["spread_standard_deviation"] == pytest.approx(float(computed["spread"].standard_deviation), rel=1e-5)
    assert np.isnan(float(metrics.compute()["loss"]))  # the given object is as it was


def test_an_nnx_loss_is_a_metric_function_in_evaluation_mode_beside_any_loss(classes, devices):
    model = nnx.Sequential(nnx.Linear(5, 3, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))
    loss = jaxche.NNXLoss(model, cross_entropy)

    def plain(params, batch, model_state):
        return jnp.zeros(()), ({}, model_state)

    trainer = jaxche.Trainer(plain, optax.sgd(0.1), replicas=devices[:1])
    state = trainer.init(loss.params, loss.model_state)
    model.eval()
    batches = [classes[i] for i in range(len(classes))]
    wanted = np.average([cross_entropy(model, b) for b in batches], weights=[len(b["y"]) for b in batches])
    assert trainer.evaluate(state, classes, loss) == {"loss": pytest.approx(wanted, rel=1e-5)}


@pytest.mark.slow
def test_a_linen_loss_is_a_metric_function_too(classes, devices):
    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            x = nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x))
            return nn.Dense(3)(nn.Dropout(0.5, deterministic=not train)(nn.relu(x)))

    net = Linen()

    def loss_with(train):
        def loss_fn(apply, batch):
            logits = apply(batch["x"], train=train)
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
            return loss, {"accuracy": jnp.mean(logits.argmax(-1) == batch["y"])}

        return jaxche.linen_loss(net, loss_fn)

    trainer = jaxche.Trainer(loss_with(True), optax.adam(0.02), replicas=devices[:2])
    variables = net.init(jax.random.key(0), classes[0]["x"], train=False)
    state = trainer.init(variables.pop("params"), model_state=variables)
    state, _ = trainer.fit(state, classes, epochs=2, progress=False)
    found = trainer.evaluate(state, classes, loss_with(False))
    given = {"params": trainer.params(state), **trainer.model_state(state)}
    logits = np.concatenate([net.apply(given, classes[i]["x"], train=False) for i in range(len(classes))])
    labels = np.concatenate([classes[i]["y"] for i in range(len(classes))])
    assert found["accuracy"] == pytest.approx(np.mean(logits.argmax(1) == labels))
    wanted = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    assert found["loss"] == pytest.approx(float(wanted), rel=1e-5)
    assert trainer.evaluate(state, classes)["loss"] != found["loss"]  # in training mode

    def accuracy(apply, batch):
        return {"accuracy": jnp.mean(apply(batch["x"], train=False).argmax(-1) == batch["y"])}

    def arguments(apply, batch):
        return {"logits": apply(batch["x"], train=False), "labels": batch["y"]}

    alone = {"accuracy": found["accuracy"]}
    assert trainer.evaluate(state, classes, jaxche.linen_loss(net, accuracy)) == alone
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy())
    assert trainer.evaluate(state, classes, jaxche.linen_loss(net, arguments), metrics) == pytest.approx(alone)

    def named(params, batch, model_state):
        return {"mean": model_state["batch_stats"]["BatchNorm_0"]["mean"].mean()}

    mean = np.mean(jax.device_get(given["batch_stats"]["BatchNorm_0"]["mean"]))
    assert trainer.evaluate(state, classes, named)["mean"] == pytest.approx(float(mean), rel=1e-5)


def test_a_state_with_another_model_state_is_evaluated_too(devices):
    def loss(params, batch, model_state):
        return jnp.mean((batch - params) ** 2) + sum(map(jnp.sum, jax.tree.leaves(model_state))), ({}, model_state)

    trainer = jaxche.Trainer(loss, optax.sgd(0.1), replicas=devices[:2])
    data = [np.ones((4, 1), np.float32)] * 4
    for model_state, wanted in ({"a": jnp.ones(2)}, 2.0), ({"a": jnp.ones(3)}, 3.0), ({"b": jnp.ones(3)}, 3.0):
        assert trainer.evaluate(trainer.init(jnp.ones(1), model_state=model_state), data) == {"loss": wanted}


def test_an_error_in_one_replica_ends_all(trained):
    problem, trainer, state = trained()
    trainer.evaluate(state, problem.data, metric_fn)
    threads = threading.active_count()

    def torn():
        yield problem.data[0]
        yield problem.data[1]
        raise OSError("disk on fire")

    with pytest.raises(OSError, match="disk on fire"):
        trainer.evaluate(state, torn(), metric_fn)
    with pytest.raises(ValueError, match="metric 'bad' has shape"):
        trainer.evaluate(state, problem.data, lambda params, batch: {"bad": batch["x"]})
    with pytest.raises(TypeError, match="logits"):
        trainer.evaluate(state, problem.data, lambda params, batch: {"x": batch["x"]}, nnx.metrics.Accuracy())
    ragged = [{"x": np.ones((4, 5)), "y": np.ones((3, 2))}]
    with pytest.raises(ValueError, match="leading axes"):
        trainer.evaluate(state, ragged, lambda params, batch: {"x": batch["x"].mean()})
    with pytest.raises(ValueError, match=r"metrics=dict needs update\(\) and compute\(\)|metrics=Accuracy needs"):
        trainer.evaluate(state, problem.data, metrics=nnx.metrics.Accuracy())
    with pytest.raises(ValueError, match=r"metrics=Average is a class; write metrics=Average\(\), with its arguments"):
        trainer.fit(state, problem.data, validation=problem.data, metric_fn=lambda *_: {}, metrics=nnx.metrics.Average)
    trainer.evaluate(state, problem.data, metric_fn)
    assert threading.active_count() <= threads


def test_an_error_has_the_batch(trained):
    problem, trainer, state = trained()
    batches = [{**problem.data[i]} for i in range(4)]
    batches[2]["x"] = np.full_like(batches[2]["x"], np.nan)
    with jax.debug_nans(True), pytest.raises(Exception, match="nan") as raised:
        trainer.evaluate(state, batches, metric_fn)
    assert "raised by batch 2 of the data of this evaluation" in raised.value.__notes__


def test_programs_are_kept_for_the_functions_of_the_last_evaluations(train):
    problem, trainer, state = train()
    trainer.evaluate(state, problem.data, metric_fn)
    program = trainer._metric_programs[0]
    compiled = len(program._compiled)
    for i in range(3):
        trainer.evaluate(state, problem.data, lambda params, batch, i=i: {"i": float(i)})
    trainer.evaluate(state, problem.data, metric_fn)
    assert trainer._metric_programs[0] is program
    assert len(program._compiled) <= compiled + 1  # the smaller batch on the other replica
    trainer.evaluate(state, problem.data, lambda params, batch: {"j": 1.0})
    assert len(trainer._metric_programs) == 4


class Metric(NamedTuple):
    """Equal to others with its scale, and hashable unless that is an array."""

    scale: Any

    def __call__(self, params, batch):
        return {"scale": jnp.sum(self.scale) + 0.0 * batch["x"].sum()}


@dataclasses.dataclass
class Changing:
    """Equal to others with its scale now, and not hashable."""

    scale: float

    def __call__(self, params, batch):
        return {"scale": self.scale + 0.0 * batch["x"].sum()}

    def metric(self, params, batch):
        return self(params, batch)


def test_equal_functions_share_a_program_only_for_good(train):
    problem, trainer, state = train()
    evaluate = functools.partial(trainer.evaluate, state, problem.data)
    assert [evaluate(Metric(scale))["scale"] for scale in (1.0, 2.0, 1.0)] == [1.0, 2.0, 1.0]
    assert len(trainer._metric_programs) == 2
    assert [evaluate(Metric(np.full(2, scale)))["scale"] for scale in (1.0, 2.0)] == [2.0, 4.0]
    changing = Changing(3.0)
    assert evaluate(changing)["scale"] == 3.0
    changing.scale = 5.0
    assert evaluate(Changing(5.0))["scale"] == 5.0
    programs = len(trainer._metric_programs)
    assert evaluate(changing.metric) == evaluate(changing.metric) == {"scale": 5.0}
    assert len(trainer._metric_programs) == programs


def test_batches_are_dealt_out_by_speed_in_the_order_of_the_processes():
    one = parts_of([(0,), (0,), (1,)], [50, 20, 30], 10)
    assert one == [((0,), (0, 1), range(7)), ((1,), (2,), range(7, 10))]
    spanning = parts_of([(2,), (0, 1), (0, 1), (3,)], [1, 1, 1, 1], 6)
    assert spanning == [
        ((0, 1), (1,), range(2)),
        ((0, 1), (2,), range(2, 4)),
        ((2,), (0,), range(4, 5)),
        ((3,), (3,), range(5, 6)),
    ]
    assert [part.batches for part in parts_of([(0,), (1,)], [1, 1], 1)] == [range(1), range(1, 1)]


def test_the_loss_of_a_trainer_with_outputs_gives_its_scalars(devices):
    x = np.arange(10, dtype=np.float32)

    def loss(w, batch, key):
        error = w - batch
        return jnp.mean(error**2), {"mean": batch.mean(), "errors": error}

    def logits(w, batch):
        return jnp.mean((w - batch) ** 2), batch

    for one, expected in ((loss, {"loss": 28.5, "mean": 4.5}), (logits, {"loss": 28.5})):
        trainer = jaxche.Trainer(one, optax.sgd(0.1), replicas=devices[:2], outputs=lambda info, batches: None)
        assert trainer.evaluate(trainer.init(jnp.zeros(())), [x[:4], x[4:]]) == pytest.approx(expected)


def test_streams_are_evaluated_and_validated(devices):
    x = np.arange(10, dtype=np.float32)

    class Tensor:
        def __init__(self, x):
            self.x = x

        def __array__(self, dtype=None, copy=None):
            return self.x

    class Loader:
        """As a torch DataLoader: a length, no indices."""

        def __len__(self):
            return 2

        def __iter__(self):
            return iter([Tensor(x[:4]), Tensor(x[4:])])

    trainer = jaxche.Trainer(lambda w, batch: jnp.mean((w - batch) ** 2), optax.sgd(0.1), replicas=devices[:2])
    state = trainer.init(jnp.zeros(()))
    for data in (Loader(), jaxche.Stream(lambda epoch: iter([x[:4], x[4:]])), iter([x[:4], x[4:]])):
        assert trainer.evaluate(state, data) == pytest.approx({"loss": 28.5}, rel=1e-6)
    after, history = trainer.fit(state, Loader(), epochs=2, validation=Loader(), progress=False)
    assert [info.validation for info in history if info.validation][-1] == trainer.evaluate(after, Loader())
    with pytest.raises(ValueError, match="validation is a list_iterator, which can be read once"):
        trainer.fit(state, Loader(), validation=iter([x]), progress=False)


@pytest.mark.parametrize("iterator", [iter, lambda batches: (x for x in batches), lambda batches: map(abs, batches)])
def test_validation_whose_iterations_go_on_with_one_iterator_is_refused(devices, iterator):
    class Loader:
        def __init__(self):
            self.batches = iterator([np.ones(4, np.float32)] * 3)

        def __iter__(self):
            return self.batches

    trainer = jaxche.Trainer(lambda w, batch: jnp.mean((w - batch) ** 2), optax.sgd(0.1), replicas=devices[:1])
    state, data = trainer.init(jnp.zeros(())), [np.ones(4, np.float32)]
    with pytest.raises(ValueError, match=r"validation is a Loader, which can be read once only.*validation=list\("):
        trainer.fit(state, data, validation=Loader(), progress=False)
    assert trainer.evaluate(state, Loader()) == {"loss": 1.0}
