"""Time of pipelines against theory, and bandwidth of wires against the operations under them.

The first table has stages whose tasks are padded to a wall time, so that they behave like devices of that speed, in
one process and with one process a stage. Their time is compared with (M + S - 1)/M times the work of perfectly split
stages, and the most activations that each stage kept with the peak of the schedule. The second table has the bandwidth
of each wire and of the bare operation under it, measured in turn in the same run. DataStore is compared with the
operations of obstore that any consumer needs: a create-only put of the same bytes, polling, get, delete. obstore
computes no checksum and makes no arrays.

    python scripts/bench_partitions.py
    python scripts/bench_partitions.py --only wires --mib 1,16
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PIPELINES = ((2, 4), (2, 16), (3, 8), (4, 8), (4, 16))
SCHEDULES = ("1f1b", "gpipe")
WIDTH, ROWS = 32, 4
WARM, STREAMS, STREAM = 8, 4, 5  # streams to be warm, streams in a turn, round trips in a stream
POLL_S = 50e-6  # polling interval of a consumer of bare objects


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("pipelines", "wires"), help="one of the tables")
    parser.add_argument("--turns", type=int, default=7, help="measurements of each figure (default 7)")
    parser.add_argument("--pace", default="20,40", help="ms of a forward and a backward task (default 20,40)")
    parser.add_argument("--mib", default="1,16", help="sizes for the wires in MiB (default 1,16)")
    parser.add_argument("--store", help="folder or bucket to measure DataStore in (default: a temporary folder)")
    parser.add_argument("--json", type=Path, help="write all numbers there")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(args)
    results: dict[str, Any] = {}
    if args.only in (None, "pipelines"):
        rows = [row for what in ("devices", "processes") for row in run(f"pipelines {what}", args)]
        results["pipelines"] = rows
        print_pipelines(rows, args.pace)
    if args.only in (None, "wires"):
        results["wires"] = run("wires devices", args) + run("wires processes", args)
        print_wires(results["wires"])
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    return 0


def run(what: str, args: argparse.Namespace) -> list[Any]:
    """Start the measurement, in one process or one a stage, and read the result of rank 0."""
    from jaxche.cluster import launch

    name, where = what.split()
    counts = [1] if where == "devices" else sorted({s for s, _ in PIPELINES}) if name == "pipelines" else [2]
    rows = []
    for count in counts:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out.json"
            flags = ["--worker", what, "--turns", args.turns, "--mib", args.mib, "--pace", args.pace, "--json", out]
            flags += ["--store", args.store or folder]
            # Not pinned: the sockets' threads work beside the computation, as they do on a real host.
            env = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            code = launch([sys.executable, __file__, *map(str, flags)], count, env=env, pin=False, prefix=False)
            if code:
                raise SystemExit(code)
            rows += json.loads(out.read_text())
    return rows


def worker(args: argparse.Namespace) -> int:
    """One process of a measurement."""
    import jax

    import jaxche

    name, where = args.worker.split()
    if where == "devices":
        jax.config.update("jax_num_cpu_devices", 4)
    else:
        jaxche.initialize(timeout_s=60)
    table = {"pipelines": pipelines, "wires": wires}[name](args)
    if jax.process_index() == 0:
        args.json.write_text(json.dumps(table))
    return 0


def timed(action: Callable[[], Any], turns: int) -> float:
    """Median wall time in ms of a blocking action, after one call to warm up."""
    times = []
    for _ in range(turns + 1):
        start = time.perf_counter()
        action()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[1:])


# Pipelines


def chain(n_stages: int, rows: int, width: int = WIDTH) -> tuple[Any, Any, Any, Any]:
    """Equal stages: one layer each."""
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(0)
    params = [{"w": rng.normal(size=(width, width)).astype(np.float32) / width**0.5} for _ in range(n_stages)]
    stages = [lambda p, x: jnp.tanh(x @ p["w"])] * n_stages
    batch = rng.normal(size=(rows, width)).astype(np.float32)
    return stages, lambda y, batch: jnp.mean((y - batch) ** 2), params, batch


def step(model: Any, params: Any, batch: Any) -> None:
    """One step, until its results are ready."""
    import jax

    jax.block_until_ready(model.value_and_grad(params, batch))


def pipelines(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Paced pipelines, in one process or with one stage in this process."""
    import jax

    import jaxche
    from jaxche.stages import SCHEDULES as BY_NAME
    from jaxche.stages import Pace, simulate_schedule

    table = []
    world = jax.process_count()
    pace = Pace(*map(float, args.pace.split(",")))
    for n_stages, micro_batches in PIPELINES:
        if world not in (1, n_stages):
            continue
        for schedule in SCHEDULES:
            stages, loss, params, batch = chain(n_stages, ROWS * micro_batches)
            local = None if world == 1 else [jax.process_index()]
            protocol, paces = jaxche.Pipeline(ROWS, schedule), [pace] * n_stages
            model = jaxche.Partitioned(stages, loss, protocol, local_stages=local, paces=paces)
            took = timed(functools.partial(step, model, params, batch), args.turns)
            simulation = simulate_schedule(BY_NAME[schedule](n_stages, micro_batches), [1] * n_stages, [1] * n_stages)
            work = micro_batches * sum(pace)
            theory = (micro_batches + n_stages - 1) / micro_batches * work
            peaks = gathered(model.peak_activations)
            row = {"where": "devices" if world == 1 else "processes", "stages": n_stages, "schedule": schedule}
            row |= {"micro_batches": micro_batches, "ms": took, "theory_ms": theory}
            table.append(row | {"peaks": peaks, "expected": simulation.peak})
            model.close()
    return table


