"""The client of the CPU devices of a run, whose collectives go through gloo."""

from __future__ import annotations

import contextlib
import functools
import socket
from collections.abc import Callable, Collection
from typing import Any

import jax

# JAX has no public name for a client of the CPU devices, its collectives, or the state of jax.distributed.
from jax._src import distributed as _jax_distributed
from jax._src import xla_bridge as _xla_bridge
from jaxlib import _jax as _jax_lib  # pyright: ignore[reportAttributeAccessIssue]
from jaxlib import xla_client

from jaxche.distributed._listener import host_and_port, is_loopback

# Where Gloo writes the addresses of processes. A key has the devices of a collective, and the place of one of them.
ADDRESSES = "cpu:gloo/"
# Where XLA's clients write the topology of all devices, and how often process 0 tries to write it.
TOPOLOGY, _ATTEMPTS = "cpu:global_topology/cpu", 20
_LOOPBACK = "127.0.0.1"


def register_cpu_client() -> None:
    """Make JAX start its CPU devices by :func:`make_cpu_client`; before any device starts."""
    _xla_bridge.register_backend_factory("cpu", make_cpu_client, fail_quietly=False)


def make_cpu_client() -> Any:
    """A client of the CPU devices of all processes."""
    # Gloo looks the name of the machine up, which may have no address without a network. Processes that are all on one
    # machine then meet on its loopback address.
    state = _jax_distributed.global_state
    host, _ = host_and_port(state.coordinator_address or "")
    if state.client is None or not is_loopback(host) or _has_address(socket.gethostname()):
        return _xla_bridge.make_cpu_client()
    collectives = _jax_lib.make_gloo_tcp_collectives(distributed_client=state.client, hostname=_LOOPBACK)
    return _xla_bridge.make_cpu_client(collectives)


@functools.cache
def own_cpu_devices(count: int) -> tuple[Any, ...]:
    """So many CPU devices of this process alone, beside those of JAX, whose number is fixed once they have started."""
    return tuple(xla_client.make_cpu_client(num_devices=count).devices())


def start_cpu_client(store: Any, start: Callable[[], Any]) -> Any:
    """Start CPU devices again on process 0: XLA writes the topology there, and fails if the key exists."""
    for _ in range(_ATTEMPTS - 1):
        store.key_value_delete(TOPOLOGY)
        try:
            return start()
        except RuntimeError as error:  # that of JAX is one
            if "ALREADY_EXISTS" not in str(error):
                raise
    store.key_value_delete(TOPOLOGY)
    return start()


def _has_address(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True


def end_waits(store: Any, processes: Collection[int]) -> None:
    """End Gloo's waits for addresses of dead processes, at once and not after 30 s, by addresses that are cut off."""
    written = dict(store.key_value_dir_get_bytes(ADDRESSES))
    process_of = {str(device.id): device.process_index for device in jax.devices("cpu")} if written else {}
    for place, address in {key.rpartition("/")[0]: address for key, address in written.items()}.items():
        devices = place.removeprefix(ADDRESSES).split(",")
        for key in (f"{place}/{i}" for i, device in enumerate(devices) if process_of.get(device) in processes):
            if key not in written:
                with contextlib.suppress(jax.errors.JaxRuntimeError):  # another process has written it
                    store.key_value_set_bytes(key, address[:-1])
