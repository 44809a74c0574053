"""The task that all systems train, in NumPy: data, order of batches, held-out quality, pace and training loop."""

from __future__ import annotations

import itertools
import math
import time
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

WIDTHS = (784, 128, 64, 10)
# Seconds of training between evaluations.
_EVALUATE_S = 0.4


class Rate(NamedTuple):
    """A learning rate: constant, or with ``batches`` of all replicas a cosine that falls to zero after these."""

    peak: float
    batches: float | None = None

    def at(self, batches: float) -> float:
        """The rate after so many batches of all replicas."""
        if self.batches is None:
            return self.peak
        return self.peak * (1 + math.cos(math.pi * min(1.0, batches / self.batches))) / 2


def average_weight(age: float, steps: int) -> float:
    """The weight of the newest parameters in an average over ``steps``, by the rule of jaxche's ``ema=age``."""
    return 1 - ((steps - 1) / steps) ** (1 / age - 1)


class System(Protocol):
    """What the training loop needs of a system, on every process."""

    def run(self, batches: int) -> int:
        """Train about so many batches, counted over all replicas, up to a merge; the number trained."""
        ...

    def parameters(self) -> list[np.ndarray]:
        """The merged parameters: kernel [inputs, outputs] and bias of each layer."""
        ...

    def agree(self, value: float) -> float:
        """The value of rank 0, once all processes have come here."""
        ...


class Task:
    """MNIST digits for a perceptron of two hidden layers; its arrays lie in a file, as systems run in processes."""

    def __init__(self, path: Path, batch_size: int):
        arrays = np.load(path)
        self.x, self.y, self.test_x, self.test_y = (arrays[name] for name in ("x", "y", "test_x", "test_y"))
        self._arrays, self.batch_size = arrays, batch_size
        self._epoch, self._order = -1, np.empty(0, int)

    def start(self, seed: int) -> list[np.ndarray]:
        """The initial parameters."""
        return [self._arrays[f"start{seed}_{i}"] for i in range(2 * len(WIDTHS) - 2)]

    def batch(self, seed: int, index: int) -> tuple[np.ndarray, np.ndarray]:
        """A batch of an endless sequence of epochs, in the order of ``jaxche.Batches``."""
        epoch, place = divmod(index, len(self.y) // self.batch_size)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng(seed + epoch).permutation(len(self.y))
        chosen = self._order[place * self.batch_size : (place + 1) * self.batch_size]
        return self.x[chosen], self.y[chosen]

    def quality(self, parameters: list[np.ndarray]) -> tuple[float, float]:
        """Loss and accuracy on the held-out examples."""
        h = self.test_x
        for i in range(0, len(parameters), 2):
            h = h @ parameters[i] + parameters[i + 1]
            if i < len(parameters) - 2:
                h = np.maximum(h, 0)
        top = h.max(1)
        log_z = top + np.log(np.exp(h - top[:, None]).sum(1))
        loss = np.mean(log_z - h[np.arange(len(h)), self.test_y])
        return float(loss), float(np.mean(h.argmax(1) == self.test_y))


class Pace:
    """Pads local steps to a wall time, by the rule of jaxche's trainer: a late step shortens the next one."""

    def __init__(self, ms: float):
        self._seconds, self._due = ms / 1e3, 0.0

    def begin(self) -> None:
        """The first local step after a merge begins."""
        self._due = time.perf_counter()

    def wait(self) -> None:
        """A local step has been computed."""
        self._due = max(self._due + self._seconds, now := time.perf_counter())
        time.sleep(self._due - now)


def train(system: System, task: Task, deadline_s: float) -> list[list[float]]:
    """The curve of a run: seconds of training, batches, held-out loss and accuracy; evaluation is not counted."""
    curve: list[list[float]] = [[0.0, 0.0, *task.quality(system.parameters())]]
    clock, done, chunk = 0.0, 0, 16
    while clock < deadline_s:
        system.agree(0.0)
        start = time.perf_counter()
        done += system.run(chunk)
        clock = system.agree(clock + time.perf_counter() - start)
        curve.append([clock, float(done), *task.quality(system.parameters())])
        chunk = max(1, round(_EVALUATE_S * done / clock))  # the same on every process
    return curve


def at(curve: list[list[float]], seconds: float, column: int) -> float:
    """A column of a curve at a time, on the line between its points."""
    return float(np.interp(seconds, [point[0] for point in curve], [point[column] for point in curve]))


def reached(curve: list[list[float]], loss: float) -> float:
    """Seconds until the held-out loss first reached ``loss``, on the line between two points; infinite if never."""
    for (t0, _, l0, _), (t1, _, l1, _) in itertools.pairwise(curve):
        if l1 <= loss:
            return t0 + (t1 - t0) * (l0 - loss) / (l0 - l1)
    return float("inf")


def write(path: Path, arrays: dict[str, Any]) -> None:
    with path.open("wb") as file:
        np.savez(file, **arrays)
