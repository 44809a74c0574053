"""What each process of test_training does; run by ``jaxche launch``. Prints one JSON line per experiment."""

import dataclasses
import functools
import itertools
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxche
from jaxche.cadence import _wire_choice
from jaxche.checkpoints import _shared_folder
from jaxche.sharding import is_private
from jaxche.training import _arguments, _rounds


class Problem:
    """The same in every process, and in the test."""

    def __init__(self):
        rng = np.random.default_rng(0)
        x = rng.normal(size=(100, 8)).astype(np.float32)
        y = np.tanh(x @ rng.normal(size=(8, 4))).astype(np.float32)
        self.data = jaxche.Batches({"x": x, "y": y}, batch_size=8, seed=3)
        self.params = {"w": rng.normal(size=(8, 4)).astype(np.float32) * 0.3, "b": np.zeros(4, np.float32)}
        self.model_state = {"mean": np.zeros(4, np.float32), "var": np.ones(4, np.float32)}

    @staticmethod
    def loss(params, batch, rng, model_state):
        out = batch["x"] @ params["w"] + params["b"]
        keep = jax.random.bernoulli(rng, 0.8, out.shape)
        error = jnp.tanh(out * keep) - batch["y"]
        state = {
            "mean": 0.9 * model_state["mean"] + 0.1 * out.mean(0),
            "var": 0.9 * model_state["var"] + 0.1 * out.var(0),
        }
        return jnp.mean(error**2), ({"mae": jnp.mean(jnp.abs(error))}, state)


COUNTS = [(3, 5), (1, 3), (1, 0), (2, 4), (0, 3)]
CONFIGURATIONS = {
    "parameters": {"merge": "steps"},
    "averaged moments": {"merge": "fednova", "opt_state": "average"},
    "outer": {"merge": "batch", "outer": optax.sgd(0.7, momentum=0.9)},
    "gradients": {"average": "gradients"},
    "scaled gradients": {"average": "gradients", "scaling": jaxche.AdaScale()},
    "scaled parameters": {"scaling": jaxche.AdamScale()},
    "codes": {"wire": "int4"},
}


def train(problem, **arguments):
    """The recorded rounds under one configuration: merged trees as lists, and what each round told."""
    trainer = jaxche.Trainer(problem.loss, optax.adam(0.05), **arguments)
    state = trainer.init(problem.params, problem.model_state)
    told = []
    for counts in COUNTS:
        state, info = trainer.round(state, problem.data, counts=counts)
        told.append([info.counts, info.weights, info.loss, info.metrics["mae"], info.drift, info.losses, info.epoch])
        if "scaling" in arguments:
            told.append([info.noise, info.gain, info.lr_factor, info.progress])
    trees = jax.device_get((trainer.params(state), trainer.model_state(state)))
    return {"trees": jax.tree.map(np.ndarray.tolist, trees), "told": told}


def chosen_wire(problem):
    """The wires of a run that takes codes as soon as merges are measured, and what it trained."""
    che = jaxche.ElChe(2, anchor=2, max_anchor=2, max_batch_diff=0, tuner="steady")
    with mock.patch.object(_rounds, "DEAR", 1e-9), mock.patch.object(_wire_choice, "_FASTER", float("inf")):
        trainer = jaxche.Trainer(problem.loss, optax.adam(0.05), wire="auto", che=che)
        state = trainer.init(problem.params, problem.model_state)
        state, history = trainer.fit(state, problem.data, epochs=3, progress=False)
    return [info.wire for info in history], jax.tree.map(np.ndarray.tolist, jax.device_get(trainer.params(state)))


# AdaptDL's published case of two contributors: the inputs of a Linear(2, 2), and the gain at scale 2.
PUBLISHED = {
    "[[1,0],[0,1]]": ([[1, 0], [0, 1]], 4 / 3),
    "[[-1,1],[1,-1]]": ([[-1, 1], [1, -1]], 2),
    "[[1,4],[5,.5]]": ([[1, 4], [5, 0.5]], 1.4688796680),
    "[[-.2,3],[5,.5]]": ([[-0.2, 3], [5, 0.5]], 1.8472893902),
}