def gathered(peaks: Any) -> list[int]:
    """The peaks of all stages, gathered from their processes."""
    import jax
    import numpy as np

    own = np.array([-1 if peak is None else peak for peak in peaks])
    if jax.process_count() == 1:
        return own.tolist()
    from jax.experimental import multihost_utils

    return np.max(multihost_utils.process_allgather(own), axis=0).tolist()


def print_pipelines(rows: list[dict[str, Any]], pace: str) -> None:
    print(f"\nPipelines of equal stages paced to {' ms forward and '.join(pace.split(','))} ms backward")
    print(
        f"{'where':<10}{'S':>3}{'M':>4}  {'schedule':<9}{'(M+S-1)/M work':>15}{'measured':>11}{'ratio':>7}  peak kept"
    )
    for row in rows:
        peaks = " ".join(map(str, row["peaks"]))
        expected = "as expected" if row["peaks"] == list(row["expected"]) else f"expected {row['expected']}"
        print(
            f"{row['where']:<10}{row['stages']:>3}{row['micro_batches']:>4}  {row['schedule']:<9}"
            f"{row['theory_ms']:>8.0f} ms{row['ms']:>8.1f} ms{row['ms'] / row['theory_ms']:>7.3f}  {peaks} ({expected})"
        )


# Wires: round trips, which one clock can time; one way is half of it.


