"""Processes with slow links between them: what a merge costs there, and what is left of the free-running rate.

Each process runs in a network namespace of its own. Links have a rate (``tc tbf``) and a round trip (a relay between
the namespaces that keeps every packet for half of it, because few kernels have ``netem``). Steps are padded to a pace.
Needs root, and iproute2 (``apt install iproute2``); where it cannot run it says why and ends with code 77.

    python scripts/slow_link.py                                  # 2 processes, 2 million parameters, 3 links
    python scripts/slow_link.py --processes 2 4 --millions 2 20 50 --links 1gbit/20ms --adam
    python scripts/slow_link.py --growth                         # the anchor grows until merges are cheap
    python scripts/slow_link.py --torch-python venv/bin/python   # an interpreter with torch and torchft: its DiLoCo too

One line is one arm: *of free* is the steps done over those that the paces allow, *merge* what a round takes beyond
its slowest replica, *hidden* what a merge took beside steps, *MB* what a process sent in a merge. ``all-reduce`` is one
bare all-reduce of the parameters in float32. The arms of torchft take equal steps on all replicas, so compare them at
``--slower 1``; ``torchft Streaming DiLoCo`` has two fragments, each merged beside half of the steps to the next. To add
an arm, add a line to ``ARMS``.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import select
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# Options of jaxche.Trainer.
ARMS: dict[str, dict[str, Any]] = {
    "float32": {},
    "local": {"opt_state": "local"},
    "bfloat16": {"wire": "bfloat16"},
    "int8": {"wire": "int8"},
    "int4": {"wire": "int4"},
    "overlap": {"overlap": 0.5},
    "overlap int8": {"overlap": 0.5, "wire": "int8"},
    "overlap int4": {"overlap": 0.5, "wire": "int4"},
}
BARE = "all-reduce"
# Of peers/torch_link.py.
TORCH = ("torchft DiLoCo", "torchft Streaming DiLoCo")
# Of the mode --growth: the link, the paces, the target of the tuner, the steps of both processes.
GROWTH_LINK, GROWTH_PACES, TARGET, STEPS = "200mbit/0ms", (20.0, 30.0), 0.05, 2500
CANNOT, PORT = 77, 9751


class Link(NamedTuple):
    """The link of a machine: a rate as tc has it, or none, and the round trip to another machine."""

    rate: str
    round_trip_ms: float
    loss: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Link:
        rate, _, trip = text.partition("/")
        return cls(rate, float((trip or "0ms").removesuffix("ms")))

    def __str__(self) -> str:
        return "no limit" if self.rate == "none" else f"{self.rate}/{self.round_trip_ms:g}ms"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2], help="default 2")
    parser.add_argument("--millions", type=float, nargs="+", default=[2], help="of parameters (default 2)")
    links = [Link("none", 0.0), Link("1gbit", 20.0), Link("100mbit", 100.0)]
    parser.add_argument("--links", nargs="+", type=Link.parse, default=links, help="rate/round trip, as 1gbit/20ms")
    arms = ", ".join(f'"{name}"' if " " in name else name for name in (BARE, *ARMS))
    parser.add_argument(
        "--arms", nargs="+", metavar="ARM", choices=[BARE, *ARMS], default=[BARE, *ARMS], help=f"default: {arms}"
    )
    parser.add_argument(
        "--slower", type=float, default=1.5, help="a step of every other process, relative (default 1.5)"
    )
    parser.add_argument("--round-s", type=float, default=2.0, help="length of the steps of a round (default 2)")
    parser.add_argument("--rounds", type=int, default=3, help="measured, after two more (default 3)")
    parser.add_argument("--adam", action="store_true", help="instead of SGD")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--torch-python", help="an interpreter with torch and torchft, for their DiLoCo; with SGD only")
    parser.add_argument("--growth", action="store_true", help=f"the cadence on a link of {GROWTH_LINK}")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of --growth, of both together (default {STEPS})")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--relay", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.torch_python and args.adam:
        parser.error("--torch-python has no arms with --adam; leave one of them out")
    if args.relay:
        delay_ms, loss, is_calm, *ports = args.relay
        return relay(float(delay_ms), float(loss), is_calm == "calm", ports)
    if args.worker:
        return worker(Path(args.worker))
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        print("slow_link: skipped: needs root, and ip and tc of iproute2")
        return CANNOT
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # with the processes and their namespaces
    try:
        return growth(args.steps) if args.growth else benchmark(args)
    except subprocess.CalledProcessError as error:
        print(f"slow_link: skipped: {' '.join(error.cmd)}: {error.stderr.strip()}")
        return CANNOT


def benchmark(args: argparse.Namespace) -> int:
    """Every arm at every size over every link, one line each."""
    width = max(map(len, (*args.arms, *(TORCH if args.torch_python else ())))) + 1
    print(f"processes millions link          {'arm':{width}s} of free  steps ms  merge ms hidden ms     MB  loss")
    found = []
    for processes in args.processes:
        for link in args.links:
            for millions in args.millions:
                # The moments of Adam are a pass over memory; SGD leaves alone what the loss does not use.
                pace = max(20.0, 7.5 * millions * processes if args.adam else 0.0)
                job = {name: getattr(args, name) for name in ("arms", "rounds", "adam")}
                job |= {"size": round(millions * 1e6), "steps_ms": args.round_s * 1e3}
                paces = [pace * (args.slower if rank % 2 else 1.0) for rank in range(processes)]
                rows = run(link, paces, job)
                if args.torch_python:
                    rows += run(link, paces, job | {"torch_arms": TORCH}, args.torch_python)
                for row in rows:
                    row = {"processes": processes, "millions": millions, "link": str(link)} | row
                    found.append(row)
                    times = f"{row['steps_ms']:9.0f} {row['merge_ms']:9.0f} {row['hidden_ms']:9.0f}"
                    print(
                        f"{processes:9d} {millions:8g} {link!s:13s} {row['arm']:{width}s} {row['of_free']:7.1%} "
                        f"{times} {row['mb']:6.1f}  {row['loss']:.4f}",
                        flush=True,
                    )
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def growth(steps: int) -> int:
    """The rounds of a cadence, and whether the last ones merge within the target."""
    rounds = run(Link.parse(GROWTH_LINK), GROWTH_PACES, {"growth": steps})
    print(f"link of {GROWTH_LINK}, a step in {' and '.join(f'{p:g}' for p in GROWTH_PACES)} ms, target {TARGET:.0%}")
    print("round anchor    counts  round ms  merge ms merge share efficiency")
    for one in rounds:
        counts = ":".join(map(str, one["counts"]))
        print(
            f"{one['round']:5d} {one['anchor']:6d} {counts:>9} {one['period_ms']:9.0f} {one['sync_ms']:9.1f} "
            f"{one['sync_ms'] / one['period_ms']:11.1%} {one['efficiency']:10.1%}"
        )
    first, last = rounds[:2], rounds[-4:-1]  # the very last is cut by the end of the epoch
    before, after = (of_free(part, GROWTH_PACES) for part in (first, last))
    share = sum(one["sync_ms"] for one in last) / sum(one["period_ms"] for one in last)
    print(f"efficiency {before:.1%} before and {after:.1%} after; merging takes {share:.1%} of the last rounds")
    # Whole counts make replicas wait a little too; that is in the target of the steady tuner, not in the share.
    good = share <= 1.2 * TARGET and after > before and rounds[-2]["anchor"] > rounds[0]["anchor"]
    return 0 if good else 1


def of_free(rounds: Sequence[dict[str, Any]], paces: Sequence[float]) -> float:
    """Steps done over what the paces allow."""
    return sum(sum(r["counts"]) for r in rounds) / sum(r["period_ms"] * sum(1 / p for p in paces) for r in rounds)


def run(
    link: Link, paces: Sequence[float], job: dict[str, Any], torch_python: str | None = None
) -> list[dict[str, Any]]:
    """What a job prints, run by one process a pace with this link between them; with an interpreter, by torchft."""
    from jaxche.cluster import TUNABLES, with_tunables

    with machines(link, len(paces)) as names, tempfile.TemporaryDirectory(prefix="jaxche-link-") as folder:
        (Path(folder) / "job.json").write_text(json.dumps(job | {"paces": list(paces)}))
        children: list[subprocess.Popen[bytes]] = []
        try:
            for rank, (name, pace) in enumerate(zip(names, paces, strict=True)):
                env = os.environ | {TUNABLES: with_tunables(os.environ.get(TUNABLES, ""))}
                if torch_python:
                    env |= {"MASTER_ADDR": address(0), "MASTER_PORT": str(PORT), "ADDRESS": address(rank)}
                    env |= {"RANK": str(rank), "WORLD_SIZE": str(len(paces)), "GLOO_SOCKET_IFNAME": "veth0"}
                    env |= {"RUST_LOG": "error", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # they log each merge and connection
                    program = [torch_python, str(Path(__file__).with_name("peers") / "torch_link.py"), folder]
                else:
                    env |= {
                        "JAX_PLATFORMS": "cpu",
                        "JAXCHE_COORDINATOR": f"{address(0)}:{PORT}",
                        "JAXCHE_NUM_PROCESSES": str(len(paces)),
                        "JAXCHE_PROCESS_ID": str(rank),
                        "JAXCHE_PACE_MS": str(pace),
                    }
                    program = [sys.executable, __file__, "--worker", folder]
                command = ["ip", "netns", "exec", name, "taskset", "-c", str(rank % (os.cpu_count() or 1)), *program]
                # Gloo prints its connections there.
                children.append(subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL))
            end = time.monotonic() + 1800
            while None in (codes := [child.poll() for child in children]) and not any(codes):
                if time.monotonic() > end:
                    raise SystemExit("slow_link: processes have not ended within 1800 s")
                time.sleep(0.05)
        finally:
            for child in children:
                if child.poll() is None:
                    child.kill()
        if any(codes):
            raise SystemExit(f"slow_link: processes ended with {codes}")
        return json.loads((Path(folder) / "found.json").read_text())


# The machines: namespaces, and the relay that joins them.


def address(rank: int) -> str:
    return f"10.77.0.{rank + 1}"


def relay_of(names: Sequence[str]) -> int:
    """The process of the relay between namespaces."""
    command = ["ip", "netns", "pids", _hub(names)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[0])


def _hub(names: Sequence[str]) -> str:
    return f"{names[0].rpartition('-')[0]}-hub"


@contextlib.contextmanager
def machines(link: Link, count: int, is_calm: bool = False) -> Iterator[list[str]]:
    """The names of as many namespaces, joined by links of this rate, round trip and loss.

    With ``is_calm`` packets are late only between two SIGUSR1 to the relay, and lost only between two SIGUSR2.
    """
    names = [f"jaxche{os.getpid()}-{rank}" for rank in range(count)]
    hub = _hub(names)
    ports, relaying = [f"port{rank}" for rank in range(count)], None

    def do(*words: str) -> None:
        subprocess.run(words, check=True, capture_output=True, text=True)

    try:
        do("ip", "netns", "add", hub)
        for rank, (name, port) in enumerate(zip(names, ports, strict=True)):
            do("ip", "netns", "add", name)
            do("ip", "link", "add", "veth0", "netns", name, "type", "veth", "peer", "name", port, "netns", hub)
            do("ip", "-n", hub, "link", "set", port, "up")
            do("ip", "-n", name, "link", "set", "lo", "up")
            do("ip", "-n", name, "addr", "add", f"{address(rank)}/24", "dev", "veth0")
            do("ip", "-n", name, "link", "set", "veth0", "up")
            if link.rate != "none":
                shape = f"tbf rate {link.rate} burst 256kb latency {500 + link.round_trip_ms:g}ms"
                do("tc", "-n", name, "qdisc", "add", "dev", "veth0", "root", *shape.split())
            # Gloo listens at the address of the name of this machine.
            hosts = Path("/etc/netns") / name / "hosts"
            hosts.parent.mkdir(parents=True)
            hosts.write_text(f"127.0.0.1 localhost\n{address(rank)} {os.uname().nodename}\n")
        if link.round_trip_ms or link.loss:
            words = [str(link.round_trip_ms / 2), str(link.loss), "calm" if is_calm else "always", *ports]
            command = [sys.executable, __file__, "--relay", *words]
            relaying = subprocess.Popen(["ip", "netns", "exec", hub, *command])
        else:
            do("ip", "-n", hub, "link", "add", "bridge0", "type", "bridge")
            do("ip", "-n", hub, "link", "set", "bridge0", "up")
            for port in ports:
                do("ip", "-n", hub, "link", "set", port, "master", "bridge0")
        yield names
    finally:
        if relaying is not None:
            relaying.terminate()
            relaying.wait()
        for name in (*names, hub):
            # Also a process that was started when a signal came.
            found = subprocess.run(["ip", "netns", "pids", name], check=False, capture_output=True, text=True)
            for pid in found.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
            shutil.rmtree(f"/etc/netns/{name}", ignore_errors=True)


def relay(delay_ms: float, loss: float, is_calm: bool, ports: Sequence[str]) -> int:
    """A switch between network devices that forwards packets after a delay, and drops this share of them.

    SIGUSR1 switches the delay on and off, and SIGUSR2 the loss; both are off at first if it is calm.
    """
    late, lossy = [not is_calm], [not is_calm]
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    signal.signal(signal.SIGUSR1, lambda *_: late.append(not late.pop()))
    signal.signal(signal.SIGUSR2, lambda *_: lossy.append(not lossy.pop()))
    rng = random.Random(0)
    os.nice(-10)
    # Of linux/if_packet.h and socket.h: packets keep their offload headers, so that one may be many segments of TCP.
    sol_packet, ignore_outgoing, vnet_header, header_bytes, receive_buffer_force = 263, 23, 15, 10, 33
    sockets = []
    for port in ports:
        one = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        one.setsockopt(sol_packet, vnet_header, 1)
        one.setsockopt(sol_packet, ignore_outgoing, 1)
        one.setsockopt(socket.SOL_SOCKET, receive_buffer_force, 64 << 20)
        one.bind((port, 3))  # packets of all protocols
        one.setblocking(False)
        sockets.append(one)
    behind: dict[bytes, socket.socket] = {}  # the port of each Ethernet address
    waiting: collections.deque[tuple[float, socket.socket, bytes]] = collections.deque()
    to, source = slice(header_bytes, header_bytes + 6), slice(header_bytes + 6, header_bytes + 12)
    while True:
        ready, _, _ = select.select(sockets, [], [], max(0.0, waiting[0][0] - time.monotonic()) if waiting else None)
        for one in ready:
            with contextlib.suppress(BlockingIOError):
                while True:
                    packet = one.recv(1 << 17)
                    behind[packet[source]] = one
                    if not lossy[0] or rng.random() >= loss:
                        waiting.append((time.monotonic() + (delay_ms / 1e3 if late[0] else 0.0), one, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, origin, packet = waiting.popleft()
            known = behind.get(packet[to])
            for target in [known] if known else [other for other in sockets if other is not origin]:
                with contextlib.suppress(OSError):  # a full queue drops packets
                    target.send(packet)


# A process of a run.


def worker(folder: Path) -> int:
    import jax

    import jaxche

    # One to train on, and one to merge on while the next steps run.
    jax.config.update("jax_num_cpu_devices", 2)
    jaxche.initialize(timeout_s=60)
    job = json.loads((folder / "job.json").read_text())
    found = grow(job["growth"]) if "growth" in job else [measure(arm, job) for arm in job["arms"]]
    if jax.process_index() == 0:
        (folder / "found.json").write_text(json.dumps(found))
    return 0


def measure(arm: str, job: dict[str, Any]) -> dict[str, Any]:
    """One arm: rounds of the same counts, the first two of which are not measured."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import jaxche

    size, paces = job["size"], job["paces"]
    if arm == BARE:
        return measure_bare(size, job["rounds"])
    counts = [max(1, round(job["steps_ms"] / pace)) for pace in paces]
    xs = np.random.default_rng(0).normal(size=(sum(counts) * (job["rounds"] + 3), 32)).astype(np.float32)
    data = jaxche.Batches(xs, batch_size=1)
    # Next to no arithmetic in a step: the loss is of a small linear map, and most parameters are only merged.
    params = {"map": np.zeros((32, 32), np.float32), "rest": np.zeros(size - 32 * 32, np.float32)}

    def loss(p: Any, x: Any) -> Any:
        return jnp.mean((x @ p["map"] - x) ** 2)

    tx = optax.adam(1e-3) if job["adam"] else optax.sgd(0.1)
    trainer = jaxche.Trainer(loss, tx, replicas=jax.devices()[::2], **ARMS[arm])
    state, _ = trainer.round(trainer.init(params), data, counts)
    state, before = state.merged(), sent_bytes()
    # The first of these rounds has no merge in flight, and its own ends in the next one.
    state, _ = trainer.round(state, data, counts)
    clock, infos = time.perf_counter(), []
    for _ in range(job["rounds"]):
        state, info = trainer.round(state, data, counts)
        infos.append(info)
    jax.block_until_ready(state.local_states)
    elapsed_ms = 1e3 * (time.perf_counter() - clock)
    jax.block_until_ready(trainer.params(state))
    return {
        "arm": arm,
        "of_free": sum(info.batches for info in infos) / (elapsed_ms * sum(1 / pace for pace in paces)),
        "steps_ms": statistics.mean(max(info.wall_ms) for info in infos),
        "merge_ms": statistics.median(info.sync_ms for info in infos),
        "hidden_ms": statistics.median(info.hidden_ms for info in infos),
        "mb": (sent_bytes() - before) / (len(infos) + 1) / 1e6,
        "loss": infos[-1].loss,
    }


