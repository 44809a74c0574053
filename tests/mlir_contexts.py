"""One MLIR context a thread, in the process of the tests and in those that it forks."""

import threading

from jax._src.interpreters import mlir


def share_contexts():
    """The modules of a thread are lowered in one MLIR context: to load its dialects takes as long as a small module."""
    make, own = mlir.make_ir_context, threading.local()

    def context():
        if not hasattr(own, "context"):
            own.context = make()
        return own.context

    mlir.make_ir_context = context
