"""The end of a fit, in steps, examples, epochs or seconds."""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxche.reports import positive
from jaxche.training._state import TrainerState


class End(NamedTuple):
    """Training ends at the first of these totals of a run, in the order of :class:`~jaxche.reports.Reached`.

    None is no limit. All processes compare equal numbers, so they end after the same round.
    """

    steps: int | None = None
    examples: int | None = None
    epochs: int | None = None
    seconds: float | None = None

    @classmethod
    def of_fit(
        cls,
        state: TrainerState,
        epochs: int | None,
        max_steps: int | None,
        max_examples: int | None,
        max_time: float | None,
    ) -> End:
        """The end of a fit that starts from this state; ValueError for a number that is not above 0."""
        if epochs is None and max_steps is None and max_examples is None and max_time is None:
            epochs = 1
        done = state.reached._replace(epochs=state.epoch)

        def limit(name: str, number: Any, done: float, line: str) -> Any:
            return None if number is None else done + positive(name, number, line, whole=name != "max_time")

        return cls(
            steps=limit("max_steps", max_steps, done.steps, "max_steps=1000"),
            examples=limit("max_examples", max_examples, done.examples, "max_examples=100_000"),
            epochs=limit("epochs", epochs, done.epochs, "epochs=3"),
            seconds=limit("max_time", max_time, done.seconds, "max_time=3600"),
        )

    def is_reached(self, state: TrainerState) -> bool:
        """Whether the run of this state has ended."""
        return any(limit is not None and done >= limit for limit, done in zip(self, state.reached, strict=True))

    def batches_left(self, state: TrainerState, batch_size: int) -> int | None:
        """The most batches of the next round, at least one; None for no limit.

        Args:
          state: the state before the round.
          batch_size: examples in a whole batch; 0 if not known yet.
        """
        left = []
        if self.steps is not None:
            left.append(self.steps - state.steps)
        if self.examples is not None and batch_size:
            left.append(-(-(self.examples - state.examples) // batch_size))
        return max(1, min(left)) if left else None
