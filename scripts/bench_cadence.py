"""How fast is a fleet of unequal replicas? jaxche against plain jit data parallelism, in the same run.

Every replica is a process whose steps are padded to a pace: compute is below the pace, so the fleet behaves like
devices of these speeds. All systems run in turn in the same processes, several times over; a figure is the median over
the turns. Efficiency is the rate over the sum of the rates the replicas reach without waiting, measured in the same
turn.

Processes pinned to a core each (the default) are the quieter fleet, but gloo then needs about 4 ms for any all-reduce,
and a step written by hand makes one per parameter array. With --no-pin an all-reduce takes well below 1 ms: the
stronger opponent.

    python scripts/bench_cadence.py                 # rates on both fleets, overhead of one replica
    python scripts/bench_cadence.py --no-pin        # the same with cheap all-reduces
    python scripts/bench_cadence.py --arrays 150    # only: updates of a model of many arrays, and the first
    python scripts/bench_cadence.py --islands       # only: replicas of two devices each, sharded, against unsharded
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fleet import fleet, title

FLEETS = ((20, 50), (20, 20, 40, 80))
POLICIES = ("sync", "cadence", "async")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5, help="turns over all systems (default 5)")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of one measurement (default 5)")
    parser.add_argument("--fleet", type=fleet, help="paces in ms instead of the two fleets, e.g. 20,50")
    parser.add_argument("--islands", action="store_true", help="only compare sharded islands with single devices")
    parser.add_argument("--arrays", type=int, help="only the time of updates of a model of so many small arrays")
    parser.add_argument("--no-pin", action="store_true", help="let each process run on any core")
    parser.add_argument("--json", type=Path, help="write all numbers there")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(args)

    results: dict[str, Any] = {}
    fleets = [args.fleet] if args.fleet else FLEETS
    if args.arrays:
        results["arrays"] = arrays = run("arrays", None, args)
        print_arrays(args.arrays, arrays)
    elif args.islands:
        for paces in fleets[:1]:
            results[f"islands {title(paces)}"] = islands = run("islands", paces, args)
            print_rates(paces, islands)
    else:
        for paces in fleets:
            results[f"rates {title(paces)}"] = rates = run("rates", paces, args)
            print_rates(paces, rates)
        results["overhead"] = overhead = run("overhead", None, args)
        print_overhead(overhead)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    return 0


def run(what: str, paces: Any, args: argparse.Namespace) -> Any:
    """Start the processes of one measurement and read what rank 0 wrote."""
    from jaxche.cluster import launch

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        flags = ["--turns", args.turns, "--seconds", args.seconds, "--arrays", args.arrays or 0, "--json", out]
        command = [sys.executable, __file__, "--worker", what, *map(str, flags)]
        if paces is None:  # one process as anybody would start it
            code = subprocess.run(command, env=os.environ | {"JAX_PLATFORMS": "cpu"}).returncode
        else:
            code = launch(command, len(paces), pace_ms=paces, env={"JAX_PLATFORMS": "cpu"}, pin=not args.no_pin)
        if code:
            sys.exit(code)
        return json.loads(out.read_text())


def worker(args: argparse.Namespace) -> int:
    import jax

    import jaxche

    if args.worker in ("islands", "arrays"):
        jax.config.update("jax_num_cpu_devices", 2)
    logging.getLogger("jaxche").setLevel(logging.ERROR)  # runs are compared with each other
    jaxche.initialize()
    measure = {
        "rates": measure_rates,
        "islands": measure_islands,
        "arrays": measure_arrays,
        "overhead": measure_overhead,
    }
    result = measure[args.worker](args)
    if jax.process_index() == 0:
        args.json.write_text(json.dumps(result))
    return 0


class Plain:
    """Data parallelism as people write it: one jitted step over a global batch, XLA adds the all-reduces.

    Its local work is padded to the pace before the step: the step itself then takes what it computes.
    """

    def __init__(self, task: Any, seed: int, pace_ms: float):
        import jax
        import optax
        from jax.sharding import AxisType, NamedSharding
        from jax.sharding import PartitionSpec as P

        mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
        self._everywhere, self._split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
        self.data, self.cursor, self.epoch = task.data, 0, 0

        @jax.jit
        def step(params: Any, opt_state: Any, batch: Any, index: Any) -> Any:
            rng = jax.random.fold_in(jax.random.key(seed), index)

            def loss(p: Any) -> Any:
                return _loss_only(task.loss_fn(p, batch, rng=rng))

            value, grads = jax.value_and_grad(loss)(params)
            updates, opt_state = task.tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, value

        self._step = step
        host = jax.tree.map(lambda x: jax.device_get(x), task.init(seed)[0])

        def place(tree: Any) -> Any:
            return jax.tree.map(lambda x: jax.make_array_from_process_local_data(self._everywhere, x), tree)

        self.params = place(host)
        self.opt_state = place(jax.device_get(task.tx.init(host)))
        jax.block_until_ready(step(self.params, self.opt_state, self._batch(0, 0), 0))  # compiles
        self._sleep_s = max(0.0, pace_ms / 1e3 - self._local_compute(task, host))

    def _local_compute(self, task: Any, params: Any) -> float:
        """What a step computes without the others: median of a few."""
        import jax

        device = jax.local_devices()[0]
        batch, params = jax.device_put((task.data[0], params), device)
        grad = jax.jit(jax.grad(lambda p, b: _loss_only(task.loss_fn(p, b, rng=jax.random.key(0)))))
        times = []
        for _ in range(8):
            start = time.perf_counter()
            jax.block_until_ready(grad(params, batch))
            times.append(time.perf_counter() - start)
        return statistics.median(times[2:])

    def _batch(self, epoch: int, index: int) -> Any:
        """This process's part of a global batch: the same exactly-once order as jaxche under sync."""
        import jax

        mine = min(index + jax.process_index(), len(self.data) - 1)
        local = self.data.epoch(epoch)[mine]
        return jax.tree.map(lambda x: jax.make_array_from_process_local_data(self._split, x), local)

    def run(self, batches: int) -> int:
        """About so many batches; each step takes one a replica."""
        import jax

        done = 0
        while done < batches:
            if self.cursor + jax.process_count() > len(self.data) - 1:  # the smaller last batch would not stack
                self.cursor, self.epoch = 0, self.epoch + 1
            time.sleep(self._sleep_s)
            batch = self._batch(self.epoch, self.cursor)
            index = self.epoch * len(self.data) + self.cursor
            self.params, self.opt_state, loss = self._step(self.params, self.opt_state, batch, index)
            jax.block_until_ready(loss)
            self.cursor += jax.process_count()
            done += jax.process_count()
        return done


