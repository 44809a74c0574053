"""Compilation in the process of the tests and in those that it forks: less work, and one cache for all of them."""

import os
import threading
import types

from jax._src import cache_key, compiler, distributed, lru_cache
from jax._src.interpreters import mlir


def share():
    """Share contexts and programs; called once a process."""
    share_contexts()
    name_without_devices()
    write_whole()
    write_of_all()


def share_contexts():
    """The modules of a thread are lowered in one MLIR context: to load its dialects takes as long as a small module."""
    make, own = mlir.make_ir_context, threading.local()

    def context():
        if not hasattr(own, "context"):
            own.context = make()
        return own.context

    mlir.make_ir_context = context


def name_without_devices():
    """A program in the cache serves all devices, of all processes: it is loaded for others, as JAX does it on GPUs."""
    hashed = cache_key._hash_serialized_compile_options

    def without_devices(hash_obj, options, strip_device_assignment=True):
        return hashed(hash_obj, options, strip_device_assignment=True)

    cache_key._hash_serialized_compile_options = without_devices


def write_whole():
    """A program is in the cache when all of it is written: others may read it at any time, and JAX takes no lock."""

    def put(self, key, value):
        path = self.path / f"{key}-cache"
        part = self.path / f"{key}-{os.getpid()}-{threading.get_ident()}"
        part.write_bytes(value)
        os.replace(part, path)

    lru_cache.LRUCache.put = put


def write_of_all():
    """JAX writes the programs of process 0 alone, and others have some that it has not."""

    class First:
        process_id = 0

        def __getattr__(self, name):
            return getattr(distributed.global_state, name)

    compiler.distributed = types.SimpleNamespace(global_state=First())
