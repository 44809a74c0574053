"""``Every``: how often something is done, in steps, examples, epochs or seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxche.messages import positive


class Reached(NamedTuple):
    """How far a run is, with equal values in all processes."""

    steps: int
    examples: int
    epochs: int
    seconds: float


@dataclass(frozen=True)
class Every:
    """A frequency: after every so many steps, examples, epochs or seconds of training, at the first merge after.

    Something is due after a round in which the total of the run reaches or passes a multiple of the number. So a
    resumed run does it at the same places, and a long round that passes several multiples does it once. Where an
    ``Every`` is an argument, a whole number means steps.

    Args:
      steps: batches of the data that all replicas together have trained on.
      examples: examples that they have trained on.
      epochs: whole epochs.
      seconds: time of steps, waits and merges, as in ``RoundInfo.clock_ms``; not that of compilation, evaluation,
        callbacks and checkpoints.

    Raises:
      ValueError: none or several of them are given, or one is not above 0 (of the first three, a whole number).

    Example:
      >>> import jax.numpy as jnp, numpy as np, optax
      >>> import jaxche
      >>> data = jaxche.Batches(np.ones((24, 2), np.float32), batch_size=2)
      >>> trainer = jaxche.Trainer(lambda w, x: jnp.mean((x @ w - 1.0) ** 2), optax.sgd(0.1), policy="sync")
      >>> state, history = trainer.fit(
      ...     trainer.init(jnp.zeros(2)), data, max_steps=30, validation=data, eval_every=jaxche.Every(epochs=1),
      ...     progress=False)
      >>> [info.steps_done for info in history if info.validation]
      [12, 24, 30]
    """

    steps: int | None = None
    examples: int | None = None
    epochs: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        given = self._given()
        if len(given) != 1:
            shown = ", ".join(f"{name}={value!r}" for name, value in given.items()) or "nothing"
            raise ValueError(f"Every({shown}): give exactly one number, e.g. jaxche.Every(steps=1000)")
        ((name, value),) = given.items()
        object.__setattr__(self, name, positive(name, value, f"jaxche.Every({name}=10)", whole=name != "seconds"))

    def is_due(self, before: Reached, after: Reached) -> bool:
        """Whether a multiple of the number lies after ``before`` and not after ``after``.

        Args:
          before: how far the run was.
          after: how far it is now.
        """
        ((name, number),) = self._given().items()
        return getattr(after, name) // number > getattr(before, name) // number

    def __str__(self) -> str:
        ((name, number),) = self._given().items()
        return f"{name}={number}"

    def _given(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}


def as_every(name: str, value: Any) -> Every | None:
    """The frequency of the argument ``name``; a whole number means steps."""
    if value is None or isinstance(value, Every):
        return value
    line = f"{name}=1000 for steps, or {name}=jaxche.Every(epochs=1)"
    return Every(steps=int(positive(name, value, line, whole=True)))