def published(devices):
    """Their gains, one contributor a device."""
    params = {"w": jnp.zeros((2, 2)), "b": jnp.zeros(2)}
    mesh = Mesh(np.array(devices), ("r",), axis_types=(AxisType.Auto,))

    def body(x):
        own = jax.lax.pcast(params, "r", to="varying")
        grads = jax.grad(lambda p: jnp.sum(p["w"] @ x[0] + p["b"]))(own)
        return jaxche.noise_scale.update(jaxche.noise_scale.init(params), grads, 1, axis_name="r").gain(2)

    gain = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("r"), out_specs=P()))
    gains = {}
    for name, (inputs, _) in PUBLISHED.items():
        rows = np.array(inputs, np.float32)
        x = jax.make_array_from_callback(rows.shape, NamedSharding(mesh, P("r")), lambda i, rows=rows: rows[i])
        gains[name] = float(gain(x))
    return gains


def name_of_error(action):
    try:
        action()
    except Exception as error:
        return [type(error).__name__, str(error).splitlines()[0]]
    return None


class Torn:
    """Data that only rank 1 cannot read."""

    def __init__(self, data, at):
        self._data, self._at = data, at

    def __len__(self):
        return len(self._data)

    def __getitem__(self, i):
        if i in self._at and jax.process_index() == 1:
            raise OSError("disk on fire")
        return self._data[i]


class Longer:
    """Data whose second epoch is one batch longer on these ranks."""

    def __init__(self, data, ranks):
        self._data, self._ranks = [data[i] for i in range(len(data))], ranks

    def __len__(self):
        return len(self._data)

    def __getitem__(self, i):
        return self._data[i]

    def epoch(self, e):
        return self._data + self._data[:1] * (e == 1 and jax.process_index() in self._ranks)


class Stream:
    """Data that gives the next batch whatever it is asked for."""

    def __init__(self, data):
        self._source = iter([data[i] for i in range(len(data))])

    def __len__(self):
        return 12

    def __getitem__(self, i):
        return next(self._source)


def loud(problem, factor):
    def loss(params, batch, rng, model_state):
        loss, rest = problem.loss(params, batch, rng, model_state)
        return loss * factor, rest

    return loss


def weighed(problem, rank):
    weights = np.arange(1, 4, dtype=np.float32) + rank

    def loss(params, batch, rng, model_state):
        loss, rest = problem.loss(params, batch, rng, model_state)
        return jnp.mean(loss * weights), rest

    return loss


def different(trainer, problem, data, params=None):
    """What the processes are said to differ in."""
    try:
        trainer.round(trainer.init(params or problem.params, problem.model_state), data)
    except ValueError as error:
        first, *table = str(error).splitlines()
        # The titles of a table, or the one thing that is named.
        return (
            re.split(r" {2,}", table[0].strip())[1:] if table else [first.split("the values of ", 1)[1].split(":")[0]]
        )


