"""The stall of training for a save, against a bare copy of the same bytes to the host."""

from __future__ import annotations

import importlib.util
import itertools
import statistics
import time
from pathlib import Path
from typing import Any

from gpu_parts.context import Context
from gpu_parts.table import Line

EVERY = 3  # rounds: one with a save, the others without, in which the files are written


def run(context: Context) -> None:
    """A line for the stall."""
    if not importlib.util.find_spec("orbax"):
        note = "without orbax-checkpoint; write: pip install 'jaxche[checkpoints]'"
        context.add(Line("checkpoint: stall a save", None, goal="<= 2", note=note))
        return
    import jax
    import optax

    import jaxche
    from gpu_parts import workloads

    # Without moments: the parameters are the 1.4 GB.
    workload = workloads.transformer(context.cpu, large=not context.quick, tx=optax.sgd(0.01))
    trainer = jaxche.Trainer(workload.loss_fn, workload.tx, replicas=jax.devices()[:1])
    state = trainer.init(workload.init())
    rounds = EVERY * (3 if context.quick else 5)
    few = workload.batches(50)
    state, _ = trainer.fit(state, few, progress=False)
    # A round ends with its epoch: those on the CPU, which prove the command, are short.
    data, epochs = (few, 100) if context.cpu else (workload.batches(1_000_000), 1)
    size = sum(x.nbytes for x in jax.tree.leaves(trainer.params(state)))

    ends: list[float] = []
    walls: list[float] = []

    def end(state: object, info: Any) -> bool:
        ends.append(time.perf_counter())
        walls.append(info.wall_ms[0] / 1e3)
        return len(ends) > rounds

    saved = jaxche.Checkpoints(Path(context.folder) / "checkpoints", every=EVERY, keep=1)
    trainer.fit(state, data, epochs, callbacks=[end], progress=False, checkpoints=saved)
    # Without the steps, whose number may grow. A callback runs before or after the save of its round: either way one
    # interval of each cycle contains one.
    intervals = [
        after - before - wall for (before, after), wall in zip(itertools.pairwise(ends), walls[1:], strict=True)
    ]
    later = intervals[EVERY:]  # the first save compiles, and starts Orbax
    cycle = [statistics.median(later[shift::EVERY]) for shift in range(EVERY)]
    stall = max(cycle) - statistics.median(cycle)
    plain = statistics.median(walls)
    copies = []
    for _ in range(3):
        params = jax.block_until_ready(trainer.params(state))  # a new array: JAX keeps copies that it has made
        start = time.perf_counter()
        jax.device_get(params)
        copies.append(time.perf_counter() - start)
    note = f"{size / 1e9:.2f} GB, rounds of {1e3 * plain:.0f} ms, a save every {EVERY} rounds"
    against = "a copy of the parameters to host memory"
    copy = statistics.median(copies)
    context.add(Line("checkpoint: stall a save", 1e3 * stall, 1e3 * copy, "ms", "<= 2", against, note))
