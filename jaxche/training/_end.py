"""The end of a fit, in steps, examples, epochs or seconds."""

from __future__ import annotations

from typing import NamedTuple

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
        more = {"max_steps": max_steps, "max_examples": max_examples, "epochs": epochs, "max_time": max_time}
        lines = {"max_steps": "max_steps=1000", "max_examples": "max_examples=100_000", "max_time": "max_time=3600"}
        limits = [
            None
            if value is None
            else done + positive(name, value, lines.get(name, "epochs=3"), whole=name != "max_time")
            for (name, value), done in zip(more.items(), state.reached._replace(epochs=state.epoch), strict=True)
        ]
        return cls(*limits)  # pyright: ignore[reportArgumentType]

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
