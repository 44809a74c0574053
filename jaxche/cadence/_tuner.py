"""What a tuner is: a rule by which a cadence follows the reports of its rounds, and what other modules ask of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

# NumPy holds counts in 64 bits; a time near 0 must not overflow them.
LARGEST_COUNT = 2.0**53
# Number of stored reports.
MEMORY = 3
# A relative error of the median above this is a change of speed, not jitter.
JUMP = 0.5


@dataclass(frozen=True, repr=False)
class CadenceState:
    """The fields of :class:`~jaxche.ElChe`, which documents them: what the tuners read, and what they change."""

    world_size: int = 2
    anchor: int = 10
    overhead_target: float = 0.10
    max_anchor: int = 200
    max_batch_diff: int | None = None
    tuner: str = "seed"
    min_anchor: int = field(default=0, kw_only=True)
    batch_counts: tuple[int, ...] = field(default=(), kw_only=True)
    ms_per_batch: tuple[float, ...] = field(default=(), kw_only=True)
    ms_samples: tuple[tuple[float, ...], ...] = field(default=(), kw_only=True)
    sync_samples: tuple[float, ...] = field(default=(), kw_only=True)
    travel_samples: tuple[float, ...] = field(default=(), kw_only=True)
    exchange_samples: tuple[float, ...] = field(default=(), kw_only=True)
    round_ms: float = field(default=0.0, kw_only=True)
    overlap: float = field(default=0.0, kw_only=True)
    half_life: float = field(default=1.0, kw_only=True)


class Report(NamedTuple):
    """The measurements of a round, as :meth:`~jaxche.ElChe.report_timing` takes them; arrays have one entry a rank."""

    wall_ms: np.ndarray
    batches: np.ndarray
    sync_ms: float
    travel_ms: float
    exchange_ms: float


class Tuner(NamedTuple):
    """A rule by which a cadence follows the reports of its rounds.

    Attributes:
      update: the fields of a cadence that a report changes.
      nudged: the counts of a cadence whose anchor is lowered to a number, [R]; None for counts in proportion to speeds.
      stores_merges: whether it stores the times of merges, and so learns from every round. Without them it learns the
        overhead from whole rounds only.
      chooses_round_ms: whether it chooses the length of a round in ms, which steps that share batches need; else the
        anchor follows the overhead target.
      has_min_anchor: whether it does not lower the anchor below ``min_anchor``, nor raise it to that after a nudge.
    """

    update: Callable[[CadenceState, Report], dict[str, Any]]
    nudged: Callable[[CadenceState, int], np.ndarray] | None = None
    stores_merges: bool = True
    chooses_round_ms: bool = False
    has_min_anchor: bool = False