def measure_bare(size: int, times: int) -> dict[str, Any]:
    """The time of one flat all-reduce of as many float32, and nothing else."""
    import jax
    import numpy as np
    from jax import lax
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = Mesh(np.array(jax.devices()[::2]), ("replica",))
    add = jax.shard_map(lambda x: lax.psum(x, "replica"), mesh=mesh, in_specs=P("replica"), out_specs=P(None))
    own = jax.device_put(np.ones((1, size), np.float32), jax.local_devices()[0])
    shape, sharding = (mesh.size, size), NamedSharding(mesh, P("replica"))
    whole = jax.make_array_from_single_device_arrays(shape, sharding, [own])
    program = jax.jit(add)
    program(whole).block_until_ready()
    before, took = sent_bytes(), []
    for _ in range(times):
        clock = time.perf_counter()
        program(whole).block_until_ready()
        took.append(1e3 * (time.perf_counter() - clock))
    merge_ms, mb = statistics.median(took), (sent_bytes() - before) / times / 1e6
    return {"arm": BARE, "of_free": 0.0, "steps_ms": 0.0, "merge_ms": merge_ms, "hidden_ms": 0.0, "mb": mb, "loss": 0.0}


def sent_bytes() -> int:
    """Bytes that this machine has sent, once all have left: it may have a sum before the others do."""
    path, sent = Path("/sys/class/net/veth0/statistics/tx_bytes"), -1
    while sent != (now := int(path.read_text())):
        sent = now
        time.sleep(0.2)
    return sent


def grow(steps: int, **fleet: Any) -> list[dict[str, Any]]:
    """The rounds of a cadence that starts small: without it merging would take most of the time.

    ``fleet`` are options of a trainer that runs on the clock of a virtual fleet.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import jaxche

    rng = np.random.default_rng(0)
    data = jaxche.Batches(rng.normal(size=(steps, 64)).astype(np.float32), batch_size=1)
    params = {"in": np.zeros((64, 4096), np.float32), "out": np.zeros((4096, 64), np.float32)}
    che = jaxche.ElChe(world_size=2, anchor=2, overhead_target=TARGET, tuner="steady")

    def loss(p: Any, x: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ p["in"]) @ p["out"] - x) ** 2)

    where = fleet or {"replicas": jax.devices()[::2]}
    trainer = jaxche.Trainer(loss, optax.sgd(0.1), che=che, **where)
    _, history = trainer.fit(trainer.init(params), data, progress=False)
    names = ("round", "anchor", "counts", "period_ms", "sync_ms", "efficiency")
    return [{name: getattr(info, name) for name in names} for info in history]


if __name__ == "__main__":
    sys.exit(main())
