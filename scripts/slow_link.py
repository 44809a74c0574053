"""Two machines with a slow link between them: the anchor grows until merging is below its target.

Two network namespaces are joined by a link of 200 Mbit/s (``tc tbf``), with a process in each; a step takes 20 ms on
one and 30 ms on the other, and the model is 2 MB. Without a cadence (one merge a step) the link would take most of the
time. Needs root, and iproute2 (``apt install iproute2``); where it cannot run it says why and ends with code 77.

    python scripts/slow_link.py                # a table of rounds, efficiency before and after
    python scripts/slow_link.py --rate 50mbit
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PACES, TARGET, STEPS = (20.0, 30.0), 0.05, 2500
CANNOT = 77


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="200mbit", help="of the link, as tc has it (default 200mbit)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of both together (default {STEPS})")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(Path(args.worker), args.steps)
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        print("slow_link: skipped: needs root, and ip and tc of iproute2")
        return CANNOT
    names = [f"jaxche{os.getpid()}-{side}" for side in "ab"]
    try:
        try:
            join(names, args.rate)
        except subprocess.CalledProcessError as error:
            print(f"slow_link: skipped: {' '.join(error.cmd)}: {error.stderr.strip()}")
            return CANNOT
        with tempfile.TemporaryDirectory(prefix="jaxche-link-") as folder:
            rounds = train(names, Path(folder), args.steps)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
            shutil.rmtree(f"/etc/netns/{name}", ignore_errors=True)
    return report(rounds, args.rate)


def join(names: list[str], rate: str) -> None:
    """Two namespaces 10.77.0.1 and 10.77.0.2 with a link of this rate between them."""

    def do(*words: str) -> None:
        subprocess.run(words, check=True, capture_output=True, text=True)

    for name in names:
        do("ip", "netns", "add", name)
    do("ip", "link", "add", "veth0", "netns", names[0], "type", "veth", "peer", "name", "veth0", "netns", names[1])
    for number, name in enumerate(names, 1):
        inside = ("ip", "netns", "exec", name)
        do(*inside, "ip", "link", "set", "lo", "up")
        do(*inside, "ip", "addr", "add", f"10.77.0.{number}/24", "dev", "veth0")
        do(*inside, "ip", "link", "set", "veth0", "up")
        do(
            *inside,
            "tc",
            "qdisc",
            "add",
            "dev",
            "veth0",
            "root",
            "tbf",
            "rate",
            rate,
            "burst",
            "256kb",
            "latency",
            "50ms",
        )
        # Gloo listens where the name of this machine leads to.
        hosts = Path("/etc/netns") / name / "hosts"
        hosts.parent.mkdir(parents=True)
        hosts.write_text(f"127.0.0.1 localhost\n10.77.0.{number} {os.uname().nodename}\n")


def train(names: list[str], folder: Path, steps: int) -> list[dict[str, Any]]:
    children = []
    for rank, (name, pace) in enumerate(zip(names, PACES, strict=True)):
        env = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAXCHE_COORDINATOR": "10.77.0.1:9751",
            "JAXCHE_NUM_PROCESSES": "2",
            "JAXCHE_PROCESS_ID": str(rank),
            "JAXCHE_PACE_MS": str(pace),
        }
        command = ["ip", "netns", "exec", name, "taskset", "-c", str(rank % (os.cpu_count() or 1))]
        command += [sys.executable, __file__, "--worker", str(folder), "--steps", str(steps)]
        children.append(subprocess.Popen(command, env=env))
    codes = []
    try:
        codes = [child.wait(timeout=300) for child in children]
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
    if any(codes):
        raise SystemExit(f"slow_link: processes ended with {codes}")
    return json.loads((folder / "rounds.json").read_text())


def report(rounds: list[dict[str, Any]], rate: str) -> int:
    """The rounds, and whether the last ones merge within the target."""
    print(f"link of {rate}, a step in {' and '.join(f'{p:g}' for p in PACES)} ms, target {TARGET:.0%}")
    print("round anchor    counts  round ms  merge ms merge share efficiency")
    for one in rounds:
        counts = ":".join(map(str, one["counts"]))
        print(
            f"{one['round']:5d} {one['anchor']:6d} {counts:>9} {one['period_ms']:9.0f} {one['sync_ms']:9.1f} "
            f"{one['sync_ms'] / one['period_ms']:11.1%} {one['efficiency']:10.1%}"
        )
    first, last = rounds[:2], rounds[-4:-1]  # the very last is cut by the end of the epoch
    before, after = (efficiency(part) for part in (first, last))
    share = sum(one["sync_ms"] for one in last) / sum(one["period_ms"] for one in last)
    print(f"efficiency {before:.1%} before and {after:.1%} after; merging takes {share:.1%} of the last rounds")
    # Whole counts make replicas wait a little too; that is in the target of the steady tuner, not in the share.
    good = share <= 1.2 * TARGET and after > before and rounds[-2]["anchor"] > rounds[0]["anchor"]
    return 0 if good else 1


def efficiency(rounds: list[dict[str, Any]]) -> float:
    """Steps done over what the paces allow."""
    return sum(sum(r["counts"]) for r in rounds) / sum(r["period_ms"] * sum(1 / p for p in PACES) for r in rounds)


def worker(folder: Path, steps: int) -> int:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import jaxche

    jaxche.initialize(timeout_s=60)
    rng = np.random.default_rng(0)
    data = jaxche.Batches(rng.normal(size=(steps, 64)).astype(np.float32), batch_size=1)
    params = {"in": np.zeros((64, 4096), np.float32), "out": np.zeros((4096, 64), np.float32)}
    che = jaxche.ElChe(world_size=2, anchor=2, overhead_target=TARGET, tuner="steady")

    def loss(p: Any, x: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ p["in"]) @ p["out"] - x) ** 2)

    trainer = jaxche.Trainer(loss, optax.sgd(0.1), che=che)
    _, history = trainer.fit(trainer.init(params), data, progress=False)
    if jax.process_index() == 0:
        names = ("round", "anchor", "counts", "period_ms", "sync_ms", "efficiency")
        (folder / "rounds.json").write_text(json.dumps([{n: getattr(info, n) for n in names} for info in history]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
