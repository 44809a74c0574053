"""Measures all-reduces and clock offsets between the processes of a run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax._src import distributed as _jax_distributed
from jax.sharding import AxisType, NamedSharding, PartitionSpec

_PINGS, _REPEATS = 8, 7


class AllReduce(NamedTuple):
    """The median time in ms of an all-reduce of ``size`` bytes a device."""

    size: int
    ms: float


class Clock(NamedTuple):
    """The offset of a process's clock to that of process 0, and its error bound, in ms."""

    ahead_ms: float
    error_ms: float


def measure_all_reduce(sizes: Sequence[int], devices: Sequence[Any]) -> list[AllReduce]:
    """Times all-reduces over devices of all processes; every process must call it."""
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
    return [AllReduce(size, _median_ms(add, size, split, here)) for size in sizes]


def _median_ms(add: Any, size: int, split: NamedSharding, here: Sequence[Any]) -> float:
    local = np.ones((1, max(1, size // 4)), np.float32)
    shards = [jax.device_put(local, device) for device in here]
    x = jax.make_array_from_single_device_arrays((split.mesh.size, local.shape[1]), split, shards)
    for _ in range(2):
        add(x).block_until_ready()
    taken = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        add(x).block_until_ready()
        taken.append(1e3 * (time.perf_counter() - began))
    return statistics.median(taken)


def clocks(process_id: int, num_processes: int, timeout_s: float) -> list[Clock] | None:
    """Compares the clocks of all processes with that of process 0; every process must call it.

    Each process in turn sends requests over the coordination service, and process 0 answers with its time. The error is
    half the round trip; the request with the smallest error counts.
    """
    client: Any = _jax_distributed.global_state.client
    wait_ms = max(1, int(1e3 * timeout_s))
    if process_id == 0:
        found = [Clock(0.0, 0.0)]
        for rank in range(1, num_processes):
            for ping in range(_PINGS):
                client.blocking_key_value_get(f"jaxche/clock/ask/{rank}/{ping}", wait_ms)
                client.key_value_set(f"jaxche/clock/answer/{rank}/{ping}", repr(time.time()))
            text = client.blocking_key_value_get(f"jaxche/clock/found/{rank}", wait_ms)
            found.append(Clock(*map(float, text.split())))
        return found
    best = Clock(0.0, float("inf"))
    for ping in range(_PINGS):
        sent = time.time()
        client.key_value_set(f"jaxche/clock/ask/{process_id}/{ping}", "")
        turns = 1 if ping else process_id
        answer = float(client.blocking_key_value_get(f"jaxche/clock/answer/{process_id}/{ping}", turns * wait_ms))
        received = time.time()
        error_ms = 1e3 * (received - sent) / 2
        # The first request includes the wait for the turn.
        if error_ms < best.error_ms:
            best = Clock(1e3 * ((sent + received) / 2 - answer), error_ms)
    client.key_value_set(f"jaxche/clock/found/{process_id}", f"{best.ahead_ms!r} {best.error_ms!r}")
    return None
