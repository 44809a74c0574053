"""Stages at a given pace: their tasks take a wall time, to simulate devices of known speed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxche.stages._program import StageProgram


class Pace(NamedTuple):
    """Wall times in ms to which the tasks of a stage are padded, to simulate a device of known speed.

    Attributes:
      forward_ms: of a forward task.
      backward_ms: of a backward task.

    Example:
      >>> Pace(forward_ms=4.0, backward_ms=8.0).backward_ms
      8.0
    """

    forward_ms: float
    backward_ms: float


class PacedProgram:
    """The program of a stage whose forward and backward begin when their arguments are computed, and are padded."""

    def __init__(self, program: StageProgram, pace: Pace):
        self._program, self._pace = program, pace

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)

    def forward(self, *arguments: Any) -> tuple[Any, Any]:
        return _padded(self._pace.forward_ms, self._program.forward, arguments)

    def backward(self, *arguments: Any) -> tuple[Any, Any]:
        return _padded(self._pace.backward_ms, self._program.backward, arguments)


def _padded(pace_ms: float, task: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    jax.block_until_ready(arguments)
    start = time.perf_counter()
    result = jax.block_until_ready(task(*arguments))
    time.sleep(max(0.0, start + pace_ms / 1e3 - time.perf_counter()))
    return result