def wires(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Each wire and the bare operation under it, in turn."""
    import jax

    measure = within if jax.process_count() == 1 else between
    sizes = [float(mib) for mib in args.mib.split(",")]
    rows = [row for mib in sizes for row in measure(mib, args.turns)]
    store = store_within if jax.process_count() == 1 else store_between
    return rows + [store(mib, args.turns, args.store) for mib in sizes]


def within(mib: float, turns: int) -> list[dict[str, Any]]:
    """Direct between devices of this process against ``device_put``."""
    import jax
    import jax.numpy as jnp

    import jaxche
    from jaxche.stages import Tag

    devices = jax.devices()[:2]
    x = jax.device_put(jnp.ones(int(mib * 2**18), jnp.float32), devices[0])
    wire = jaxche.Direct().wire([0, 1], 2, devices)

    def direct() -> None:
        wire.send(Tag(0, 0, "forward", 0), x)
        there = wire.receive(Tag(0, 0, "forward", 0), x, devices[1])
        wire.send(Tag(0, 0, "backward", 1), there)
        wire.receive(Tag(0, 0, "backward", 1), x, devices[0]).block_until_ready()

    def bare() -> None:
        jax.device_put(jax.device_put(x, devices[1]), devices[0]).block_until_ready()

    return [in_turn("Direct, devices", "device_put", direct, bare, mib, turns)]


def store_within(mib: float, turns: int, url: str) -> dict[str, Any]:
    """DataStore with trees of four arrays, against put, get and delete of obstore with objects of the same bytes.

    Both ends are in one process, and obstore in one thread, where it never waits for an object.
    """
    import itertools

    import jax

    import jaxche
    from jaxche.stages import Tag

    device, x, buffers = four_arrays(mib)
    protocol = jaxche.DataStore(url, run=f"bench-{time.time_ns()}")
    first, last = (protocol.wire([stage], 2, [device, device]) for stage in range(2))
    store = bare_store(url)
    numbers = itertools.count()

    def ours() -> None:
        step = next(numbers)
        first.send(Tag(step, 0, "forward", 0), x)
        last.send(Tag(step, 0, "backward", 1), last.receive(Tag(step, 0, "forward", 0), x, device))
        jax.block_until_ready(first.receive(Tag(step, 0, "backward", 1), x, device))
        first.finish(step)
        last.finish(step)

    def bare() -> None:
        for key in (f"{protocol.run}-there-{next(numbers)}", f"{protocol.run}-back-{next(numbers)}"):
            store.put(key, buffers, mode="create", use_multipart=False)
            store.get(key).bytes()
            store.delete(key)

    row = in_turn("DataStore, 1 process", "obstore, no waits", ours, bare, 4 * mib, turns)
    first.close()
    last.close()
    return row


def store_between(mib: float, turns: int, url: str) -> dict[str, Any]:
    """The same between two processes, where the consumer of bare objects polls for them."""
    import itertools

    import jax

    import jaxche
    from jaxche.stages import Tag

    me = jax.process_index()
    device, x, buffers = four_arrays(mib)
    run = f"bench-{mib:g}"
    wire = jaxche.DataStore(url, run=run).wire([me], 2, [device if stage == me else None for stage in range(2)])
    store = bare_store(url)
    numbers = itertools.count()

    def ours() -> None:
        step = next(numbers)
        there, back = Tag(step, 0, "forward", 0), Tag(step, 0, "backward", 1)
        if me == 0:
            wire.send(there, x)
            jax.block_until_ready(wire.receive(back, x, device))
        else:
            wire.send(back, wire.receive(there, x, device))
        wire.finish(step)

    def take(key: str) -> None:
        while True:
            try:
                store.get(key).bytes()
                break
            except FileNotFoundError:
                time.sleep(POLL_S)
        store.delete(key)

    def bare() -> None:
        step = next(numbers)
        for writer, key in enumerate((f"{run}-there-{step}", f"{run}-back-{step}")):
            if writer == me:
                store.put(key, buffers, mode="create", use_multipart=False)
            else:
                take(key)

    row = in_turn("DataStore, processes", "obstore", ours, bare, 4 * mib, turns)
    wire.close()
    return row


def four_arrays(mib: float) -> tuple[Any, list[Any], list[Any]]:
    """A device, four arrays on it, and their bytes."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    device = jax.local_devices()[0]
    x = [jax.device_put(jnp.full(int(mib * 2**18), i, jnp.float32), device) for i in range(4)]
    return device, x, [np.asarray(leaf).view(np.uint8) for leaf in x]


def bare_store(url: str) -> Any:
    """The obstore store of a URL."""
    from obstore import store

    return store.from_url(url) if "://" in url else store.LocalStore(url)


def between(mib: float, turns: int) -> list[dict[str, Any]]:
    """Direct between two processes, against the transfers of JAX."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    import jaxche
    from jaxche.stages import Tag

    me, here = jax.process_index(), jax.local_devices()[0]
    x = jnp.ones(int(mib * 2**18), jnp.float32)
    placed = [here if stage == me else None for stage in range(2)]
    wire = jaxche.Direct().wire([me], 2, placed)

    def direct() -> None:
        there, back = Tag(0, 0, "forward", 0), Tag(0, 0, "backward", 1)
        if me == 0:
            wire.send(there, x)
            wire.receive(back, x, here).block_until_ready()
        else:
            wire.send(back, wire.receive(there, x, here))

    mesh = Mesh(np.array([next(d for d in jax.devices() if d.process_index == p) for p in range(2)]), ("p",))
    sharded = jax.make_array_from_single_device_arrays((2, x.size), NamedSharding(mesh, P("p")), [x[None]])

    def over(pair: tuple[int, int]) -> Callable[[Any], Any]:
        def move(x: Any) -> Any:
            return jax.lax.ppermute(x, "p", [pair])

        return jax.jit(jax.shard_map(move, mesh=mesh, in_specs=P("p"), out_specs=P("p"), check_vma=False))

    there, back = over((0, 1)), over((1, 0))

    def bare() -> None:
        moved = there(sharded)
        moved.block_until_ready()  # two collectives in flight can deadlock the CPU client
        back(moved).block_until_ready()

    rows = [in_turn("Direct, processes", "ppermute (gloo)", direct, bare, mib, turns)]
    rows.append(in_turn("Direct, processes", "jax transfer", direct, by_transfer_server(x, me, here), mib, turns))
    wire.close()
    return rows


def by_transfer_server(x: Any, me: int, here: Any) -> Callable[[], None]:
    """A round trip by ``jax.experimental.transfer``: one process offers arrays, the other pulls them."""
    import itertools

    import jax
    from jax._src import distributed
    from jax.experimental import transfer
    from jax.sharding import SingleDeviceSharding

    server = transfer.start_transfer_server(here.client, "127.0.0.1:0", ["127.0.0.1:0"])
    client: Any = distributed.global_state.client
    client.key_value_set(f"bench/transfer/{x.size}/{me}", server.address())
    connection = server.connect(client.blocking_key_value_get(f"bench/transfer/{x.size}/{1 - me}", 60_000))
    like = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(here))]
    numbers = itertools.count(0, 2)

    def round_trip() -> None:
        number = next(numbers)
        if me == 0:
            server.await_pull(number, [x])
            connection.pull(number + 1, like)[0].block_until_ready()
        else:
            pulled = connection.pull(number, like)
            pulled[0].block_until_ready()
            server.await_pull(number + 1, pulled)

    return round_trip


def in_turn(
    name: str, peer: str, ours: Callable[[], None], bare: Callable[[], None], mib: float, turns: int
) -> dict[str, Any]:
    """MB/s of one wire and of its peer, a few round trips of each in turn, because the speed of the machine drifts.

    A few in a row, so that background work of a wire, such as deletes, counts as its own time.
    """
    times: dict[str, list[float]] = {"ours": [], "bare": []}
    actions = [("ours", ours), ("bare", bare)]
    for pair in range(WARM + turns * STREAMS):
        for who, action in actions if pair % 2 else reversed(actions):
            start = time.perf_counter()
            for _ in range(STREAM):
                action()
            times[who].append((time.perf_counter() - start) / STREAM)
    kept = {who: values[WARM:] for who, values in times.items()}
    rate = {who: 2 * mib * 2**20 / 1e6 / statistics.median(values) for who, values in kept.items()}
    parts = [{who: v[i : i + STREAMS] for who, v in kept.items()} for i in range(0, turns * STREAMS, STREAMS)]
    ratios = sorted(statistics.median(part["bare"]) / statistics.median(part["ours"]) for part in parts)
    spread = [ratios[len(ratios) // 4], ratios[(3 * len(ratios)) // 4]]
    row = {"wire": name, "peer": peer, "mib": mib, "mb_s": rate["ours"], "peer_mb_s": rate["bare"]}
    return row | {"ratio": statistics.median(ratios), "quartiles": spread}


def print_wires(rows: list[dict[str, Any]]) -> None:
    print("\nWires, one way of a round trip, against the bare operation; a ratio is the median over the turns, with")
    print(f"its quartiles; a turn is {STREAMS} times {STREAM} round trips of each")
    print(f"{'wire':<21}{'MiB':>5}{'MB/s':>8}   {'bare':<18}{'MB/s':>7}{'ratio':>7}  quartiles")
    for row in rows:
        low, high = row["quartiles"]
        print(
            f"{row['wire']:<21}{row['mib']:>5g}{row['mb_s']:>8.0f}   {row['peer']:<18}{row['peer_mb_s']:>7.0f}"
            f"{row['ratio']:>7.2f}  {low:.2f} to {high:.2f}"
        )


if __name__ == "__main__":
    sys.exit(main())
