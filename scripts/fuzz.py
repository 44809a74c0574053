"""Trains with random combinations of arguments, and checks what has to hold for all of them.

    python scripts/fuzz.py                            # one minute, from case 0 on
    python scripts/fuzz.py --first 1000 --minutes 20
    python scripts/fuzz.py --first 1517 --cases 1     # one case again

A case is a number: it determines the policy and the other arguments of the trainer, the optimizer, the loss, the data,
the fleet and the end of the run. On the clock of a virtual fleet (three of four cases), a run that is interrupted after
one of its rounds and continued from its checkpoints has to end as the whole run did, bit for bit, with the same record.
In real time (the others) some batches are read late, so that replicas leave batches to later rounds. In both a replay
of the record has to end equal bit for bit, every epoch has every example once, and a dry run changes nothing.

A combination that the trainer refuses with a ValueError before the first step is no failure; these are counted.
Programs are compiled without optimizations, which takes less time.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import logging
import os
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxche
from jaxche.cadence import Slowdown

_FEATURES = 6
# A read takes so long beyond the time limit of a round.
_LATE_S = 0.35
_LATE = 0.06  # of the reads
_PACE_MS = 5.0  # in real time at least, because a pace that a busy machine cannot keep is refused

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(0.05),
    "momentum": lambda: optax.sgd(0.05, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(0.02),
    "adamw with a schedule": lambda: optax.adamw(optax.cosine_decay_schedule(0.05, 40)),
    "clipped adam": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.02)),
    "lion": lambda: optax.lion(0.01),
    "adafactor": lambda: optax.adafactor(0.02),
    "accumulated": lambda: optax.MultiSteps(optax.adam(0.02), 3),
    "with noise": lambda: optax.chain(optax.add_noise(0.01, 0.5, 0), optax.sgd(0.05)),
    "ema": lambda: optax.chain(optax.ema(0.9), optax.sgd(0.05)),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(optax.linear_schedule(0.05, 0.01, 30)),
    "skips": lambda: optax.apply_if_finite(optax.adam(0.02), 3),
    "schedule-free": lambda: optax.contrib.schedule_free_adamw(0.02),
}


def _errors(params: Any, batch: Any) -> Any:
    return batch["x"] @ params["w"] + params["b"] - batch["y"]


def plain(params: Any, batch: Any) -> Any:
    return jnp.mean(_errors(params, batch) ** 2)


def with_key(params: Any, batch: Any, rng: Any) -> Any:
    return jnp.mean((_errors(params, batch) * jax.random.bernoulli(rng, 0.8, batch["y"].shape)) ** 2)


def with_state(params: Any, batch: Any, model_state: Any) -> Any:
    mean = 0.9 * model_state["mean"] + 0.1 * jnp.mean(_errors(params, batch))
    return jnp.mean((_errors(params, batch) - mean) ** 2), ({}, {"mean": mean, "steps": model_state["steps"] + 1})


def weighted(params: Any, batch: Any) -> Any:
    return jaxche.Weighted(jnp.sum(batch["mask"] * _errors(params, batch) ** 2), jnp.sum(batch["mask"]))


def with_metrics(params: Any, batch: Any) -> Any:
    positive = jaxche.Weighted(jnp.sum(batch["mask"] * (batch["y"] > 0)), jnp.sum(batch["mask"]))
    return plain(params, batch), {"mean": jnp.mean(jnp.abs(_errors(params, batch))), "positive": positive}


def with_outputs(params: Any, batch: Any) -> Any:
    return plain(params, batch), {"id": batch["id"]}


LOSSES = (plain, with_key, with_state, weighted, with_metrics, with_outputs)


@dataclass(frozen=True)
class Case:
    """What one number stands for."""

    number: int
    speeds: tuple[float, ...]  # ms a batch
    fleet: dict[str, Any] | None  # arguments of the virtual fleet, None in real time
    options: dict[str, Any]  # of the trainer
    tx: str
    loss: Callable[..., Any]
    data: str
    batches: int
    batch_size: int
    end: dict[str, Any]
    saves: dict[str, Any]  # the frequency of checkpoints
    evaluates: dict[str, Any]
    devices: int = 1  # of each replica
    strategy: str = "NoShard"
    crash: int = 0
    ema: float | None = None
    outputs: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, number: int) -> Case:
        """The case of this number."""
        r = random.Random(number)
        size, virtual = r.choice([1, 2, 2, 3, 4, 4]), r.random() < 0.75
        speeds = tuple(r.choice([5.0, 10.0, 20.0, 20.0, 40.0, 80.0]) for _ in range(size))
        fleet = {
            "sync_ms": r.choice([0.0, 0.2, 5.0, 11.0, 100.0]),
            "fixed_ms": r.choice([0.0, 0.0, 1.0, 2.0]),
            "jitter": r.choice([0.0, 0.0, 0.05]),
            "slowdown": r.choice([None, None, Slowdown(r.randrange(size), r.randrange(1, 6), r.choice([0.5, 3.0]))]),
            "link_mbit": r.choice([None, None, 1.0, 100.0]),
        }
        policy = r.choice(["cadence", "cadence", "sync", "async", "auto", "auto"])
        options = {
            name: r.choice(values) for name, (probability, values) in _OPTIONS.items() if r.random() < probability
        }
        if size != 4:
            options.pop("groups", None)
        if policy != "sync":
            options.pop("joined_batches", None)
        count = r.randrange(1, 50)
        end = r.choice([{"epochs": 1}, {"epochs": 2}, {"epochs": 3}, {"max_steps": count}, {"max_examples": 4 * count}])
        every = r.choice([None, 1, 2, 3, {"steps": r.randrange(1, 9)}, {"examples": r.randrange(4, 40)}, {"epochs": 1}])
        saves = {"checkpoint_every": jaxche.Every(**every)} if isinstance(every, dict) else {"every": every}
        return cls(
            number,
            speeds,
            fleet if virtual else None,
            {"policy": policy, **options},
            r.choice(list(OPTIMIZERS)),
            r.choice(LOSSES),
            r.choice(["batches", "ragged", "list", "stream", "stream with a position"]),
            batches=r.choice([1, 3, 7, 12, 20]),
            batch_size=r.choice([2, 4, 6, 8] if size < 3 else [1, 3, 4, 8]),
            end=end if virtual else {"epochs": r.choice([1, 2])},
            saves=saves,
            evaluates=r.choice([{}, {}, {"eval_every": jaxche.Every(steps=r.randrange(1, 9))}]),
            devices=r.choice([1, 1, 1, 2]) if size < 3 else 1,
            strategy=r.choice(["FullShard", "ShardGradOp", "NoShard"]),
            crash=r.randrange(9),
            ema=r.choice([None, 0.05, 0.2, 0.5]),
        )

    def arrays(self) -> dict[str, np.ndarray]:
        """All examples."""
        count = self.batches * self.batch_size - (self.batch_size // 2 if self.data == "ragged" else 0)
        rng = np.random.default_rng(0)
        x = rng.normal(size=(count, _FEATURES)).astype(np.float32)
        y = (x @ np.arange(_FEATURES)).astype(np.float32)
        return {"x": x, "y": y, "mask": (rng.random(count) < 0.7).astype(np.float32), "id": np.arange(count)}

    def source(self, start: int) -> Any:
        """The data; in real time some reads are late, others at each ``start``."""
        arrays, size = self.arrays(), self.batch_size
        if self.fleet is not None and self.data in ("batches", "ragged"):
            return jaxche.Batches(arrays, batch_size=size)
        count = len(arrays["y"])
        batches = [{name: x[i : i + size] for name, x in arrays.items()} for i in range(0, count, size)]
        reads = _Reads(batches, None if self.fleet is not None else random.Random(hash((self.number, start))))
        if self.data == "stream":
            return jaxche.Stream(lambda epoch: (reads[i] for i in _rotated(len(batches), epoch)))
        return jaxche.Stream(_Positions(batches)) if self.data == "stream with a position" else reads

    def trainer(self) -> tuple[jaxche.Trainer, jaxche.TrainerState]:
        """The trainer and its state before the first round; ValueError for what it refuses."""
        options, wide, devices = dict(self.options), self.devices > 1, jax.devices()
        if "outer" in options:
            options["outer"] = optax.sgd(0.7, momentum=0.9, nesterov=True)
        if "scaling" in options:
            options["scaling"] = getattr(jaxche, options["scaling"])()
        if self.loss is with_outputs:
            options["outputs"] = lambda info, batches: self.outputs.extend(batches)
        if self.fleet is not None:
            options["fleet"] = jaxche.VirtualFleet(self.speeds, **self.fleet)
        else:
            options["pace_ms"] = [max(_PACE_MS, ms / 4) for ms in self.speeds]
        replicas: Sequence[Any] = devices[: len(self.speeds)]
        if wide:
            options["strategy"] = strategy = getattr(jaxche, self.strategy)()
            replicas = [strategy.mesh(devices[2 * i : 2 * i + 2]) for i in range(len(self.speeds))]
        trainer = jaxche.Trainer(self.loss, OPTIMIZERS[self.tx](), replicas=replicas, ema=self.ema, **options)
        params = {"w": jnp.zeros(_FEATURES), "b": jnp.zeros(())}
        has_state = self.loss is with_state
        return trainer, trainer.init(params, {"mean": jnp.zeros(()), "steps": jnp.int32(0)} if has_state else None)

    def train(self, folder: Path, start: int, crash: int | None = None) -> Run:
        """Train in a folder of checkpoints, interrupted after the round ``crash``."""
        trainer, state = self.trainer()
        saves = dict(self.saves)
        checkpoints = jaxche.Checkpoints(folder, every=saves.pop("every", None))
        validation = {"validation": jaxche.Batches(self.arrays(), self.batch_size)} if self.evaluates else {}

        def interrupt(state: Any, info: jaxche.RoundInfo) -> None:
            if info.round == crash:
                raise Crash

        options = {"checkpoints": checkpoints, **saves, **validation, **self.evaluates, **self.end}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "an outer optimizer over only")
            state, history = trainer.fit(state, self.source(start), progress=False, callbacks=[interrupt], **options)
        return Run(state, history, arrays_of(state))


_OPTIONS: dict[str, tuple[float, list[Any]]] = {
    "average": (0.2, ["parameters", "gradients"]),
    "merge": (0.3, ["steps", "batch", "fednova"]),
    "opt_state": (0.4, ["average", "local", "reset"]),
    "outer": (0.15, ["nesterov"]),
    "wire": (0.3, ["bfloat16", "int8", "int4", "auto"]),
    "overlap": (0.25, [0.25, 0.5]),
    "groups": (0.15, [[[0, 1], [2, 3]]]),
    "rows": (0.3, ["speed", "equal"]),
    "joined_batches": (0.2, [1, 2, 3, 5]),
    "scaling": (0.2, ["AdaScale", "SqrtScale"]),
    "max_rows": (0.2, [2, 4, 16]),
    "seed": (0.15, [7]),
}


class Crash(Exception):
    """The interruption of a run."""


class Run(NamedTuple):
    """A run that has ended."""

    state: jaxche.TrainerState
    history: jaxche.History
    arrays: Any  # on the host

    @property
    def place(self) -> tuple[Any, ...]:
        """How far it came."""
        state = self.state
        return state.round, state.steps, state.epoch, state.cursor, state.examples, state.pending_batches

    @property
    def record(self) -> list[str]:
        """Its rounds; NaN is equal to NaN in a text."""
        return [repr((one.round, one.counts, one.rows, one.loss, one.validation)) for one in self.history]


class _Reads:
    """Batches, some of which are late."""

    def __init__(self, batches: Sequence[Any], late: random.Random | None):
        self._batches, self._late = batches, late

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Any:
        if self._late is not None and self._late.random() < _LATE:
            time.sleep(_LATE_S)
        return self._batches[index]


class _Positions:
    """A source of batches whose iterators have a state."""

    def __init__(self, batches: Sequence[Any]):
        self._batches = batches

    def __iter__(self) -> _Position:
        return _Position(self._batches)


class _Position:
    def __init__(self, batches: Sequence[Any]):
        self._batches, self._next = batches, 0

    def __iter__(self) -> _Position:
        return self

    def __next__(self) -> Any:
        if self._next == len(self._batches):
            raise StopIteration
        self._next += 1
        return self._batches[self._next - 1]

    def get_state(self) -> int:
        return self._next

    def set_state(self, state: int) -> None:
        self._next = state


def _rotated(count: int, epoch: int) -> Iterator[int]:
    return ((i + epoch) % count for i in range(count))


def arrays_of(state: jaxche.TrainerState) -> Any:
    """What a run has trained, on the host."""
    averages = [local.ema for local in state.merged().local_states]
    return jax.device_get((state.params, state.opt_state, state.model_state, averages))


def is_same(a: Any, b: Any) -> bool:
    """Whether two trees are equal bit for bit."""

    def data(x: Any) -> bytes:
        return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x).tobytes()

    return all(data(x) == data(y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def refusal(case: Case) -> str | None:
    """Why the trainer refuses a case before the first step, if it does."""
    try:
        trainer, state = case.trainer()
        trainer.fit(state, case.source(start=0), dry_run=True, progress=False)
    except ValueError as error:
        return str(error)
    return None


def failures(case: Case) -> list[str]:
    """What does not hold for a case that is not refused."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        case.outputs.clear()
        whole = case.train(Path(folder) / "whole", start=0)
        found += of_end(case, whole)
        rounds = [info.round for info in whole.history]
        cut = Path(folder) / "cut"
        with contextlib.suppress(Crash):
            case.train(cut, start=1, crash=rounds[min(case.crash, len(rounds) - 1)])
        again = case.train(cut, start=2)
        if case.fleet is not None:
            found += [f"ended at {again.place}, and the whole run at {whole.place}"] * (again.place != whole.place)
            if not is_same(again.arrays, whole.arrays):
                found.append("the continued run ended with other arrays than the whole run")
            if again.record != whole.record:
                found.append("the continued run has another record than the whole run")
        elif again.place[1:] != whole.place[1:]:
            found.append(f"continued to {again.place}, and the whole run to {whole.place}")
        trainer, begin = case.trainer()
        for run, name in ((whole, "whole"), (again, "cut")):
            record = jaxche.History.from_json(Path(folder) / name / "history.jsonl")
            state, _ = trainer.replay(begin, case.source(start=3), record)
            if not is_same(arrays_of(state), run.arrays):
                found.append(f"the replay of the {name} run ended with other arrays")
        after, _ = trainer.fit(begin, case.source(start=4), dry_run=True, progress=False)
        if not is_same(jax.device_get(begin.params), jax.device_get(after.params)):
            found.append("a dry run has changed the parameters")
    return found