def faults(problem):
    """Everything that goes wrong on one rank, one after the other, in processes that go on living."""
    _shared_folder._VISIBLE_S = 0.5
    rank = jax.process_index()
    trainer = jaxche.Trainer(problem.loss, optax.adam(0.05), rows="equal")  # both ranks read whatever they take
    state = trainer.init(problem.params, problem.model_state)
    seen = {"torn": name_of_error(lambda: trainer.round(state, Torn(problem.data, [5]), counts=(4, 4)))}
    nan = [jax.tree.map(lambda x, i=i: x * np.float32(np.nan if i == 6 else 1), problem.data[i]) for i in range(12)]
    seen["nan"] = name_of_error(lambda: trainer.round(state, nan, counts=(4, 4)))
    seen["plan"] = name_of_error(lambda: trainer.round(state, problem.data, counts=(4, 4 + rank)))
    state, info = trainer.round(state, problem.data, counts=(4, 4))
    seen["after"] = [info.round, bool(np.isfinite(info.loss))]
    for name, ranks in (("epochs", (0, 1)), ("own epochs", (1,))):
        data = Longer(problem.data, ranks)
        seen[name] = name_of_error(lambda data=data: trainer.fit(state, data, epochs=2, progress=False))
        seen[name].append([trainer.last_good_state.epoch, trainer.last_good_state.cursor])
    other = jaxche.Trainer(problem.loss, optax.adam(0.05))
    seen["stream"] = name_of_error(lambda: other.round(state, Stream(problem.data)))

    other = jaxche.Trainer(problem.loss, optax.adam(0.05), seed=rank)
    seen["seed"] = name_of_error(lambda: other.round(state, problem.data))
    loss = problem.loss if rank == 0 else lambda params, batch: params["w"]
    other = jaxche.Trainer(loss, optax.adam(0.05))
    seen["loss"] = name_of_error(lambda: other.round(state, problem.data))
    shuffled = jaxche.Batches(problem.data.arrays, batch_size=8, seed=3 + rank)
    other = [jax.tree.map(lambda x, i=i: x + (i == 11) * rank, problem.data[i]) for i in range(12)]
    seen["different"] = {
        name: different(trainer, problem, *given)
        for name, (trainer, *given) in {
            "shuffled": (jaxche.Trainer(problem.loss, optax.adam(0.05)), shuffled),
            "contents": (jaxche.Trainer(problem.loss, optax.adam(0.05)), other),
            "params": (
                jaxche.Trainer(problem.loss, optax.adam(0.05)),
                problem.data,
                problem.params | {"w": problem.params["w"] * (1 + rank)},
            ),
            "constants": (jaxche.Trainer(weighed(problem, rank), optax.adam(0.05)), problem.data),
            "tx": (jaxche.Trainer(problem.loss, optax.adam(0.05 + rank)), problem.data),
            "outer": (jaxche.Trainer(problem.loss, optax.adam(0.05), outer=optax.sgd(0.5 + 0.2 * rank)), problem.data),
            "loss": (jaxche.Trainer(loud(problem, 1 + rank), optax.adam(0.05)), problem.data),
            "che": (jaxche.Trainer(problem.loss, optax.adam(0.05), che=jaxche.ElChe(2, 3 + rank)), problem.data),
            "data": (jaxche.Trainer(problem.loss, optax.adam(0.05)), [problem.data[i] for i in range(5 + rank)]),
        }.items()
    }
    seen["fit"] = {
        name: name_of_error(lambda given=given: trainer.fit(state, problem.data, progress=False, **given))
        for name, given in {
            "epochs": {"epochs": 1 + rank},
            "no epochs": {"epochs": 1 - rank},
            "one is saved": {"checkpoints": [tempfile.mkdtemp(), None][rank]},
            "own folders": {"checkpoints": tempfile.mkdtemp()},
        }.items()
    }
    paced = jaxche.Trainer(problem.loss, optax.adam(0.05), pace_ms=(50, 1e-3))
    seen["pace"] = name_of_error(lambda: paced.round(state, problem.data))

    # The first process asks to stop; both stop after the same round.
    trainer = jaxche.Trainer(
        problem.loss, optax.adam(0.05), che=jaxche.ElChe(2, anchor=1, max_anchor=1, max_batch_diff=0)
    )
    state = trainer.init(problem.params, problem.model_state)
    state, history = trainer.fit(
        state, problem.data, epochs=9, callbacks=[lambda s, i: rank == 0 and i.round == 2], progress=False
    )
    seen["stopped"] = [len(history), state.round, [info.counts for info in history]]
    return seen


