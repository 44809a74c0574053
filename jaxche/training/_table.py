"""The table every host reads alike after a merge: one row per replica."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from jaxche.cadence import RoundPlan
from jaxche.distributed import Group
from jaxche.training._errors import NonFiniteLossError, PlanMismatchError
from jaxche.training._merging import DIFFERS, HOST_COLUMNS
from jaxche.training._replica import Outcome
from jaxche.training._state import ReplicaState

_COLUMN = {name: i for i, name in enumerate(HOST_COLUMNS)}
_NOT_FINITE, _EXAMPLES, _LOSS, _METRICS = (len(HOST_COLUMNS) + i for i in range(4))


def host_row(
    plan: RoundPlan, rank: int, outcome: Outcome, last_sync_ms: float, stop: int, pending: int = 0
) -> list[float]:
    """What a replica adds to the table from the host's side, in the order of ``HOST_COLUMNS``."""
    failed = outcome.error is not None
    # The count weighs what is merged; where a step failed nothing is.
    return [
        plan.counts[rank] if failed else outcome.steps,
        outcome.wall_ms,
        last_sync_ms,
        failed,
        stop,
        pending,
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
        self,
        group: Group,
        state: ReplicaState,
        plan: RoundPlan,
        ranks: Sequence[int],
        outcomes: Sequence[Outcome],
        finite: bool,
    ) -> None:
        """Raise, on every host alike, if this round must not count; ``finite`` is the flag of the merge.

        Raises:
          Exception: whatever a local replica raised.
          RankError: another process's replica raised.
          PlanMismatchError: hosts planned different rounds.
          NonFiniteLossError: a loss, a replica's state or gradients, or what was merged is NaN or infinite.
        """
        if self._host("failed").any():
            errors = [(outcome.error, rank) for rank, outcome in zip(ranks, outcomes, strict=True) if outcome.error]
            group.raise_everywhere(*(errors[0] if errors else (None, ranks[0])), f"round {plan.round}")
        digests = [tuple(row) for row in self._numbers[:, [_COLUMN["plan_high"], _COLUMN["plan_low"]]]]
        if len(set(digests)) > 1 or DIFFERS in digests:
            raise PlanMismatchError(
                f"round {plan.round}: hosts planned different rounds; this one planned counts={plan.counts} from batch "
                f"{plan.start} of {plan.epoch_size} in epoch {plan.epoch}, and ranks "
                f"{[r for r, d in enumerate(digests) if d != tuple(map(float, plan.digest_halves()))]} something else; "
                "use the same data, seed and settings on all of them"
            )
        losses = self._numbers[:, _LOSS]
        bad = [r for r, n in enumerate(plan.counts) if n and not np.isfinite(losses[r])]
        if bad:
            self._refuse_numbers(state, plan, bad[0], f"the loss of rank {bad[0]} became {losses[bad[0]]}")
        broken = np.flatnonzero(self._numbers[:, _NOT_FINITE]).tolist()
        if broken:
            what = f"a gradient, a parameter or a state of rank {broken[0]} became NaN or infinite"
            self._refuse_numbers(state, plan, broken[0], what)
        if not finite:
            self._refuse_numbers(state, plan, None, "the merged parameters or optimizer state became NaN or infinite")

    def _refuse_numbers(self, state: ReplicaState, plan: RoundPlan, rank: int | None, what: str) -> NoReturn:
        ranks = range(len(plan.counts)) if rank is None else [rank]
        batches = tuple(batch for r in ranks for batch in plan.share(r)[: self.counts[r]])
        raise NonFiniteLossError(
            f"{what} in round {plan.round}, which trained on {_listed(batches)}. The round was not merged, and this "
            "error's .state is the one from before it. Look for NaN, infinite or empty values in these batches and for "
            "a gradient that is not finite where the loss is (sqrt or log at 0); else try a lower learning rate or "
            "optax.chain(optax.clip_by_global_norm(1.0), tx)",
            rank,
            plan.round,
            state,
            batches,
        )


def _listed(batches: Sequence[tuple[int, int]]) -> str:
    """E.g. ``batches 3 to 7 of epoch 0, batch 0 of epoch 1``."""
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