def of_end(case: Case, run: Run) -> list[str]:
    """What is wrong at the end of a whole run."""
    state, found, size = run.state, [], len(case.arrays()["y"])
    rows = [x for x in jax.tree.leaves(run.arrays[0]) if (x != x[:1]).any()]
    found += ["replicas have different parameters"] * bool(rows)
    wanted = {
        "epochs": lambda n: (state.epoch, state.cursor, state.examples) == (n, 0, n * size),
        "max_steps": lambda n: state.steps == n,
        "max_examples": lambda n: state.examples >= n,
    }
    found += [f"ended at {run.place} with {case.end}" for name, n in case.end.items() if not wanted[name](n)]
    if sum(info.examples for info in run.history) != state.examples:
        found.append("the examples of the rounds do not add up")
    if case.loss is with_outputs:
        seen = collections.Counter(int(i) for batch in case.outputs for i in np.asarray(batch.values["id"]))
        most = max(seen.values()) - min(seen.values()) if len(seen) == size else max(seen.values())
        if seen.total() != state.examples or most > 1:
            found.append(f"examples were taken {min(seen.values())} to {max(seen.values())} times")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--cases", type=int, help="how many; by default as many as the time allows")
    parser.add_argument("--minutes", type=float, default=1.0, help="begin no case after this time, without --cases")
    args = parser.parse_args()
    os.environ["XLA_FLAGS"] = f"--xla_backend_optimization_level=0 {os.environ.get('XLA_FLAGS', '')}"
    jax.config.update("jax_num_cpu_devices", 4)
    with tempfile.TemporaryDirectory() as cache:  # a case compiles the same programs several times
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        return run(args)


def run(args: argparse.Namespace) -> int:
    """Run the cases and return the exit code."""
    logging.getLogger("jaxche").setLevel(logging.ERROR)
    until, number, failed = time.monotonic() + 60 * args.minutes, args.first, 0
    refused: collections.Counter[str] = collections.Counter()
    while number < args.first + args.cases if args.cases else time.monotonic() < until:
        case = Case.of(number)
        number, found = number + 1, []
        try:
            if reason := refusal(case):
                refused[reason[:80]] += 1
            else:
                found = failures(case)
        except Exception:
            found = [traceback.format_exc()]
        for one in found:
            print(f"case {case.number}: {one}\n{replace(case, outputs=[])}", flush=True)
        failed += bool(found)
    total = number - args.first
    print(f"{total} cases: {failed} failed, {refused.total()} refused")
    for text, count in refused.most_common():
        print(f"  {count} x {text}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