# Devices of each process, and which processes make an island.
ISLANDS = {
    "one device each": ((1, 1), ((0,), (1,))),
    "islands": ((2, 2), ((0,), (1,))),
    "unequal islands": ((2, 4), ((0,), (1,))),
    "wide islands": ((2, 2, 4), ((0, 1), (2,))),
    "one island": ((2, 2), ((0, 1),)),
    "host": ((2, 2), ((0,), (1,))),  # a device of each process computes, the other one merges
}


def islands(problem, groups, host, named):
    """Training on islands, then a batch that one process of the first cannot read."""
    strategy = jaxche.FullShard()
    grouped = [[d for d in jaxche.devices() if d.process_index in group] for group in groups]
    if host:
        knobs = {"replicas": [devices[0] for devices in grouped], "backend": "host"}
    elif named:
        knobs = {"replicas": "process", "strategy": strategy}
    else:
        knobs = {"replicas": [strategy.mesh(devices) for devices in grouped], "strategy": strategy}
    counts = COUNTS if len(groups) > 1 else [(sum(row),) for row in COUNTS]
    trainer = jaxche.Trainer(Sums.loss, optax.adam(0.05), ema=0.2, **knobs)
    state = trainer.init(problem.params)
    told = []
    for row in counts:
        state, info = trainer.round(state, problem.data, counts=row)
        told.append([info.counts, info.loss, info.drift, info.losses])
    rates = trainer.measure_rates(state, problem.data, seconds=0.05)
    torn = name_of_error(lambda: trainer.round(state, Torn(problem.data, range(99)), counts=(3,) * len(groups)))
    state, info = trainer.round(state, problem.data, counts=(1,) * len(groups))
    whole = None if host else jax.sharding.NamedSharding(_mesh_of(state), jax.P())
    averages = trainer.params(trainer.with_ema(state))
    trees = jax.device_get(jax.jit(lambda x: x, out_shardings=whole)((trainer.params(state), averages)))
    return {
        "trees": jax.tree.map(np.ndarray.tolist, trees),
        "told": told,
        "rates": len(rates),
        "torn": torn,
        "cut": len({str(shard.index) for shard in state.local_states[0].params["w"].global_shards}),
        "donated": [donated(problem, len(groups), policy, **knobs) for policy in ("cadence", "sync")],
    }


def donated(problem, world, policy, **knobs):
    """Whether fits that take their state end as those that keep it, and take it; and their errors of a read."""
    params = {"w": np.linspace(-1, 1, 8 * 4096, dtype=np.float32).reshape(8, 4096), "b": np.zeros(4, np.float32)}

    def loss(params, batch):
        out = jnp.tanh(batch["x"] @ params["w"]).reshape(-1, 4, 1024).mean(2) + params["b"]
        return jnp.mean((out - batch["y"]) ** 2)

    if world > 1:
        knobs |= (
            {"rows": "equal"} if policy == "sync" else {"che": jaxche.ElChe(world, 2, max_anchor=2, max_batch_diff=0)}
        )
    trainer, ended, taken, errors = jaxche.Trainer(loss, optax.adam(0.05), policy=policy, **knobs), [], [], []
    for donate in (False, True):
        states = []
        options = {"callbacks": [lambda state, info, states=states: states.append(state)], "progress": False}
        given = trainer.init(params)
        state, _ = trainer.fit(given, problem.data, donate=donate, **options)
        shards = [leaf.addressable_shards for leaf in jax.tree.leaves(state.local_states[0].params)]
        ended.append([np.asarray(shard.data).tolist() for shard in itertools.chain(*shards)])
        taken.append(given.is_deleted)
        errors.append([])
        for at in (range(6, 99), range(6, 12), range(12, 13)):  # the last batch of an epoch is a smaller one
            fit = functools.partial(trainer.fit, states[-1], Torn(problem.data, at), donate=donate, **options)
            errors[-1].append((name_of_error(fit) or [None])[0])
            if donate:
                states.append(trainer.init(params))
    return {"equal": ended[0] == ended[1], "taken": taken, "errors": errors}


