"""The error of a round in which a number became NaN or infinite: where, in which batches, and what to look at."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxche.averaging import path_names
from jaxche.data import Key, SequenceReader, non_finite_leaves
from jaxche.training._plan import PlannedRound
from jaxche.training._state import TrainerState

# The most batches in which the cause of a number that is not finite is searched.
_LOOKED_AT = 200


class NonFiniteLossError(FloatingPointError):
    """A loss, a gradient or a number of the training state became NaN or infinite.

    Attributes:
      rank: rank of the replica, or None if all replicas were finite and the merged state is not.
      round: number of the round; it is not merged.
      state: the state before that round; None in a copy or a pickle of the error, and with ``fit(donate=True)``.
      batches: ``(epoch, index)`` of the batches of that replica, or of all replicas, in the round.

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

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = (*self.args, self.rank, self.round, None, self.batches)
        return type(self), arguments, self.__dict__ | {"state": None}


def non_finite_error(
    planned: PlannedRound, counts: Sequence[int] | Mapping[int, int], what: str, rank: int | None = None
) -> NonFiniteLossError:
    """The error of a round with these counts of steps, by rank; ``rank`` is None if only the merged state is broken."""
    plan = planned.plan
    suspects = range(len(plan.counts)) if rank is None else planned.group_of(rank)
    if 1 < len(suspects) < len(plan.counts):
        what += f", or that of another replica of its group {tuple(suspects)} did before they merged,"
    ends = [None if plan.shares else counts[r] for r in suspects]
    taken = [planned.batches(r)[:end] for r, end in zip(suspects, ends, strict=True)]
    if (unsent := planned.state.unsent) is not None:
        taken = [*(unsent.batches[r] for r in suspects), *taken]
    batches = tuple(dict.fromkeys(itertools.chain(*taken)))
    state, kept = planned.state, "; this error's .state is the one before it"
    if state.is_deleted:
        state, kept = None, ""
    return NonFiniteLossError(
        f"{what} in round {plan.round}, which trained on {_batch_names(batches)}. "
        f"{_advice(planned, batches)}. The round was not merged{kept}",
        rank,
        plan.round,
        state,
        batches,
    )


def _advice(planned: PlannedRound, batches: Sequence[Key]) -> str:
    """What to look at after a number that is not finite: the state, the values of these batches, or the optimizer."""
    reader = planned.reader
    if not planned.state.is_deleted and (names := _nan_names(planned.state)):
        return f"There was NaN before the round, in {', '.join(names[:4])}; look at what trainer.init was given"
    wait = ", overlap=0" if planned.overlapped else ""  # stable at higher rates
    advice = (
        f"Try a lower learning rate{wait} or tx=optax.chain(optax.clip_by_global_norm(1.0), tx), and look for a "
        "gradient that is not finite although the loss is (sqrt or log at 0, a mean of nothing)"
    )
    if not isinstance(reader, SequenceReader):  # its batches cannot be read again
        return f"Look for NaN and infinite values in these batches. {advice}"
    found: list[str] = []
    for key in batches[:_LOOKED_AT]:
        with contextlib.suppress(Exception):  # the data may not be read again
            found += non_finite_leaves(key, reader.take(key))
    if not found:
        return f"The numbers in these batches are finite. {advice}"
    text = ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")
    return f"The data has {text}; take these examples out, or write np.nan_to_num(x)"


def _nan_names(state: TrainerState) -> list[str]:
    """The parameters and the model state of this process that have NaN, by name."""
    trees = {name: [getattr(one, name) for one in state.local_states[:1]] for name in ("params", "model_state")}
    return [
        "/".join((name, *path_names(path[1:])))
        for name, tree in trees.items()
        for path, leaf in jax.tree.leaves_with_path(tree)
        if jnp.issubdtype(leaf.dtype, jnp.inexact) and any(jnp.isnan(one.data).any() for one in leaf.addressable_shards)
    ]


def _batch_names(batches: Sequence[tuple[int, int]]) -> str:
    """The batches as text, e.g. ``batches 3 to 7 of epoch 0, batch 0 of epoch 1``."""
    by_epoch: dict[int, list[int]] = {}
    for epoch, index in batches:
        by_epoch.setdefault(epoch, []).append(index)
    return ", ".join(
        f"batch{'es' * (len(found) > 1)} {_ranges(sorted(found))} of epoch {epoch}" for epoch, found in by_epoch.items()
    )


def _ranges(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return " and ".join(str(a) if a == b else f"{a} to {b}" for a, b in runs)
