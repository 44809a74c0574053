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
_TIMEOUT_MS = 60_000


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


def clocks(process_id: int, num_processes: int) -> list[Clock] | None:
    """Compares the clocks of all processes with process 0's; every process has to call it.

    Each asks in turn, over the coordination service. The answer is of some moment between asking and hearing, so half
    of that time is the error; the best of several askings counts.

    Args:
      process_id: of this process.
      num_processes: how many there are.

    Returns:
      One clock a process, at process 0; None elsewhere.

    Example:
      >>> clocks(process_id=0, num_processes=1)
      [Clock(ahead_ms=0.0, error_ms=0.0)]
    """
    client: Any = _jax_distributed.global_state.client
    if process_id == 0:
        found = [Clock(0.0, 0.0)]
        for rank in range(1, num_processes):
            for ping in range(_PINGS):
                client.blocking_key_value_get(f"jaxche/clock/ask/{rank}/{ping}", _TIMEOUT_MS)
                client.key_value_set(f"jaxche/clock/answer/{rank}/{ping}", repr(time.time()))
            told = client.blocking_key_value_get(f"jaxche/clock/found/{rank}", _TIMEOUT_MS)
            found.append(Clock(*map(float, told.split())))
        return found
    best = Clock(0.0, float("inf"))
    for ping in range(_PINGS):
        asked = time.time()
        client.key_value_set(f"jaxche/clock/ask/{process_id}/{ping}", "")
        answer = float(client.blocking_key_value_get(f"jaxche/clock/answer/{process_id}/{ping}", 10 * _TIMEOUT_MS))
        heard = time.time()
        error_ms = 1e3 * (heard - asked) / 2
        # The first question waits for its turn, which makes it the worst.
        if error_ms < best.error_ms:
            best = Clock(1e3 * ((asked + heard) / 2 - answer), error_ms)
    client.key_value_set(f"jaxche/clock/found/{process_id}", f"{best.ahead_ms!r} {best.error_ms!r}")
    return None


def share(name: str, process_id: int, text: str) -> list[str]:
    """What every process says under a name, in order; every process has to call it, once a name.

    Args:
      name: under which it is said; a new one each time.
      process_id: of this process.
      text: what it says.

    Returns:
      What each said, by number of the process.

    Example:
      >>> hosts = share("hosts", jax.process_index(), socket.gethostname())  # doctest: +SKIP
    """
    client = _jax_distributed.global_state.client
    assert client is not None
    client.key_value_set(f"jaxche/share/{name}/{process_id}", text)
    client.wait_at_barrier(f"jaxche/share/{name}", 10 * _TIMEOUT_MS)
    told = {int(key.rpartition("/")[2]): value for key, value in client.key_value_dir_get(f"jaxche/share/{name}/")}
    # Nobody leaves before all have heard.
    client.wait_at_barrier(f"jaxche/share/{name}/heard", 10 * _TIMEOUT_MS)
    return [told[rank] for rank in sorted(told)]
