"""Times merges of the trainer and bare all-reduces in turn, in each of two processes or on two devices of one."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxche
from gpu_parts.processes import program_parser, write
from gpu_parts.workloads import Repeated
from jaxche.sharding import local_devices

_LEAVES = 16
# Arrays as large as the parameters that a process has at once: state, round, merged ones, and the bare all-reduce.
_COPIES = 7


def main() -> None:
    parser = program_parser()
    parser.add_argument("--mb", required=True)
    parser.add_argument("--turns", type=int, required=True)
    parser.add_argument("--backend", default="host")
    args = parser.parse_args()
    jaxche.initialize()
    replicas, rows = jaxche.devices()[:2], []
    if len(replicas) == 2:
        rows = [measure(float(mb), args.turns, args.backend, replicas) for mb in args.mb.split(",")]
    write(args.out, jax.process_index(), rows)


def measure(mb: float, turns: int, backend: str, replicas: list[Any]) -> dict[str, Any]:
    """Median milliseconds of a merge of so many MB, and of the bare all-reduce; None where memory is too small."""
    if _COPIES * mb * 1e6 > (local_devices()[0].memory_stats() or {}).get("bytes_limit", math.inf):
        return {"mb": mb, "ours_ms": None}
    size = round(mb * 1e6 / 4 / _LEAVES)

    def loss_fn(params: Any, batch: Any) -> Any:
        return jnp.mean(batch) * sum(leaf[0] for leaf in params.values())

    trainer = jaxche.Trainer(loss_fn, optax.sgd(1e-3), opt_state="local", backend=backend, replicas=replicas)
    state = trainer.init({f"leaf {i:02}": np.ones(size, np.float32) for i in range(_LEAVES)})
    data = Repeated([np.full((2, 1), i, np.float32) for i in range(2)], 10_000)
    bare = between_processes(size * _LEAVES) if backend == "host" else between_devices(size * _LEAVES, replicas)
    ours, plain = [], []
    for turn in range(turns + 1):  # the first one compiles
        state, info = trainer.round(state, data, counts=(1, 1))
        start = time.perf_counter()
        bare()
        if turn:
            ours.append(info.sync_ms)
            plain.append((time.perf_counter() - start) * 1e3)
    return {"mb": mb, "ours_ms": statistics.median(ours), "bare_ms": statistics.median(plain), "turns": turns}


def between_processes(count: int) -> Callable[[], Any]:
    """An all-reduce of an array on the own device with that of the other process, through the host."""
    here = local_devices()[0]
    host = one_of(jax.process_index())
    sharding, summed = all_reduce([one_of(process) for process in range(2)])
    x = jax.device_put(np.ones((1, count), np.float32), here)

    def bare() -> None:
        local = jax.device_put(x, host)
        whole = jax.make_array_from_single_device_arrays((2, count), sharding, [local])
        jax.device_put(summed(whole).addressable_data(0), here).block_until_ready()

    return bare


def all_reduce(devices: list[Any]) -> tuple[NamedSharding, Callable[[Any], Any]]:
    """The sharding of an array with a row on each device, and the sum of its rows."""
    mesh = Mesh(np.array(devices), ("r",), axis_types=(AxisType.Auto,))
    summed = jax.shard_map(lambda x: jax.lax.psum(x, "r"), mesh=mesh, in_specs=P("r"), out_specs=P())
    return NamedSharding(mesh, P("r")), jax.jit(summed)


def one_of(process: int) -> Any:
    """The first CPU device of a process."""
    return next(device for device in jax.devices("cpu") if device.process_index == process)


def between_devices(count: int, devices: list[Any]) -> Callable[[], Any]:
    """An all-reduce of an array on each of two devices of this process."""
    sharding, summed = all_reduce(devices)
    x = jax.device_put(np.ones((2, count), np.float32), sharding)
    return lambda: summed(x).block_until_ready()


if __name__ == "__main__":
    main()
