"""Orbax in runs whose processes may fail or die while they save: barriers, threads, writers and arrays.

Orbax has no public names for most of this.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jaxche.distributed import Group

# The most errors of one save that Orbax raises, one after another: those of its threads, and of its metadata.
_ERRORS = 8


@contextlib.contextmanager
def barriers(wait: Callable[..., None]) -> Iterator[None]:
    """Let the barriers of Orbax call ``wait``: its own barriers wait minutes for processes that have died."""
    from orbax.checkpoint._src.multihost import multihost

    own = multihost.get_barrier_sync_fn
    multihost.get_barrier_sync_fn = lambda processes=None: wait
    try:
        yield
    finally:
        multihost.get_barrier_sync_fn = own


def close_manager(manager: Any) -> Exception | None:
    """Wait for all threads of a manager and close it; returns the first error of a save that failed."""
    first = None
    for _ in range(_ERRORS):  # each is raised once
        try:
            manager.close()
            break
        except Exception as error:
            first = first or error
    return first


def end_threads(cancels: bool = False) -> None:
    """Release and join the threads of a save that failed; ``cancels`` those that wait for folders of a dead process."""
    from orbax.checkpoint._src.futures import future
    from orbax.checkpoint._src.futures.synchronization import OperationIdGenerator

    threads = [thread for thread in threading.enumerate() if isinstance(thread, future._SignalingThread)]
    for thread in threads if cancels else []:
        thread.cancel()
    operation = OperationIdGenerator.get_current_operation_id()
    signals = future.AwaitableSignalsContract.get_awaitable_signals_from_contract(operation)
    future.set_signals(signals, operation_id=operation)
    for thread in threads:
        threading.Thread.join(thread)  # its own join raises its error


def handlers(multiprocessing: Any) -> Any:
    """Orbax's handlers that write through a process other than 0, which the option of the manager does not reach."""
    import orbax.checkpoint as ocp
    from orbax.checkpoint import type_handlers
    from orbax.checkpoint._src.metadata.array_metadata_store import Store

    # Orbax refuses metadata of a single process where there are several.
    store = Store() if len(multiprocessing.active_processes) > 1 else None
    # In parallel, replicas would also write parts of arrays for processes that are dead.
    handler = type_handlers.ArrayHandler(
        primary_host=multiprocessing.primary_host, use_replica_parallel=False, array_metadata_store=store
    )
    absl = logging.getLogger("absl")
    level = absl.level
    absl.setLevel(logging.ERROR)  # it warns of every replacement
    type_handlers.register_type_handler(jax.Array, handler, override=True)
    absl.setLevel(level)
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    for args, kind in (
        (ocp.args.StandardSave, ocp.StandardCheckpointHandler),
        (ocp.args.JsonSave, ocp.JsonCheckpointHandler),
    ):
        registry.add(None, args, kind(multiprocessing_options=multiprocessing))
    return registry


def spanning(array: jax.Array) -> jax.Array:
    """An array of this process as one replica of an array on two processes: Orbax saves only arrays that span them."""
    assert isinstance(array.sharding, jax.sharding.NamedSharding)
    mesh, spec = array.sharding.mesh, array.sharding.spec
    assert isinstance(mesh, jax.sharding.Mesh)
    own = mesh.devices.flat[0]
    others = [device for device in own.client.devices() if device.process_index != own.process_index]
    both = np.array([*mesh.devices.flat, *others[: mesh.size]]).reshape(2, *mesh.devices.shape)
    sharding = jax.sharding.NamedSharding(jax.sharding.Mesh(both, ("absent", *mesh.axis_names)), spec)
    shards = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, shards)


def align_operation_ids(group: Group) -> None:
    """Set Orbax's number of the next save, which must be equal in all processes."""
    from orbax.checkpoint._src.futures.synchronization import OperationIdGenerator

    most = max(group.all_gather(int(OperationIdGenerator.get_current_operation_id())))
    while int(OperationIdGenerator.get_current_operation_id()) < most:
        OperationIdGenerator.next_operation_id()