class Jaxche:
    """The trainer under one policy; a cadence is tuned for throughput by name, everything else at its defaults."""

    def __init__(self, task: Any, policy: str, seed: int, **knobs: Any):
        import jaxche

        if policy != "sync" and (world := len(jaxche.devices())) > 1 and not knobs:
            che = jaxche.ElChe(world, 2, 0.015, tuner="steady")
            knobs = {"che": che, "opt_state": "local"}
        self.trainer = jaxche.Trainer(task.loss_fn, task.tx, policy=policy, seed=seed, **knobs)
        self.data = task.data
        self.state = self.trainer.init(*task.init(seed))
        self.rounds: list[Any] = []

    def run(self, batches: int) -> int:
        done = 0
        while done < batches:
            self.state, info = self.trainer.round(self.state, self.data)
            self.rounds.append(info)
            done += info.batches
        return done


def measure_rates(args: argparse.Namespace) -> dict[str, Any]:
    """Rates of all systems, interleaved."""
    from jaxche.cli._tasks import load

    task = load("mnist", batch_size=16)  # an epoch of 250 batches: its cut-off last round weighs less
    systems: dict[str, Any] = {"plain jit": Plain(task, 0, float(os.environ["JAXCHE_PACE_MS"]))}
    systems |= {policy: Jaxche(task, policy, 0) for policy in POLICIES}
    return interleave(args, task, systems)


def measure_islands(args: argparse.Namespace) -> dict[str, Any]:
    """The cadence of single devices and of islands of two, which shard the model between them."""
    import jax

    import jaxche

    task = small_task()
    firsts = [
        d for d in jax.devices() if d.id == min(e.id for e in jax.devices() if e.process_index == d.process_index)
    ]
    systems = {
        "cadence": Jaxche(task, "cadence", 0, replicas=firsts),
        "islands": Jaxche(task, "cadence", 0, strategy=jaxche.FullShard()),
    }
    return interleave(args, task, systems)


