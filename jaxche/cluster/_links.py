"""Measures all-reduces and clock offsets between the processes of a run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax._src import distributed as _jax_distributed
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxche.cluster._all_gather import all_gather

_BARRIERS, _WARM_UP, _REPEATS = 8, 2, 7


class Clock(NamedTuple):
    """The offset of a process's clock to that of process 0, and its error bound, in ms."""

    ahead_ms: float
    error_ms: float


def measure_all_reduce(sizes: Sequence[int], devices: Sequence[Any]) -> dict[int, float]:
    """The median time in ms of all-reduces of these bytes a device; every process must call it."""
    mesh = Mesh(np.array(devices), ("replica",))
    split, whole = NamedSharding(mesh, PartitionSpec("replica")), NamedSharding(mesh, PartitionSpec())
    add = jax.jit(lambda x: x.sum(0), out_shardings=whole)

    def median_ms(size: int) -> float:
        local = np.ones((1, max(1, size // 4)), np.float32)
        x = jax.make_array_from_callback((len(devices), local.shape[1]), split, lambda _: local)
        taken = []
        for _ in range(_WARM_UP + _REPEATS):
            began = time.perf_counter()
            add(x).block_until_ready()
            taken.append(1e3 * (time.perf_counter() - began))
        return statistics.median(taken[_WARM_UP:])

    return {size: median_ms(size) for size in sizes}


def clocks(timeout_s: float) -> list[Clock]:
    """Compare the clocks of all processes with that of process 0; every process must call it.

    All processes leave a barrier after all have entered it. So a clock is ahead by at least its time of entry minus the
    time at which process 0 leaves, and at most by its time of leaving minus the time at which process 0 enters.
    """
    client: Any = _jax_distributed.global_state.client
    times = []
    for number in range(_BARRIERS):
        entered = time.time()
        client.wait_at_barrier(f"jaxche/clocks/{number}", max(1, int(1e3 * timeout_s)))
        times.append((entered, time.time()))
    return compare_clocks(all_gather("clocks", times, timeout_s))


def compare_clocks(times: Sequence[Any]) -> list[Clock]:
    """Compare clocks by the times in s at which each process entered and left barriers, [process, barrier, 2]."""
    entered, left = np.moveaxis(1e3 * np.array(times), -1, 0)
    least, most = (entered - left[0]).max(-1), (left - entered[0]).min(-1)
    return [Clock(*pair) for pair in zip(((least + most) / 2).tolist(), ((most - least) / 2).tolist(), strict=True)]
