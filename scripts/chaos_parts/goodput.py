"""Goodput under a fault a minute: what is left of the rounds, and of the batches, of an undisturbed run.

Each arm is a run of three processes for so many seconds. Once a minute a rank gets SIGKILL, at moments and on ranks
that follow from the seed. *elastic* continues and admits the rank again, *restarts* starts all ranks again from the
last checkpoint; both save every ten rounds. Rounds that are done again count once. The share of the batches is the
goodput: rounds differ in length, and after a fault the tuner may choose longer ones. *torchft* is its LocalSGD on gloo
with steps of the same length, a merge after as many, and a model of the same size; this script starts its dead ranks
again. It needs an interpreter with torch and torchft: ``TORCH_PYTHON=venv/bin/python``.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from chaos_parts import torchft_arm
from chaos_parts.faults import read
from chaos_parts.launched import launch
from chaos_parts.watch import LIMIT_S, StuckError

PACES, EVERY, FAULT_S = (10, 10, 25), 10, 60.0
GOAL = 0.9
# Whether the run is elastic, and whether ranks are killed.
ARMS = {
    "undisturbed": (True, False),
    "elastic": (True, True),
    "restarts": (False, True),
    "torchft undisturbed": (False, False),
    "torchft": (False, True),
}


def benchmark(seconds: float, arms: Sequence[str] | None, heartbeat_timeout_s: float, seed: int = 0) -> int:
    """Print a line an arm; the exit code says whether the elastic one reaches the goal."""
    if unknown := set(arms or ()) - ARMS.keys():
        print(f"chaos: --arms has {', '.join(sorted(unknown))}, which is none of {', '.join(ARMS)}")
        return 2
    print(f"{seconds:g} s each, a SIGKILL every {FAULT_S:g} s; shares of the undisturbed run", flush=True)
    print("arm                 faults  rounds/s batches/s  rounds batches", flush=True)
    base: dict[bool, tuple[float, float]] = {}
    reached = True
    for arm in arms or ARMS:
        is_torch, (is_elastic, is_hit) = arm.startswith("torchft"), ARMS[arm]
        if is_torch and "TORCH_PYTHON" not in os.environ:
            print(f"{arm:20s} left out: TORCH_PYTHON names no interpreter with torch and torchft")
            continue
        times = fault_times(seconds, seed) if is_hit else []
        with tempfile.TemporaryDirectory(prefix="jaxche-chaos-") as folder:
            start = torchft_arm.running if is_torch else launched(is_elastic, heartbeat_timeout_s)
            rounds, batches = measure(Path(folder), start, seconds, times)
        base.setdefault(is_torch, (rounds, batches))
        shares = [found / best for found, best in zip((rounds, batches), base[is_torch], strict=True)]
        print(f"{arm:20s} {len(times):6d} {rounds:9.2f} {batches:9.1f} {shares[0]:7.1%} {shares[1]:7.1%}", flush=True)
        reached &= arm != "elastic" or shares[1] >= GOAL
    return 0 if reached else 1


def fault_times(seconds: float, seed: int) -> list[tuple[float, int]]:
    """When which rank dies, in seconds after the first round."""
    rng = random.Random(seed)
    minutes = range(int(seconds // FAULT_S))
    return [(FAULT_S * (minute + rng.uniform(0.1, 0.7)), rng.randrange(len(PACES))) for minute in minutes]


def measure(folder: Path, start: Any, seconds: float, times: list[tuple[float, int]]) -> tuple[float, float]:
    """Rounds and batches a second of one run, from its first round on."""
    with start(folder) as pids:
        limit = time.monotonic() + LIMIT_S
        while not read(folder / "rounds"):
            if time.monotonic() > limit:
                raise StuckError(f"{LIMIT_S:g} s without a round: {(folder / 'output').read_text()[-1500:]}")
            time.sleep(0.05)
        began = read(folder / "rounds")[0]["t"]
        for at, rank in times:
            time.sleep(max(0.0, began + at - time.monotonic()))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids()[rank], signal.SIGKILL)
        time.sleep(max(0.0, began + seconds - time.monotonic()))
        rounds = [line for line in read(folder / "rounds") if line["t"] <= began + seconds]
    sizes = {line["round"]: line["batches"] for line in rounds}
    return len(sizes) / seconds, sum(sizes.values()) / seconds


def launched(is_elastic: bool, heartbeat_timeout_s: float) -> Callable[[Path], Any]:
    """Makes a context that starts a launch, gives a function that lists its processes, and ends it."""

    @contextlib.contextmanager
    def running(folder: Path) -> Iterator[Callable[[], dict[int, int]]]:
        job = {"times": 1, "epochs": 100_000, "elastic": is_elastic, "every": EVERY}
        (folder / "job.json").write_text(json.dumps(job))
        own = {"JAX_COMPILATION_CACHE_DIR": str(folder / "cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        own |= {"JAX_PLATFORMS": "cpu", "JAXCHE_HEARTBEAT_TIMEOUT": f"{heartbeat_timeout_s:g}"}
        with launch(folder, PACES, os.environ | own, is_elastic) as run:
            yield lambda: run.pids

    return running
