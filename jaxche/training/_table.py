"""The table every host reads alike after a merge: one row per replica."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxche.cadence import RoundPlan
from jaxche.training._agree import NonFiniteLossError, PlanMismatchError, raise_everywhere
from jaxche.training._merging import HOST_COLUMNS
from jaxche.training._replica import Outcome
from jaxche.training._state import ReplicaState

_COLUMN = {name: i for i, name in enumerate(HOST_COLUMNS)}
_EXAMPLES, _LOSS, _METRICS = (len(HOST_COLUMNS) + i for i in range(3))


def host_row(plan: RoundPlan, rank: int, outcome: Outcome, last_sync_ms: float, stop: int) -> list[float]:
    """What a replica adds to the table from the host's side, in the order of ``HOST_COLUMNS``."""
    failed = outcome.error is not None
    # The count weighs what is merged; where a step failed nothing is.
    return [
        plan.counts[rank] if failed else outcome.steps,
        outcome.wall_ms,
        last_sync_ms,
        failed,
        stop,
        *plan.digest_halves(),
    ]


class Table:
    """Named reads of the merged table; what does not depend on the host that reads it."""

    def __init__(self, numbers: np.ndarray, metrics: Sequence[str]):
        self._numbers = np.asarray(numbers, np.float64)
        self._metrics = metrics

    def _host(self, name: str) -> np.ndarray:
        return self._numbers[:, _COLUMN[name]]

    @property
    def counts(self) -> tuple[int, ...]:
        """Steps each replica took, fewer than planned where its time was up."""
        return tuple(int(n) for n in self._host("count"))

    @property
    def wall_ms(self) -> tuple[float, ...]:
        return tuple(self._host("wall_ms").tolist())

    @property
    def last_sync_ms(self) -> float:
        """Cost of the previous merge as the median replica saw it.

        The smallest would miss what replicas on a shared core cost each other; the mean would follow one that
        started late, say after an evaluation.
        """
        return float(np.median(self._host("last_sync_ms")))

    @property
    def stop(self) -> int:
        return int(self._host("stop").max())

    @property
    def examples(self) -> np.ndarray:
        return self._numbers[:, _EXAMPLES]

    @property
    def losses(self) -> tuple[float, ...]:
        """Mean loss per replica, nan where it took no step."""
        with np.errstate(invalid="ignore"):
            return tuple((self._numbers[:, _LOSS] / self.examples).tolist())

    @property
    def loss(self) -> float:
        return float(self._numbers[:, _LOSS].sum() / self.examples.sum())

    @property
    def metrics(self) -> dict[str, float]:
        means = self._numbers[:, _METRICS:].sum(axis=0) / self.examples.sum()
        return dict(zip(self._metrics, means.tolist(), strict=True))

    def refuse_bad(
        self, state: ReplicaState, plan: RoundPlan, ranks: Sequence[int], outcomes: Sequence[Outcome]
    ) -> None:
        """Raise, on every host alike, if this round must not count.

        Raises:
          Exception: whatever a local replica raised.
          RankError: another process's replica raised.
          PlanMismatchError: hosts planned different rounds.
          NonFiniteLossError: a loss is NaN or infinite.
        """
        if self._host("failed").any():
            errors = [(outcome.error, rank) for rank, outcome in zip(ranks, outcomes, strict=True) if outcome.error]
            raise_everywhere(*(errors[0] if errors else (None, ranks[0])), f"round {plan.round}")
        digests = [tuple(row) for row in self._numbers[:, [_COLUMN["plan_high"], _COLUMN["plan_low"]]]]
        if len(set(digests)) > 1:
            raise PlanMismatchError(
                f"round {plan.round}: hosts planned different rounds; this one planned counts={plan.counts} from batch "
                f"{plan.start} of {plan.epoch_size} in epoch {plan.epoch}, and ranks "
                f"{[r for r, d in enumerate(digests) if d != tuple(map(float, plan.digest_halves()))]} something else; "
                "use the same data, seed and settings on all of them"
            )
        bad = [r for r, n in enumerate(plan.counts) if n and not np.isfinite(self._numbers[r, _LOSS])]
        if bad:
            raise NonFiniteLossError(
                f"the loss of rank {bad[0]} became {self._numbers[bad[0], _LOSS]} in round {plan.round} (epoch "
                f"{plan.epoch}); the round was not merged and this error's .state is the last good one. Try a lower "
                "learning rate or optax.chain(optax.clip_by_global_norm(1.0), tx)",
                bad[0],
                plan.round,
                state,
            )
