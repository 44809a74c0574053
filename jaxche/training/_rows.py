"""Rows by speed: which every replica takes in the next round, and the choice of ``policy="auto"``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from jaxche.cadence import ApplyPolicy, choose
from jaxche.reports import RoundInfo
from jaxche.training._state import TrainerState

# The shares of rows are multiples of a batch divided by this.
_SHARES_OF_A_BATCH = 64
# A round of a cadence in which the slowest replica has time for as many batches deals out whole ones.
_WHOLE_BATCHES = 4
# The number of batches in a shorter round changes if it is so far from the wanted one.
_CHANGE = 0.15


class RowRules(NamedTuple):
    """How the rows of batches are shared.

    Attributes:
      by_speed: whether they are; if not, each replica takes whole batches.
      joined: batches in an update under ``sync``, unless ``policy="auto"`` has chosen a number.
      unit: shares are multiples of it, because each device of a sharded replica takes as many rows.
    """

    by_speed: bool
    joined: int
    unit: int


def next_shares(
    state: TrainerState,
    info: RoundInfo,
    rules: RowRules,
    policy_of: Callable[[TrainerState], ApplyPolicy],
    batch_size: int,
    limits: Callable[[], Sequence[float]],
) -> TrainerState:
    """The state with the shares of the rows that follow from the times of the round, and with the choice.

    ``limits`` are the most rows of a step of each replica.
    """
    shares, che, choice = state.row_shares, state.che, state.choice
    if not rules.by_speed or che is None:
        return state
    shares = shares.report(info.counts, info.rows, info.wall_ms)
    if choice is not None:
        choice = choose(choice, shares, che, batch_size, info.round)
        if choice.policy is ApplyPolicy.CADENCE and info.policy == ApplyPolicy.SYNC:
            che = replace(che, travel_samples=())
    state = replace(state, choice=choice, che=che)
    joined, local = (choice and choice.joined) or rules.joined, policy_of(state) is not ApplyPolicy.SYNC
    if local:
        # "auto" changes the length of a round often; whole batches need no other programs.
        if choice is not None or not 0 < che.round_ms < _WHOLE_BATCHES * max(che.ms_per_batch):
            return replace(state, row_shares=shares.without())
        exact = che.round_ms * sum(1 / ms for ms in che.ms_per_batch if ms)
        # Other sizes are compiled for, so the number stays while it is about right.
        joined = shares.joined if abs(shares.joined - exact) < _CHANGE * exact else max(1, round(exact))
    unit = math.lcm(rules.unit, max(1, batch_size // _SHARES_OF_A_BATCH))
    return replace(state, row_shares=shares.split(joined, batch_size, unit, limits(), local))
