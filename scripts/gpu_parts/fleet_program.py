"""One of two processes that train together; run by `jaxche launch`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

import jaxche
from gpu_parts import workloads
from gpu_parts.processes import program_parser, write


def main() -> None:
    parser = program_parser()
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--policy", default="cadence")
    parser.add_argument("--load", action="store_true")
    args = parser.parse_args()
    jaxche.initialize()
    write(args.out, jax.process_index(), Fleet(args).measure())


class Fleet:
    """The trainer of this process, and its state."""

    def __init__(self, args: argparse.Namespace):
        self._args, workload = args, workload_of(args)
        # Most batches a second, which is what efficiency counts. Steps of a millisecond need many to a merge.
        given = {"che": jaxche.ElChe(2, 2, 0.015, max_anchor=2000, tuner="steady"), "opt_state": "local"}
        more: dict[str, Any] = {} if args.policy == "auto" else given
        self._trainer = jaxche.Trainer(workload.loss_fn, workload.tx, policy=args.policy, **more)
        self._data = workload.batches(1_000_000)
        self._state = self._trainer.init(workload.init())

    def measure(self) -> dict[str, Any]:
        """Rates, efficiency, and what the questions of this run add."""
        args = self._args
        if args.policy == "auto":
            self._train(args.seconds)
            idle = self._state.choice.active.count(False) if self._state.choice else 0
            explained = self._trainer.explain(self._state)
            return {"rates": self._rates(), "idle": idle, "explained": explained}
        self._train(args.seconds / 2)  # compiles, and the cadence measures the speeds
        found = self._turn()
        if args.load:
            with competing(args.cpu):
                found["load"] = self._turn(settle=True)
        params = jax.device_get(self._trainer.params(self._state))
        leaves = jax.tree.leaves_with_path(params)
        hashes = {jax.tree_util.keystr(path): hashlib.sha256(np.asarray(x).tobytes()).hexdigest() for path, x in leaves}
        return found | {"hashes": hashes, "rounds": self._state.round}

    def _turn(self, settle: bool = False) -> dict[str, Any]:
        before = self._rates()
        if settle:
            self._train(self._args.seconds / 2)
        rounds, seconds = self._train(self._args.seconds)
        rates = [statistics.mean(pair) for pair in zip(before, self._rates(), strict=True)]
        late = rounds[-max(3, len(rounds) // 3) :]
        return {
            "rates": rates,
            "batches_s": sum(info.batches for info in rounds) / seconds,
            "counts": [statistics.median(info.counts[rank] for info in late) for rank in range(2)],
            "sync_ms": statistics.median(info.sync_ms for info in late),
        }

    def _rates(self) -> list[float]:
        return list(self._trainer.measure_rates(self._state, self._data, max(1.0, self._args.seconds / 4)))

    def _train(self, seconds: float) -> tuple[list[Any], float]:
        """Train for so long; the rounds after the first, and the seconds that they took."""
        ends: list[float] = []

        def late(state: Any, info: Any) -> bool:
            ends.append(time.perf_counter())
            return len(ends) > 3 and ends[-1] - ends[0] > seconds

        self._state, history = self._trainer.fit(self._state, self._data, callbacks=[late], progress=False)
        return list(history)[1 : len(ends)], ends[-1] - ends[0]


def workload_of(args: argparse.Namespace) -> workloads.Workload:
    """A small model; for ``policy="auto"`` one that is much slower on a CPU."""
    if args.policy == "auto" and not args.cpu:
        return dataclasses.replace(workloads.resnet(False), rows=16)
    return workloads.cnn(args.cpu)


@contextlib.contextmanager
def competing(cpu: bool) -> Iterator[None]:
    """A second program that keeps the card of rank 0 busy half the time."""
    if jax.process_index() != 0:
        yield
        return
    words = ["--pid", str(os.getpid())] if cpu else []
    # It has little memory, and no part in this run.
    env = {name: value for name, value in os.environ.items() if not name.startswith("JAXCHE_")}
    env |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | ({} if cpu else {"JAX_PLATFORMS": "cuda"})
    command = [sys.executable, "-m", "gpu_parts.load", *words]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            if process.stdout.readline().strip() != "busy":
                raise RuntimeError("the competing load did not start")
            yield
        finally:
            process.stdin.close()  # it ends


if __name__ == "__main__":
    main()