def small_task() -> Any:
    """Digits by a network of two layers: two fake devices on one core take a step of it well within a pace of 20 ms."""
    import jax
    import jax.numpy as jnp
    import optax

    from jaxche.cli._tasks import load

    def init(seed: int) -> Any:
        first, second = jax.random.split(jax.random.key(seed))
        weights = {"w": jax.random.normal(first, (64, 128)) / 8, "v": jax.random.normal(second, (128, 10)) / 11}
        return weights | {"b": jnp.zeros(128), "c": jnp.zeros(10)}, None

    def loss_fn(params: Any, batch: Any) -> Any:
        hidden = jax.nn.relu(batch["x"].reshape(-1, 64) @ params["w"] + params["b"])
        logits = hidden @ params["v"] + params["c"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    # An epoch of 360 batches: its cut-off last round weighs less.
    return dataclasses.replace(load("digits", batch_size=4), init=init, loss_fn=loss_fn)


def interleave(args: argparse.Namespace, task: Any, systems: dict[str, Any]) -> dict[str, Any]:
    """All systems in turn, several times; first what the replicas reach without waiting."""
    reference = systems["cadence"]
    turns: list[dict[str, Any]] = []
    for turn in range(args.turns + 1):  # the first one warms up and calibrates
        free = sum(reference.trainer.measure_rates(reference.state, task.data, args.seconds / 2))
        row: dict[str, Any] = {"free": free}
        for name, system in systems.items():
            _barrier()
            start = time.perf_counter()
            done = system.run(int(free * args.seconds * (0.45 if name in ("plain jit", "sync") else 0.95)))
            row[name] = done / (time.perf_counter() - start)
        if turn:
            turns.append(row)
    recent = {name: s.rounds[-20:] for name, s in systems.items() if isinstance(s, Jaxche)}
    about = {
        name: {
            "counts": list(statistics.mode(r.counts for r in rounds)),
            "sync_ms": statistics.median(r.sync_ms for r in rounds),
            "wait_ms": statistics.median(max(r.wait_ms) for r in rounds),
            "wall_ms": statistics.median(max(r.wall_ms) for r in rounds),
        }
        for name, rounds in recent.items()
    }
    return {"turns": turns, "about": about}


def measure_overhead(args: argparse.Namespace) -> dict[str, Any]:
    """One unpaced replica against a raw jitted loop over the same batches, interleaved."""
    import jax
    import optax

    import jaxche
    from jaxche.cli._tasks import load

    results = {}
    for name in ("mnist", "digits"):
        task = load(name)

        def raw_step(params: Any, opt_state: Any, batch: Any, index: Any, task: Any = task) -> Any:
            rng = jax.random.fold_in(jax.random.key(0), index)
            loss, grads = jax.value_and_grad(lambda p: _loss_only(task.loss_fn(p, batch, rng=rng)))(params)
            updates, opt_state = task.tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss

        step = jax.jit(raw_step, donate_argnums=(0, 1))
        params = jax.tree.map(jax.numpy.array, task.init(0)[0])
        opt_state = task.tx.init(params)
        trainer = jaxche.Trainer(task.loss_fn, task.tx)
        state = trainer.init(*task.init(0))
        turns = []
        for turn in range(2 * args.turns + 1):
            # The last, smaller batch is left out on both sides; the trainer's reader and the raw loop read alike.
            data = [task.data.epoch(turn)[i] for i in range(len(task.data) - 1)]
            start = time.perf_counter()
            for index in range(len(data)):
                params, opt_state, loss = step(params, opt_state, data[index], index)
            jax.block_until_ready(loss)
            middle = time.perf_counter()
            state, _ = trainer.fit(state, data, progress=False)
            end = time.perf_counter()
            if turn:
                turns.append({"raw": (middle - start) / len(data), "jaxche": (end - middle) / len(data)})
        results[name] = turns
    return results


def measure_arrays(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of an update of a model of many small arrays with Adam, on two devices of this process, and of the first.

    There is next to nothing to compute and to send, so this is what Python and the dispatch of programs take. The first
    update is the call that compiles.
    """
    import jax
    import numpy as np
    import optax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import jaxche

    shapes = itertools.cycle(((64,), (8, 8), (4, 16), (16, 4), (2, 32), (32, 2)))
    params = {f"w{i}": np.zeros(next(shapes), np.float32) for i in range(args.arrays)}
    tx, updates = optax.adam(1e-3), 30
    data = jaxche.Batches(np.ones((8 * updates * (args.turns + 2), 4), np.float32), batch_size=4)

    def loss_fn(params: Any, batch: Any) -> Any:
        return sum(w.sum() for w in params.values()) * batch.mean()

    mesh = jax.make_mesh((2,), ("data",))
    everywhere, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))

    @jax.jit
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        updates, opt_state = tx.update(jax.grad(loss_fn)(params, batch), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    class Raw:
        def __init__(self) -> None:
            self.state = jax.device_put((params, tx.init(params)), everywhere)

        def update(self) -> None:
            self.state = jax.block_until_ready(step(*self.state, jax.device_put(np.ones((8, 4), np.float32), split)))

    class Own:
        def __init__(self, **options: Any) -> None:
            self.trainer = jaxche.Trainer(loss_fn, tx, replicas=jax.devices()[:2], **options)
            self.state = self.trainer.init(params)

        def update(self) -> None:
            self.state, _ = self.trainer.round(self.state, data)

    systems = {"plain jit": Raw(), "sync": Own(policy="sync", rows="equal")}
    # One batch each, and a merge of parameters and moments.
    systems["cadence"] = Own(che=jaxche.ElChe(2, 1, tuner="seed", max_anchor=1))
    first: dict[str, float] = {}
    turns = []
    for turn in range(args.turns + 1):
        row = {}
        for name, system in systems.items():
            start = time.perf_counter()
            if not turn:
                system.update()
                first[name] = time.perf_counter() - start
            for _ in range(updates):
                system.update()
            row[name] = (time.perf_counter() - start) / updates
        if turn:
            turns.append(row)

    def saved(updates: int, every: int | None = None, saves: bool = True) -> float:
        """Seconds of an update under exact sync in a fit with checkpoints, the last save included."""
        trainer = jaxche.Trainer(loss_fn, tx, "sync", rows="equal", replicas=jax.devices()[:2])
        state, _ = trainer.fit(trainer.init(params), data, max_steps=2, progress=False)
        with tempfile.TemporaryDirectory() as folder:
            kept = jaxche.Checkpoints(folder, every) if saves else None
            start = time.perf_counter()
            trainer.fit(state, data, max_steps=2 * updates, progress=False, checkpoints=kept)
            return (time.perf_counter() - start) / updates

    many = 80 * args.turns
    fits = {"no checkpoints": saved(many, saves=False), "checkpoints": saved(many), "every=1": saved(20, every=1)}
    return {"turns": turns, "first": first, "fits": fits}


def _barrier() -> None:
    from jax.experimental import multihost_utils

    multihost_utils.sync_global_devices("bench")


def _loss_only(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


def print_rates(paces: Any, result: dict[str, Any]) -> None:
    turns = result["turns"]
    print(f"\nfleet {title(paces)} ms, {len(turns)} turns; medians (lowest to highest)")
    peer = next(name for name in turns[0] if name != "free")
    print(f"{'system':<12}{'batches/s':>10}{'efficiency':>12}{'range':>18}{'to ' + peer:>14}   counts, merge")
    for name in turns[0]:
        share = [turn[name] / turn["free"] for turn in turns]
        ratio = statistics.median(turn[name] / turn[peer] for turn in turns)
        about = result["about"].get(name)
        tail = f"   {':'.join(map(str, about['counts']))}, {about['sync_ms']:.1f} ms" if about else ""
        print(
            f"{name:<12}{statistics.median(t[name] for t in turns):>10.2f}{statistics.median(share):>12.3f}"
            f"{min(share):>10.3f} - {max(share):.3f}{ratio:>13.2f}x{tail}"
        )


def print_overhead(result: dict[str, Any]) -> None:
    print("\none unpaced replica against a raw jitted loop")
    for name, turns in result.items():
        raw = statistics.median(t["raw"] for t in turns) * 1e3
        own = statistics.median(t["jaxche"] for t in turns) * 1e3
        ratio = statistics.median(t["jaxche"] / t["raw"] for t in turns)
        print(f"{name:<12}raw {raw:7.3f} ms/step   jaxche {own:7.3f} ms/step   ratio {ratio:.3f}")


def print_arrays(number: int, result: dict[str, Any]) -> None:
    print(f"\nan update of a model of {number} arrays of 64 numbers, two devices of one process")
    for name in result["turns"][0]:
        ms = statistics.median(turn[name] for turn in result["turns"]) * 1e3
        print(f"{name:<12}{ms:7.2f} ms, the first one {result['first'][name]:5.2f} s")
    shown = ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in result["fits"].items())
    print(f"fit under sync: {shown}")


if __name__ == "__main__":
    sys.exit(main())
