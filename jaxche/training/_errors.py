"""Errors of a round, raised on every process alike."""

from __future__ import annotations

from typing import Any


class PlanMismatchError(RuntimeError):
    """Hosts planned different rounds: their code, data length, seed or measurements differ.

    Example:
      >>> issubclass(PlanMismatchError, RuntimeError)
      True
    """


class NonFiniteLossError(FloatingPointError):
    """A loss, or a number of the training state, became NaN or infinite.

    Attributes:
      rank: the replica, or None where all were finite and what was merged is not.
      round: the round in which it happened; nothing of it is kept.
      state: the last good state, from before that round.
      batches: what that replica, or all of them, trained on in the round: ``(epoch, index)`` of each batch.

    Example:
      >>> import jax.numpy as jnp, numpy as np, optax
      >>> import jaxche
      >>> data = jaxche.Batches(np.full((4, 2), np.nan, np.float32), batch_size=2)
      >>> trainer = jaxche.Trainer(lambda w, x: jnp.mean((x @ w) ** 2), optax.sgd(0.1))
      >>> try:
      ...     _ = trainer.fit(trainer.init(jnp.zeros(2)), data, progress=False)
      ... except jaxche.NonFiniteLossError as error:
      ...     trainer.params(error.state).tolist(), error.batches[0]
      ([0.0, 0.0], (0, 0))
    """

    def __init__(
        self, message: str, rank: int | None, round: int, state: Any, batches: tuple[tuple[int, int], ...] = ()
    ):
        super().__init__(message)
        self.rank, self.round, self.state, self.batches = rank, round, state, batches