GROUP_COUNTS = [(4, 3, 3, 3), (3, 2, 2, 0), (2, 2, 1, 1), (4, 2, 4, 3)]
GROUPS = {
    "groups": {"opt_state": "average"},
    "groups of codes": {"wire": "int4"},
    "groups beside merges": {"overlap": 0.5},
}


def groups(problem, options, **arguments):
    """The recorded rounds of two replicas in each process, which merge among themselves within rounds."""
    trainer = jaxche.Trainer(problem.loss, optax.adam(0.05), group_merges=3, **options, **arguments)
    state = trainer.init(problem.params, problem.model_state)
    told = []
    for counts in GROUP_COUNTS:
        state, info = trainer.round(state, problem.data, counts=counts)
        told.append([info.counts, info.weights, info.loss, info.losses, info.group_merges])
    trees = jax.device_get((trainer.params(state), trainer.model_state(state)))
    return {"trees": jax.tree.map(np.ndarray.tolist, trees), "told": told, "measured": info.group_ms > 0}


def beside(problem, **arguments):
    """Rounds whose measurements are exchanged beside their last steps, and a number that becomes infinite in these."""
    trainer = jaxche.Trainer(problem.loss, optax.adam(0.05), overlap=0.5, **arguments)
    state, history = trainer.init(problem.params, problem.model_state), jaxche.History()
    for _ in range(4):
        state, info = trainer.round(state, problem.data, counts=(4, 3, 3, 3))
        history.append(info)
    trees = jax.device_get((trainer.params(state), trainer.model_state(state)))
    data = [problem.data[i] for i in range(len(problem.data))]
    data[-1] = {"x": data[-1]["x"] * np.inf, "y": data[-1]["y"]}  # in the last step of the last replica
    state, info = trainer.round(state, data, counts=(4, 3, 3, 3))
    ended = name_of_error(lambda: trainer._settled(state))  # as at the end of a fit
    try:
        trainer.round(state, data, counts=(4, 3, 3, 3))
    except jaxche.NonFiniteLossError as error:
        failed = [error.rank, (4, 12) in error.batches, bool(np.isfinite(trainer.params(error.state)["w"]).all())]
    return {
        "trees": jax.tree.map(np.ndarray.tolist, trees),
        "history": history.to_json(),
        "late": [info.sent_after[-1], np.isfinite(info.loss).item(), failed],
        "ended": ended,
    }


KINDS = [("sync", 0.0), ("cadence", 0.5), ("cadence", 0.5), ("cadence", 0.0), ("cadence", 0.5), ("sync", 0.0)]


def kinds(problem, **arguments):
    """Rounds of ``policy="auto"`` that merge in each of its ways, whatever this machine measures."""
    trainer = jaxche.Trainer(problem.loss, optax.adam(0.05), policy="auto", **arguments)
    state, history = trainer.init(problem.params, problem.model_state), jaxche.History()
    for policy, overlap in KINDS:
        choice = jaxche.cadence.Choice(jaxche.ApplyPolicy(policy), overlap=overlap, since=state.round)
        state = dataclasses.replace(state, choice=choice)
        counts = (1, 1, 1, 1) if policy == "sync" else (4, 3, 3, 2)
        state, info = trainer.round(state, problem.data, counts=counts)
        history.append(info)
    trees = jax.device_get((trainer.params(state), trainer.model_state(state)))
    return {"trees": jax.tree.map(np.ndarray.tolist, trees), "history": history.to_json()}


