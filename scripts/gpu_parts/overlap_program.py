"""Rounds that wait for each merge and rounds whose merges run beside steps, in turn; one of two processes."""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

import jax
import optax

import jaxche
from gpu_parts import workloads
from gpu_parts.processes import program_parser, write
from jaxche.distributed import process_group

# The first half of a round, beside which a merge runs, lasts somewhat longer than the merge.
_MERGES_A_ROUND, _FEWEST, _MOST = 2.5, 4, 1000
_ROUNDS = 3  # of a turn


def main() -> None:
    parser = program_parser()
    parser.add_argument("--turns", type=int, required=True)
    args = parser.parse_args()
    if args.cpu:
        jax.config.update("jax_num_cpu_devices", 2)  # one trains, the other merges; beside a GPU it is there
    jaxche.initialize()
    replicas = jaxche.devices()[:: 2 if args.cpu else 1]
    # No moments: what merges is the parameters.
    workload = workloads.transformer(args.cpu, tx=optax.sgd(0.01))
    write(args.out, jax.process_index(), compare(workload, replicas, args.turns))


def compare(workload: workloads.Workload, replicas: list[Any], turns: int) -> dict[str, Any]:
    """Batches a second of both, free-running rates of the replicas, and what a merge takes and hides."""
    systems = {name: Rounds(workload, replicas, overlap) for name, overlap in (("waiting", 0.0), ("overlap", 0.5))}
    steps = agreed_steps(systems["waiting"].run(_FEWEST))
    rates: dict[str, list[float]] = {name: [] for name in systems}
    infos: dict[str, list[Any]] = {name: [] for name in systems}
    free = []
    for turn in range(turns):
        for name in list(systems)[:: 1 if turn % 2 else -1]:
            found, seconds = systems[name].timed(steps)
            rates[name].append(sum(info.batches for info in found) / seconds)
            infos[name] += found
        free.append(sum(systems["waiting"].free_rates()))
    return {
        "steps": steps,
        "free": statistics.median(free),
        **{name: statistics.median(found) for name, found in rates.items()},
        "merge_ms": statistics.median(info.sync_ms for info in infos["waiting"]),
        "exposed_ms": statistics.median(info.sync_ms for info in infos["overlap"]),
        "hidden_ms": statistics.median(info.hidden_ms for info in infos["overlap"]),
        "mb": infos["overlap"][-1].merge_bytes / 1e6,
    }


def agreed_steps(infos: list[Any]) -> int:
    """Steps of a round that fit a merge, the same in all processes: each has its own times."""
    merge_ms = statistics.median(info.sync_ms for info in infos)
    step_ms = statistics.median(max(info.wall_ms) / _FEWEST for info in infos)
    own = steps_for(merge_ms, step_ms)
    return max(process_group().all_gather(own))


def steps_for(merge_ms: float, step_ms: float) -> int:
    """Steps of a round whose first half is longer than a merge."""
    return min(max(math.ceil(_MERGES_A_ROUND * merge_ms / step_ms), _FEWEST), _MOST)


class Rounds:
    """Rounds of a trainer that merges on the host."""

    def __init__(self, workload: workloads.Workload, replicas: list[Any], overlap: float):
        more: dict[str, Any] = {"overlap": overlap} if overlap else {"backend": "host"}
        self._trainer = jaxche.Trainer(workload.loss_fn, workload.tx, opt_state="local", replicas=replicas, **more)
        self._state = self._trainer.init(workload.init())
        self._data = workload.batches(1_000_000)
        self.timed(2)  # compiles

    def run(self, steps: int) -> list[Any]:
        """What some rounds were."""
        infos = []
        for _ in range(_ROUNDS):
            self._state, info = self._trainer.round(self._state, self._data, counts=(steps, steps))
            infos.append(info)
        return infos

    def timed(self, steps: int) -> tuple[list[Any], float]:
        """What some rounds were, and their seconds; with overlap each takes in the merge of the one before it."""
        self._state, _ = self._trainer.round(self._state, self._data, counts=(steps, steps))
        start = time.perf_counter()
        infos = self.run(steps)
        seconds = time.perf_counter() - start
        # Collectives of two trainers must not meet: what is in flight ends here.
        self._state = self._state.merged()
        return infos, seconds

    def free_rates(self) -> tuple[float, ...]:
        """Batches a second of each replica, both running at once without merges."""
        return self._trainer.measure_rates(self._state, self._data, 1.0)


if __name__ == "__main__":
    main()
