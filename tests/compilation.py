"""Compilation in the process of the tests and in those that it forks: less work, and one cache for all of them."""

import os
import threading

from jax._src import lru_cache
from jax._src.interpreters import mlir


def share():
    """Share contexts and programs; called once a process."""
    share_contexts()
    write_whole()


def share_contexts():
    """The modules of a thread are lowered in one MLIR context: to load its dialects takes as long as a small module."""
    make, own = mlir.make_ir_context, threading.local()

    def context():
        if not hasattr(own, "context"):
            own.context = make()
        return own.context

    mlir.make_ir_context = context


def write_whole():
    """A program is in the cache when all of it is written: others may read it at any time, and JAX takes no lock."""

    def put(self, key, value):
        path = self.path / f"{key}-cache"
        part = self.path / f"{key}-{os.getpid()}-{threading.get_ident()}"
        part.write_bytes(value)
        os.replace(part, path)

    lru_cache.LRUCache.put = put
