"""What the network between the processes of a run can do, measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax._src import distributed as _jax_distributed
from jax.sharding import AxisType, NamedSharding, PartitionSpec

_PINGS = 8


class AllReduce(NamedTuple):
    """The time of one all-reduce of ``size`` bytes a device: the median, in ms."""

    size: int
    ms: float


class Clock(NamedTuple):
    """How far a process's clock is ahead of process 0's, and how far that can be off, in ms."""

    ahead_ms: float
    error_ms: float


def measure_all_reduce(sizes: Sequence[int], devices: Sequence[Any], repeats: int = 7) -> list[AllReduce]:
    """Times sums over devices of all processes; every process has to call it.

    Args:
      sizes: bytes a device.
      devices: of all processes, e.g. ``jax.devices()``.
      repeats: how often each size is timed, after once for compilation and once for connections.

    Returns:
      One median a size, of this process.

    Example:
      >>> import jax
      >>> [link] = measure_all_reduce([4096], jax.devices()[:2], repeats=1)
      >>> link.size, link.ms > 0
      (4096, True)
    """
    mesh = jax.make_mesh((len(devices),), ("replica",), axis_types=(AxisType.Auto,), devices=tuple(devices))
    split = NamedSharding(mesh, PartitionSpec("replica"))
    add = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(x, "replica"),
            mesh=mesh,
            in_specs=PartitionSpec("replica"),
            out_specs=PartitionSpec(),
        )
    )
    here = [device for device in devices if device.process_index == jax.process_index()]
    return [AllReduce(size, _median_ms(add, size, split, here, repeats)) for size in sizes]


def _median_ms(add: Any, size: int, split: NamedSharding, here: Sequence[Any], repeats: int) -> float:
    local = np.ones((1, max(1, size // 4)), np.float32)
    shards = [jax.device_put(local, device) for device in here]
    x = jax.make_array_from_single_device_arrays((split.mesh.size, local.shape[1]), split, shards)
    for _ in range(2):
        add(x).block_until_ready()
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        add(x).block_until_ready()
        taken.append(1e3 * (time.perf_counter() - began))
    return statistics.median(taken)


def clocks(process_id: int, num_processes: int, timeout_s: float) -> list[Clock] | None:
    """Compares the clocks of all processes with process 0's; every process has to call it.

    Each asks in turn, over the coordination service. The answer is of some moment between asking and hearing, so half
    of that time is the error; the best of several askings counts.

    Args:
      process_id: of this process.
      num_processes: how many there are.
      timeout_s: seconds to wait for an answer; for its turn, each waits as long for all that come before it.

    Returns:
      One clock a process, at process 0; None elsewhere.

    Example:
      >>> clocks(process_id=0, num_processes=1, timeout_s=60)
      [Clock(ahead_ms=0.0, error_ms=0.0)]
    """
    client: Any = _jax_distributed.global_state.client
    wait_ms = max(1, int(1e3 * timeout_s))
    if process_id == 0:
        found = [Clock(0.0, 0.0)]
        for rank in range(1, num_processes):
            for ping in range(_PINGS):
                client.blocking_key_value_get(f"jaxche/clock/ask/{rank}/{ping}", wait_ms)
                client.key_value_set(f"jaxche/clock/answer/{rank}/{ping}", repr(time.time()))
            told = client.blocking_key_value_get(f"jaxche/clock/found/{rank}", wait_ms)
            found.append(Clock(*map(float, told.split())))
        return found
    best = Clock(0.0, float("inf"))
    for ping in range(_PINGS):
        asked = time.time()
        client.key_value_set(f"jaxche/clock/ask/{process_id}/{ping}", "")
        turns = 1 if ping else process_id
        answer = float(client.blocking_key_value_get(f"jaxche/clock/answer/{process_id}/{ping}", turns * wait_ms))
        heard = time.time()
        error_ms = 1e3 * (heard - asked) / 2
        # The first question waits for its turn, which makes it the worst.
        if error_ms < best.error_ms:
            best = Clock(1e3 * ((asked + heard) / 2 - answer), error_ms)
    client.key_value_set(f"jaxche/clock/found/{process_id}", f"{best.ahead_ms!r} {best.error_ms!r}")
    return None