def late(problem):
    """An island of two processes that takes four times as long as planned, and a replica in a third process."""
    strategy = jaxche.FullShard()
    groups = [[d for d in jax.devices() if d.process_index in group] for group in ((0, 1), (2,))]
    che = jaxche.ElChe(2, anchor=6, max_anchor=6, tuner="steady").report_timing([600.0, 600.0], [6, 6], 0.0)
    trainer = jaxche.Trainer(
        Sums.loss,
        optax.adam(0.05),
        che=che,
        replicas=[strategy.mesh(devices) for devices in groups],
        strategy=strategy,
        pace_ms=(400, 100),
    )
    data = jaxche.Batches(problem.data.arrays, batch_size=5)
    _, history = trainer.fit(trainer.init(problem.params), data, epochs=2, progress=False)
    return [[info.epoch, info.cursor, info.planned, info.counts] for info in history]


def metric_fn(params, batch):
    error = jnp.abs(jnp.tanh(batch["x"] @ params["w"] + params["b"]) - batch["y"])
    return {"mse": jnp.mean(error**2), "near": jaxche.Weighted((error < 0.5).sum(), error.size)}


def arguments(params, batch):
    out = jnp.tanh(batch["x"] @ params["w"] + params["b"])
    return {"logits": out, "labels": batch["y"].argmax(-1).astype(jnp.int32), "values": out - batch["y"]}


def nnx_metrics():
    from flax import nnx  # takes half as long to import as all others: only where it is used

    return nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), spread=nnx.metrics.Welford())


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Mean:
    """A metric in the form of clu's."""

    total: Any
    count: Any

    def merge(self, other):
        return Mean(self.total + other.total, self.count + other.count)

    def compute(self):
        return {"mean": self.total / self.count}


def evaluations(problem, **knobs):
    """What every process is told of the same data."""
    trainer = jaxche.Trainer(Sums.loss, optax.adam(0.05), **knobs)
    state = trainer.init(problem.params)
    seen = {
        "means": trainer.evaluate(state, problem.data, metric_fn),
        "again": trainer.evaluate(state, problem.data, metric_fn),
        "loss": trainer.evaluate(state, problem.data),
        "nnx": trainer.evaluate(state, problem.data, arguments, nnx_metrics()),
        "merged": trainer.evaluate(state, problem.data, lambda p, b: Mean(jnp.sum(b["x"] @ p["w"]), b["x"].shape[0])),
        "few": trainer.evaluate(state, [problem.data[0]], metric_fn),
    }
    # The default of a fit, with a limit in seconds that follows each process's own clock.
    options = {"validation": problem.data, "metric_fn": metric_fn, "progress": False}
    _, history = trainer.fit(state, problem.data, epochs=2, **options)
    seen["fit"] = [info.validation for info in history if info.validation]
    seen["reached"] = [(info.steps_done, info.examples_done) for info in history][-1]
    late = [lambda state, info: time.sleep(0.05 * jax.process_index())]
    every = {"eval_every": jaxche.Every(seconds=0.01), "max_time": 0.1}
    _, history = trainer.fit(state, problem.data, callbacks=late, **every, **options)
    seen["clock"] = [(info.clock_ms, info.validation) for info in history]
    return trainer, state, seen


def evaluate(problem, islands):
    """Evaluations in processes with a device each, or of islands over two processes; and what goes wrong in one."""
    strategy = jaxche.FullShard()
    groups = [[d for d in jaxche.devices() if d.process_index in group] for group in ((0, 1), (2,))]
    replicas = {"replicas": [strategy.mesh(devices) for devices in groups], "strategy": strategy} if islands else {}
    trainer, state, seen = evaluations(problem, **replicas)
    for name, given in {
        "torn": (Torn(problem.data, [5, 6, *range(9, 99)]), metric_fn),  # not the first that it reads
        "torn at once": (Torn(problem.data, range(99)), metric_fn),
        "function": (problem.data, lambda p, b: {"bad": b["x"] if jax.process_index() else 0.0}),
        "sizes": ([problem.data[i] for i in range(5 + jax.process_index())], metric_fn),
        "iterable": (iter([problem.data[0]]), metric_fn),
        "update": (problem.data, metric_fn, nnx_metrics().accuracy),
    }.items():
        seen[name] = name_of_error(lambda given=given: trainer.evaluate(state, *given))
    seen["after"] = trainer.evaluate(state, problem.data, metric_fn)
    return seen


