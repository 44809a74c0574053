"""One replica of the trainer against the raw jitted loop, at steps of 0.5, 2, 10 and 50 ms."""

from __future__ import annotations

import statistics
import time
from typing import Any

from gpu_parts.context import Context
from gpu_parts.table import Line

AGAINST = "a jitted step that donates its state, batches copied ahead"


def run(context: Context) -> None:
    """A line of time and a line of the device's busy share for each size."""
    from gpu_parts import workloads

    sizes = [(0.5, workloads.cnn), (2.0, workloads.resnet), (10.0, workloads.transformer)]
    sizes.append((50.0, lambda cpu: workloads.transformer(cpu, large=True)))
    if context.quick:
        sizes = sizes[1:3] if not context.cpu else sizes[:1]
    for number, (wanted_ms, make) in enumerate(sizes):
        workload = make(context.cpu)
        # Every other number of rows is compiled again.
        rows = workload.rows if context.cpu or context.quick else workloads.rows_for(workload, wanted_ms)
        _measure(context, workload, rows, wanted_ms, context.left_s / (len(sizes) - number))


def _measure(context: Context, workload: Any, rows: int, wanted_ms: float, seconds: float) -> None:
    import jax

    import jaxche
    from gpu_parts import workloads
    from gpu_parts.idle import busy_shares

    began = time.perf_counter()
    raw = workloads.RawLoop(workload)
    trainer = jaxche.Trainer(workload.loss_fn, workload.tx, replicas=jax.devices()[:1])
    state = trainer.init(workload.init())
    state, _ = trainer.fit(state, workload.batches(60, rows), progress=False)  # compiles, and a round is cut short
    ms = workloads.step_ms(raw, workload, rows)
    seconds -= time.perf_counter() - began

    # Whole rounds of two seconds, so that what a round costs counts as it does in a long run.
    steps = 60 if context.cpu else max(100, round((2000 if context.quick else 4000) / ms))
    batches = workload.batches(steps, rows)
    times: dict[str, list[float]] = {"raw": [], "jaxche": []}

    def fit() -> float:
        nonlocal state
        start = time.perf_counter()
        state, _ = trainer.fit(state, batches, progress=False)
        jax.block_until_ready(state.local_states[0].params)
        return time.perf_counter() - start

    systems = {"raw": lambda: raw.run(batches), "jaxche": fit}
    for turn in context.turns(3 if context.quick else 9, 0.7 * seconds):
        for name in list(systems)[:: 1 if turn % 2 else -1]:
            times[name].append(systems[name]() / steps * 1e3)
    ratio = statistics.median(a / b for a, b in zip(times["jaxche"], times["raw"], strict=True))
    peer = statistics.median(times["raw"])
    name = f"{workload.name}, steps of {wanted_ms:g} ms"
    goal = "<= 1.01" if wanted_ms >= 2 else ""
    # The cores of a host are not equally fast in all turns, and steps of a millisecond or two wait for them.
    fastest = " and ".join(f"{min(times[name]):.4g}" for name in ("jaxche", "raw"))
    text = f"{rows} rows, {steps} steps a turn, {len(times['raw'])} turns, the fastest {fastest} ms; "
    text += "the ratio is the median over the turns"
    context.add(Line(name, peer * ratio, peer, "ms", goal, AGAINST, text))

    batches = workload.batches(min(steps, 100), rows)
    busy = {name: busy_shares(run, 1 if context.quick else 3) for name, run in systems.items()}
    measured, other = (100 * statistics.median(found) if found else None for found in (busy["jaxche"], busy["raw"]))
    note = "" if measured is not None else "the profile has no device"
    context.add(Line(f"{name}: device busy", measured, other, "%", goal and ">= 0.99", "the raw loop", note))
