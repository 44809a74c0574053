"""The compilation of steps, once for all CPU devices of a process: the compiled program is loaded on the others."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src import compilation_cache, compiler
from jax.experimental import serialize_executable

from jaxche.sharding import Device


class Compilations:
    """Programs of replicas on one device each.

    CPU devices share one compilation, and so do GPUs of a kind with the compilation cache of JAX. A program is known by
    its jaxpr: JAX traces a function once for equal inputs and settings.
    """

    def __init__(self) -> None:
        self._programs: dict[Any, _Program] = {}

    def lower(self, traced: Any, device: Device) -> Callable[[], Any]:
        """Lower a traced program for a device; the function that it returns compiles it, in any thread."""
        program = self._programs.get(key := (traced.jaxpr, device.device_kind))
        if program is None:
            program = self._programs[key] = _Program(traced.lower(), device)
        elif not program.is_movable:
            lowered = traced.lower()
            return lambda: program.saved() and lowered.compile()
        return lambda: program.on(device) or traced.lower().compile()


class _Program:
    """A program of one device, from which those of other devices are made."""

    def __init__(self, lowered: Any, device: Device):
        self._lowered: Any = lowered
        self._compiled: Any = None
        self._device, self._lock = device, threading.Lock()
        client = device.client
        self._is_cached = compilation_cache.is_cache_used(client) and compilation_cache._get_cache(client) is not None
        # A program that JAX has loaded from its cache cannot be saved again, and one that calls Python has pointers.
        calls_python = lowered._lowering.compile_args.get("host_callbacks")
        self.is_movable = device.platform == "cpu" and not self._is_cached and not calls_python

    def saved(self) -> bool:
        """True, once it is in the cache of JAX if that is used: on GPUs it serves the other devices then."""
        return not self._is_cached or self.compiled() is not None

    def compiled(self) -> Any:
        """The program on its own device, compiled by the first thread that asks."""
        with self._lock:
            if self._compiled is None:
                self._compiled, self._lowered = self._lowered.compile(), None  # its text may be large
            return self._compiled

    def on(self, device: Device) -> Any:
        """The program on a device of the same kind; None if the backend cannot save programs."""
        return self.compiled() if device == self._device else moved(self.compiled(), device)


def moved(compiled: Any, device: Device) -> jax.stages.Compiled | None:
    """A compiled program of one device on another one of the same kind; None if the backend cannot save programs."""
    try:
        data, in_tree, out_tree = serialize_executable.serialize(compiled)
    except (ValueError, NotImplementedError, RuntimeError):
        return None
    unloaded, arguments, no_kwargs = _Unpickler(io.BytesIO(data), device).load()
    return jax.stages.Compiled(unloaded.load(), [], in_tree.unflatten(arguments), out_tree, no_kwargs=no_kwargs)


class _Unpickler(serialize_executable._JaxPjrtUnpickler):  # the public function keeps the device of the program
    """Reads a program of one device as that of another."""

    def __init__(self, file: io.BytesIO, device: Device):
        super().__init__(file, device.client, [device])
        self._device = device

    def persistent_load(self, pid: Any) -> Any:
        if pid[0] == "device":
            return self._device
        if pid[0] == "exec":
            place = np.array([[self._device.id]])
            options = compiler.get_compile_options(num_replicas=1, num_partitions=1, device_assignment=place)
            return self.backend.deserialize_executable(pid[1], self.execution_devices, options)
        return super().persistent_load(pid)
