"""The sharded step on a mesh of one device against the plain step, its memory, and the largest batch that fits."""

from __future__ import annotations

import statistics
import time
from typing import Any

from gpu_parts.context import Context
from gpu_parts.processes import program
from gpu_parts.table import Line

STRATEGIES = ("NoShard", "ShardGradOp", "FullShard", "HybridShard", "HybridShardGradOp")


def run(context: Context) -> None:
    """Memory first, in processes that have the card for themselves; then the times."""
    share = context.left_s
    for name in STRATEGIES[: 1 if context.quick else None]:
        _memory(context, name)
    if not context.quick or context.cpu:
        _largest(context)
    _times(context, min(context.left_s, 0.5 * share))


def make(name: str) -> Any:
    """A strategy for a mesh of one device."""
    import jaxche.sharding

    strategy = getattr(jaxche.sharding, name)
    return strategy(1) if name.startswith("Hybrid") else strategy()


def _memory(context: Context, name: str) -> None:
    found = program(context, "memory_program", "use", "--strategy", name)
    note = f"batches of {found['rows']} rows" if found["in_use"] else "the device does not say how much is in use"
    if found["in_use"] and found["in_use"] == found["compiling"]:
        note += "; the most was in use by the compiler, which tries kernels"
    context.add(
        Line(
            f"memory of {name}",
            found["in_use"] and found["in_use"] / 2**20,
            found["explained"] / 2**20,
            "MiB",
            "0.95 to 1.05",
            "explain's table, in all; measured is the most in use",
            note,
        )
    )


def _largest(context: Context) -> None:
    there = program(context, "memory_program", "limit")
    limit = 3 * 2**20 if context.cpu else there["limit"]
    # As `jaxche plan` does it: compiled for CPU devices.
    planned = program(context, "memory_program", "plan", "--limit", limit, env={"JAX_PLATFORMS": "cpu"})["rows"]
    found = program(context, "memory_program", "largest", "--limit", limit, "--begin", max(1, planned // 4))
    note = f"batches of powers of two in {limit / 2**30:.2f} GiB, without sharding"
    against = "the largest batch that the card trains on"
    context.add(Line("largest batch by jaxche plan", planned, found["rows"], "rows", "0.5 to 2", against, note))


def _times(context: Context, seconds: float) -> None:
    import jax

    import jaxche
    from gpu_parts import workloads

    workload = workloads.transformer(context.cpu)
    params = workload.init()
    raw = workloads.RawLoop(workload, params)
    ms = workloads.step_ms(raw, workload)
    steps = 10 if context.cpu else max(20, round(500 / ms))
    batches = workload.batches(steps)
    systems: dict[str, Any] = {"raw": raw.run}
    for name in STRATEGIES[:: 2 if context.quick else 1][: 2 if context.quick else None]:
        strategy = make(name)
        step = jaxche.sharded_step(workload.loss_fn, workload.tx, strategy, strategy.mesh(jax.devices()[:1]))
        systems[name] = _Loop(step, params).run
    times: dict[str, list[float]] = {name: [] for name in systems}
    for loop in systems.values():
        loop(batches[i] for i in range(3))
    for turn in context.turns(3 if context.quick else 15, seconds):
        for name in list(systems)[:: 1 if turn % 2 else -1]:
            times[name].append(systems[name](batches) / steps * 1e3)
    peer = statistics.median(times["raw"])
    for name in list(systems)[1:]:
        ratio = statistics.median(a / b for a, b in zip(times[name], times["raw"], strict=True))
        note = f"{workload.name}, {workload.rows} rows, {len(times[name])} turns of {steps} steps"
        context.add(Line(f"step of {name}", ratio * peer, peer, "ms", "<= 1.02", "a plain jitted step", note))


class _Loop:
    """Training with a sharded step."""

    def __init__(self, step: Any, params: Any):
        self._step, self._state = step, step.init(params)

    def run(self, batches: Any) -> float:
        """Train on these batches; returns the seconds until the last step was computed."""
        import jax

        start = time.perf_counter()
        for batch in batches:
            self._state, metrics = self._step(self._state, batch)
        jax.block_until_ready((self._state, metrics))
        return time.perf_counter() - start
