"""Keeps a device busy half the time, until its standard input closes.

With ``--pid`` it is an imitation for devices that are CPU cores: it stops that process half the time.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
import time
from collections.abc import Callable

_SLICE_S = 0.02
# A padded step makes up for a stop that is shorter than itself.
_STOP_S = 0.2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pid", type=int)
    args = parser.parse_args()
    work = stopping(args.pid) if args.pid else computing()
    print("busy", flush=True)
    try:
        while not is_closed():
            start = time.perf_counter()
            work()
            time.sleep(time.perf_counter() - start)
    except ProcessLookupError:  # the process has ended
        pass


def is_closed() -> bool:
    """Whether standard input has closed: the one that started this has ended, or wants no more."""
    ready, _, _ = select.select([sys.stdin], [], [], 0)
    return bool(ready) and not os.read(sys.stdin.fileno(), 1)


def stopping(pid: int) -> Callable[[], None]:
    """Stops a process for a moment."""

    def work() -> None:
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(_STOP_S)
        finally:
            os.kill(pid, signal.SIGCONT)

    return work


def computing() -> Callable[[], None]:
    """Matrix products on the device for about a slice."""
    import jax
    import jax.numpy as jnp

    x = jnp.full((4096, 4096), 1e-3, jnp.bfloat16)
    product = jax.jit(lambda x: x @ x)
    product(x).block_until_ready()
    start = time.perf_counter()
    for _ in range(10):
        x = product(x)
    x.block_until_ready()
    count = max(1, round(_SLICE_S / (time.perf_counter() - start) * 10))

    def work() -> None:
        y = x
        for _ in range(count):
            y = product(y)
        y.block_until_ready()

    return work


if __name__ == "__main__":
    main()
