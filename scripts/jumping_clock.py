"""A plugin of pytest: the clock by which rounds are timed jumps ahead at random, so that no test rests on a timing.

    PYTHONPATH=scripts .venv/bin/python -m pytest -p jumping_clock -n 3 tests/replicas tests/training

``JUMPS=1`` is the seed. Tests that pace replicas in real time bear jumps of some tens of milliseconds.
"""

import os
import random
import threading
import time
from types import SimpleNamespace

# The share of the calls that find the clock ahead, and by how many seconds on average.
_SHARE, _SECONDS = 0.3, 0.03


class JumpingClock:
    """Like ``time.perf_counter``, and now and then ahead of it."""

    def __init__(self, seed: int):
        self._rng, self._ahead, self._lock = random.Random(seed), 0.0, threading.Lock()

    def __call__(self) -> float:
        with self._lock:
            if self._rng.random() < _SHARE:
                self._ahead += self._rng.expovariate(1 / _SECONDS)
            return time.perf_counter() + self._ahead


def pytest_collection_finish() -> None:
    from jaxche.replicas import _overlap, _replica
    from jaxche.training import _rounds

    clock = SimpleNamespace(**(vars(time) | {"perf_counter": JumpingClock(int(os.environ.get("JUMPS", "0")))}))
    for module in (_overlap, _replica, _rounds):
        module.time = clock