def _mesh_of(state):
    return jax.tree.leaves(state.local_states[0].params)[0].sharding.mesh


# Two pipelines of two stages, in this order of processes.
PIPELINES = (2, 2)


def pipelines(problem, replicas=None):
    """The recorded rounds on replicas that are pipelines, each in a process of its own."""
    model = jaxche.Partitioned(
        [lambda p, batch: jnp.tanh(batch["x"] @ p["w"]), lambda p, h: jnp.tanh(h * p["scale"] + p["b"])],
        lambda y, batch: jnp.mean((y - batch["y"]) ** 2),
        jaxche.Pipeline(micro_batch_size=2),
    )
    params = [{"w": problem.params["w"]}, {"scale": np.ones(4, np.float32), "b": problem.params["b"]}]
    trainer = jaxche.Trainer(model, optax.adam(0.05), replicas=replicas)
    state = trainer.init(params)
    told = []
    for counts in COUNTS:
        state, info = trainer.round(state, problem.data, counts=counts)
        told.append([info.counts, info.loss, info.drift, info.losses, info.epoch])
    torn = name_of_error(lambda: trainer.round(state, Torn(problem.data, range(99)), counts=(3, 3)))
    trees = [jax.tree.map(lambda x: np.asarray(x).tolist(), tree) for tree in trainer.params(state)]
    return {"trees": trees, "told": told, "torn": torn}


class Sums:
    """A loss without randomness, so that it does not matter how a batch is cut."""

    @staticmethod
    def loss(params, batch):
        error = jnp.tanh(batch["x"] @ params["w"] + params["b"]) - batch["y"]
        return jnp.mean(error**2)


def main(what, folder):
    if what in ISLANDS:
        jax.config.update("jax_num_cpu_devices", ISLANDS[what][0][int(os.environ["JAXCHE_PROCESS_ID"])])
    elif what in ("late", "evaluate islands"):
        jax.config.update("jax_num_cpu_devices", (1, 1, 2)[int(os.environ["JAXCHE_PROCESS_ID"])])
    elif what == "groups":  # two that train, and two that merge beside them
        jax.config.update("jax_num_cpu_devices", 4)
    elif what == "pipelines":
        jax.config.update("jax_num_cpu_devices", PIPELINES[int(os.environ["JAXCHE_PROCESS_ID"])])
    jaxche.initialize(timeout_s=60)
    problem = Problem()
    if what == "results":
        result = {name: train(problem, **arguments) for name, arguments in CONFIGURATIONS.items()}
        result["published"] = published(jax.devices())
        result["wires"] = chosen_wire(problem)
        result["private"] = [is_private(device) for device in jaxche.devices()]
    elif what in ISLANDS:
        result = islands(problem, ISLANDS[what][1], host=what == "host", named=what == "unequal islands")
    elif what == "groups":
        given = {"groups": "process", "replicas": jaxche.devices()[::2]}
        result = {name: groups(problem, options, **given) for name, options in GROUPS.items()}
        result["beside"] = beside(problem, replicas=jaxche.devices()[::2])
        with mock.patch.object(_arguments, "can_overlap", return_value=True):  # as where all train on accelerators
            result["kinds"] = kinds(problem, replicas=jaxche.devices()[::2])
    elif what == "late":
        result = late(problem)
    elif what == "pipelines":
        result = pipelines(problem)
    elif what.startswith("evaluate"):
        result = evaluate(problem, islands="islands" in what)
    elif what == "faults":
        result = faults(problem)
    else:
        trainer = jaxche.Trainer(problem.loss, optax.adam(0.05))
        trainer.fit(trainer.init(problem.params, problem.model_state), Torn(problem.data, range(1, 99)), progress=False)
        result = None
    (Path(folder) / f"{jax.process_index()}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
