"""ElChe, the controller of the cadence: how many batches each replica runs before the next merge."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import median_low
from typing import Any

import numpy as np

from jaxche.cadence._round_plan import (
    clamp_counts,
    limit_lead,
    proportional_clamp,
    ratio_counts,
    round_half_away,
    speed_ratios,
)
from jaxche.cadence._tuner import LARGEST_COUNT, CadenceState, Report
from jaxche.cadence._tuner_progress import PROGRESS, MergeCost
from jaxche.cadence._tuner_seed import SEED
from jaxche.cadence._tuner_steady import STEADY
from jaxche.drawing import COLOURS, Bar, Lane, lanes, ranks_to_show
from jaxche.messages import finite_number, one_of, whole_number

# A new tuner is a module like theirs, and a line here.
TUNERS = {"seed": SEED, "steady": STEADY, "progress": PROGRESS}


@dataclass(frozen=True, repr=False)
class ElChe(CadenceState):
    """How many batches each replica runs before the next merge: faster replicas run more batches in the same time.

    n_i = round(a · t_slow / t_i)

    The anchor a is the count of the slowest replica. A tuner sets it from measured times. The value is immutable: every
    method returns the next cadence. All measurements are in its fields, so equal reports give equal plans on every
    host, ``==`` compares, and ``to_dict`` is a checkpoint.

    ``tuner="steady"`` finds from any start the smallest anchor whose overhead meets the target. The overhead is the
    merge, and the waiting because counts are whole numbers. The tuner uses the median of the last three reports, so it
    ignores one outlier and follows a real change after two reports. A first report may shorten the round, not lengthen
    it. ``max_batch_diff`` limits the lead itself.

    ``tuner="progress"`` finds the round length with the most progress per second:

    T = √(C · τ),  τ = 0.45 · (time in which a replica moves as far as its parameters are long)

    with the time C of a merge. The learning rate, the optimizer and the phase of training change how fast replicas
    move, so τ follows them.

    ``tuner="seed"`` is the original, number for number: C / (a · t_slow) stays near the overhead target. It blends each
    new time into its estimate by the relative error. Its anchor grows in proportion and shrinks one by one, never below
    its start. Its counts ignore changes of 10 % or less. It does not forget a slow first report.

    Args:
      world_size: number of replicas, at least 2.
      anchor: batches of the slowest replica in a round, before anything is measured.
      overhead_target: largest share of a round's compute time that the merge may cost, 0.01 to 0.50.
      max_anchor: largest anchor (limits how far replicas move apart).
      max_batch_diff: largest lead in batches of the fastest over the slowest; 0 for equal counts, None for no limit.
        ``plan_round`` applies it; with the seed tuner it also limits the change of a count in one report.
      tuner: ``"seed"``, ``"steady"`` or ``"progress"``.
      min_anchor: smallest anchor of the seed tuner; 0 for ``anchor``. Leave out this and the fields below for a new
        cadence; they are measured.
      batch_counts: batches of each rank in the next round; empty for ``anchor`` each.
      ms_per_batch: smoothed milliseconds a batch of each rank; 0.0 before the first report.
      ms_samples: the last three reports in ms a batch, newest first; not with the seed tuner.
      sync_samples: the last three known merge times in ms, newest first; not with the seed tuner.
      travel_samples: the progress tuner's last three reports of ``travel_ms``, newest first.
      exchange_samples: the last three known times of the exchange of measurements with ``overlap``, newest first.
      round_ms: the best length of a round in ms by the progress tuner; 0.0 before it is known. It may be shorter than
        a batch of the slowest rank.
      overlap: the part of a round that runs beside the merge of the round before; the trainer sets it.
      half_life: factor on τ, above 1 if groups of replicas merge within rounds; the trainer sets it.

    Raises:
      ValueError: an argument out of range; the message has its value and the line to write.

    References:
      flodl 0.4.0, ``el_che.rs``.

    Example:
      >>> che = ElChe(world_size=2, anchor=10, overhead_target=0.5)
      >>> che = che.report_timing(wall_ms=[500.0, 1000.0], actual_batches=[10, 10], sync_ms=10.0)
      >>> che.batch_counts, che.anchor_wall_ms
      ((20, 10), 1000.0)
      >>> ElChe.from_dict(che.to_dict()) == che
      True
    """

    def __post_init__(self) -> None:
        target = finite_number("overhead_target", self.overhead_target, "overhead_target=0.10")
        if not 0.01 <= target <= 0.50:
            raise ValueError(f"overhead_target={target} is outside [0.01, 0.50]; write e.g. overhead_target=0.10")
        diff, world = self.max_batch_diff, "ElChe(world_size=2); one replica needs no ElChe"
        if diff is not None:
            diff = whole_number("max_batch_diff", diff, 0, "max_batch_diff=10, or None for no limit")
        # As plain numbers, which compare, hash and convert to JSON.
        checked: dict[str, Any] = {
            "world_size": whole_number("world_size", self.world_size, 2, world),
            "anchor": whole_number("anchor", self.anchor, 1, "ElChe(anchor=10)"),
            "overhead_target": target,
            "max_anchor": whole_number("max_anchor", self.max_anchor, 1, "ElChe(max_anchor=200)"),
            "max_batch_diff": diff,
        }
        one_of("tuner", self.tuner, TUNERS)
        # Only for a new cadence: with_max_anchor may leave a measured anchor above the limit, as in the original.
        if not self.min_anchor and self.anchor > self.max_anchor:
            raise ValueError(
                f"anchor={self.anchor} is above max_anchor={self.max_anchor}; write "
                f"ElChe(anchor={self.max_anchor}, max_anchor={self.max_anchor}) or a larger max_anchor"
            )
        checked["min_anchor"] = whole_number("min_anchor", self.min_anchor, 0, "ElChe(anchor=10)") or checked["anchor"]
        checked["batch_counts"] = tuple(self.batch_counts) or (self.anchor,) * self.world_size
        checked["ms_per_batch"] = tuple(map(float, self.ms_per_batch)) or (0.0,) * self.world_size
        checked["ms_samples"] = tuple(map(tuple, self.ms_samples))
        for name in ("sync_samples", "travel_samples", "exchange_samples"):
            checked[name] = tuple(getattr(self, name))
        for name, row in checked.items():
            object.__setattr__(self, name, row)
        for name in ("batch_counts", "ms_per_batch"):
            if len(checked[name]) != self.world_size:
                raise ValueError(
                    f"{name} has {len(checked[name])} entries but world_size={self.world_size}; if the number of "
                    f"replicas changed, start with a new ElChe(world_size={self.world_size})"
                )

    # The next round.

    def batches(self, rank: int) -> int:
        """Batches of ``rank`` in the next round; ValueError for a rank that does not exist."""
        return self.batch_counts[self._rank("rank", rank)]

    @property
    def total_batches(self) -> int:
        """Batches of all ranks in the next round."""
        return sum(self.batch_counts)

    @property
    def limited_counts(self) -> tuple[int, ...]:
        """The counts within ``max_batch_diff``, as rounds take them; those of the seed tuner may lead by more."""
        return limit_lead(self.batch_counts, self.max_batch_diff)

    @property
    def anchor_wall_ms(self) -> float:
        """Intended compute time of a round in ms, anchor · t_slow; 0.0 before the first report."""
        return self.anchor * max(self.ms_per_batch)

    @property
    def is_calibrated(self) -> bool:
        """Whether a speed has been measured."""
        return any(self.ms_per_batch)

    @property
    def has_speed_hint(self) -> bool:
        """Whether the counts differ between ranks, by hint or by measurement."""
        return len(set(self.batch_counts)) > 1

    @property
    def limit(self) -> str:
        """The reason in one line why the next round is shorter than the measurements ask for; empty if it is not.

        The seed tuner does not store the cost of merges, so the line is always empty with it.

        Example:
          >>> che = ElChe(2, 2, max_anchor=8, tuner="steady")
          >>> for _ in range(2):
          ...     che = che.report_timing([20.0, 50.0], [1, 1], sync_ms=100.0)
          >>> che.limit
          'max_anchor=8 limits rounds to 0.4 s; merges of 0.1 s ask for 1 s, max_anchor=20'
        """
        slow = max(self.ms_per_batch)
        if not slow or len(self.sync_samples) < 2:
            return ""
        sync_ms = median_low(self.sync_samples)
        cost = MergeCost.of(self.sync_samples, self.exchange_samples, self.overlap)
        chosen_ms = TUNERS[self.tuner].chooses_round_ms
        wanted_ms = self.round_ms if chosen_ms else cost.least_round_ms(self.overhead_target)
        wanted = math.ceil(wanted_ms / slow - 1e-9)
        if wanted <= self.max_anchor:
            return ""
        return (
            f"max_anchor={self.max_anchor} limits rounds to {self.max_anchor * slow / 1e3:.3g} s; merges of "
            f"{sync_ms / 1e3:.3g} s ask for {wanted_ms / 1e3:.3g} s, max_anchor={wanted}"
        )

    def clamp_total(self, max_total: int) -> tuple[int, ...]:
        """The counts clamped to ``max_total`` batches, in proportion; below ``world_size``, one each to the fastest.

        From ``world_size`` up it is exactly the original's rule. That rule gives every rank at least 1, so the sum can
        exceed ``max_total`` if the share of a rank is far below 1. ``clamp_counts``, which plans the rounds of a
        training run, never exceeds it.

        Example:
          >>> ElChe(2, 10).with_speed_ratio(1, 2.3).clamp_total(16), ElChe(3, 10).clamp_total(2)
          ((12, 4), (1, 1, 0))
        """
        max_total = whole_number("max_total", max_total, 0, "clamp_total(100)")
        rule = proportional_clamp if max_total >= self.world_size else clamp_counts
        return rule(self.batch_counts, max_total)

    # Builders. They clamp silently, as the original's do; the constructor raises.

    def with_speed_ratio(self, slow_rank: int, ratio: float) -> ElChe:
        """First counts from a guess: ``slow_rank`` gets the anchor, all others ``ratio`` (at least 1) times as many.

        Example:
          >>> ElChe(2, 10).with_speed_ratio(slow_rank=1, ratio=2.3).batch_counts
          (23, 10)
        """
        slow_rank = self._rank("slow_rank", slow_rank)
        ratio = max(1.0, finite_number("ratio", ratio, "with_speed_ratio(slow_rank=1, ratio=2.3)"))
        fast = int(round_half_away(np.array([min(self.anchor * ratio, LARGEST_COUNT)]))[0])
        return replace(
            self, batch_counts=tuple(self.anchor if r == slow_rank else fast for r in range(self.world_size))
        )

    def with_overhead_target(self, target: float) -> ElChe:
        """The same cadence with another overhead target, clamped to [0.01, 0.50]."""
        target = finite_number("target", target, "with_overhead_target(0.1)")
        return replace(self, overhead_target=min(max(target, 0.01), 0.50))

    def with_max_anchor(self, max_anchor: int) -> ElChe:
        """The same cadence with another largest anchor, at least 1; counts follow at the next report."""
        high = max(1, whole_number("max_anchor", max_anchor, 0, "with_max_anchor(200)"))
        if self.min_anchor <= high:
            return replace(self, max_anchor=high)
        return replace(self, max_anchor=high, min_anchor=high, anchor=high)

    def with_max_batch_diff(self, max_batch_diff: int | None) -> ElChe:
        """The same cadence with another largest lead in batches: 0 for equal counts, None for no limit."""
        return replace(self, max_batch_diff=max_batch_diff)

    # Updates.

    def report_timing(
        self,
        wall_ms: Sequence[float] | np.ndarray,
        actual_batches: Sequence[int] | np.ndarray,
        sync_ms: float,
        travel_ms: float = 0.0,
        exchange_ms: float = 0.0,
    ) -> ElChe:
        r"""The cadence after a round: new speeds, then the anchor that the tuner chooses, then the counts.

        Args:
          wall_ms: compute time of each rank in ms, [R]; 0 for a rank without a timing, which keeps its estimate.
          actual_batches: batches that each rank ran in that time, [R].
          sync_ms: duration of the merge in ms, hidden or not; 0 if not known, which keeps the anchor.
          travel_ms: time in which a replica moves as far as its parameters are long, in ms: the duration of the round
            divided by :math:`\sqrt{\sum p_i \|\Delta_i\|^2} / \|\bar x\|`, with the share :math:`p_i` of each rank in
            the batches, under every merge rule; 0 if not known. For the progress tuner.
          exchange_ms: with ``overlap``, the time in which replicas exchange the measurements of a round, in ms; 0 if
            not known. Not for the seed tuner.

        Returns:
          The cadence for the next round.

        Raises:
          ValueError: a length other than R, a negative or non-finite number, or time without a batch; the message has
            the rank.

        Example:
          >>> che = ElChe(2, 10).report_timing([100.0, 230.0], [10, 10], sync_ms=45.0)
          >>> che.anchor, che.batch_counts, che.ms_per_batch
          (20, (46, 20), (10.0, 23.0))
        """
        wall, batches = timings(wall_ms, actual_batches, self.world_size)
        report = Report(
            wall,
            batches,
            finite_number("sync_ms", sync_ms, "sync_ms=5.0, or 0.0 if not known", least=0.0),
            finite_number("travel_ms", travel_ms, "travel_ms=5000.0, or 0.0 if not known", least=0.0),
            finite_number("exchange_ms", exchange_ms, "exchange_ms=1.0, or 0.0 if not known", least=0.0),
        )
        return self._updated(**TUNERS[self.tuner].update(self, report))

    def nudge_anchor_down(self, factor: float) -> ElChe:
        """Shrink the anchor to ⌈a · factor⌉, even below its start, so that replicas that drift apart merge sooner.

        The next reports may raise it again; the policy ``"async"`` limits that. Before any timing only the anchor
        changes.

        Args:
          factor: clamped to [0.1, 1.0].

        Example:
          >>> ElChe(2, 20, 0.5).report_timing([50.0, 100.0], [20, 20], 0.0).nudge_anchor_down(0.5).batch_counts
          (20, 10)
        """
        factor = finite_number("factor", factor, "nudge_anchor_down(0.5)")
        anchor = min(max(1, math.ceil(self.anchor * min(max(factor, 0.1), 1.0))), self.anchor)
        if not self.is_calibrated:
            return replace(self, anchor=anchor)
        nudged = TUNERS[self.tuner].nudged
        return self._shortened(anchor, nudged(self, anchor) if nudged else self._in_proportion(anchor))

    def relax_anchor_up(self) -> ElChe:
        """One more batch for the slowest rank, up to ``max_anchor``, and the others in proportion.

        Example:
          >>> ElChe(2, 10).with_speed_ratio(1, 2.0).relax_anchor_up().batch_counts
          (22, 11)
        """
        anchor = self.anchor + 1
        if anchor > self.max_anchor:
            return self
        return self._updated(anchor=anchor, batch_counts=self._in_proportion(anchor))

    def capped(self, anchor: int) -> ElChe:
        """The same cadence with an anchor of at most ``anchor``; no count grows.

        Example:
          >>> ElChe(2, 10).with_speed_ratio(1, 2.0).capped(4).batch_counts
          (8, 4)
        """
        anchor = whole_number("anchor", anchor, 1, "capped(10)")
        if self.anchor <= anchor:
            return self
        return self._shortened(anchor, np.minimum(self._in_proportion(anchor), self.batch_counts))

    def _shortened(self, anchor: int, counts: np.ndarray) -> ElChe:
        """The same cadence with a lower anchor, from which ``progress`` chooses again at the next report."""
        round_ms = min(self.round_ms, anchor * max(self.ms_per_batch, default=0.0))
        return self._updated(anchor=anchor, batch_counts=counts, round_ms=round_ms)

    # Serialization and display.

    def to_dict(self) -> dict[str, Any]:
        """Every field by name; ``from_dict`` also accepts it after a round trip through JSON."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> ElChe:
        """The cadence that ``to_dict`` saved."""
        return cls(**saved)

    def __repr__(self) -> str:
        """One line: the number of ranks, the settings that are not the defaults, counts and times."""
        settings = [f for f in fields(self) if not f.kw_only and f.name != "world_size"]
        changed = [f"{f.name}={getattr(self, f.name)!r}" for f in settings if getattr(self, f.name) != f.default]
        counts, ms = short_row(self.batch_counts, str), short_row(self.ms_per_batch, "{:.4g}".format)
        named = [f"world_size={self.world_size}", *changed, f"batch_counts={counts}", f"ms_per_batch={ms}"]
        return f"ElChe({', '.join(named)})"

    def _repr_html_(self) -> str:
        """The next round as lanes of bars: every step of every rank, in ms once speeds are known."""
        ms = self.ms_per_batch if self.is_calibrated else (1.0,) * self.world_size
        shown = ranks_to_show(ms)
        rows = []
        for lane, rank in enumerate(shown):
            colour, steps = COLOURS[lane % len(COLOURS)], self.batch_counts[rank]
            pace = f" of {ms[rank]:.4g} ms" if self.is_calibrated else ""
            bars = [Bar(0.0, steps * ms[rank], colour, f"{steps} steps{pace}")]
            if self.is_calibrated and steps <= 12:
                bars = [Bar(i * ms[rank], ms[rank], colour, str(i + 1)) for i in range(steps)]
            rows.append(Lane(f"rank {rank}", bars))
        unit = "ms" if self.is_calibrated else "steps (speeds are not known yet)"
        some = f", {len(shown)} of {self.world_size} ranks" if len(shown) < self.world_size else ""
        caption = f"ElChe: anchor {self.anchor}, overhead target {self.overhead_target:.1%}, tuner {self.tuner}{some}"
        return lanes(rows, unit, caption)

    def _rank(self, name: str, rank: int) -> int:
        rank = whole_number(name, rank, 0, f"{name}=0")
        if rank >= self.world_size:
            raise ValueError(
                f"{name}={rank} is not one of world_size={self.world_size} ranks; write 0 to {self.world_size - 1}"
            )
        return rank

    def _in_proportion(self, anchor: int) -> np.ndarray:
        # Before any timing the counts are the only hint of the speeds.
        ms = np.array(self.ms_per_batch) if self.is_calibrated else 1.0 / np.array(self.batch_counts)
        return ratio_counts(anchor, speed_ratios(ms), self.max_batch_diff)[1]

    def _updated(self, **changes: Any) -> ElChe:
        if "batch_counts" in changes:
            changes["batch_counts"] = tuple(changes["batch_counts"].astype(np.int64).tolist())
        if "ms_per_batch" in changes:
            changes["ms_per_batch"] = tuple(changes["ms_per_batch"].tolist())
        return replace(self, **changes)


def short_row(row: Sequence[Any], show: Callable[[Any], str]) -> str:
    """A tuple of one value a rank as text, long ones cut."""
    shown = [show(x) for x in row] if len(row) <= 8 else [*map(show, row[:4]), "…", *map(show, row[-2:])]
    return f"({', '.join(shown)})"


def timings(
    wall_ms: Sequence[float] | np.ndarray, actual_batches: Sequence[int] | np.ndarray, world_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """One round's measurements as float64 arrays [R]; ValueError names the first rank with an impossible number."""
    try:
        wall, batches = np.asarray(wall_ms, np.float64), np.asarray(actual_batches, np.float64)
    except (TypeError, ValueError):
        raise ValueError(
            f"wall_ms={wall_ms!r} and actual_batches={actual_batches!r} must be plain lists of numbers; "
            "write e.g. report_timing([500.0, 1000.0], [10, 10], sync_ms=5.0)"
        ) from None
    for name, array in (("wall_ms", wall), ("actual_batches", batches)):
        if array.shape != (world_size,):
            raise ValueError(
                f"{name} has shape {array.shape} but world_size={world_size}; write one number a rank, "
                f"{name} of length {world_size}"
            )
    _refuse(~(np.isfinite(wall) & (wall >= 0)), "wall_ms", wall, "a finite time in ms, at least 0")
    whole = np.isfinite(batches) & (batches >= 0) & (batches == np.floor(batches))
    _refuse(~whole, "actual_batches", batches, "a whole number, at least 0")
    idle = (batches == 0) & (wall > 0)
    if idle.any():
        rank = int(idle.argmax())
        raise ValueError(
            f"rank {rank}: actual_batches=0 but wall_ms={wall[rank]:g}; time without a batch does not measure a "
            f"speed; write wall_ms[{rank}]=0.0 for a rank that ran no batch"
        )
    return wall, batches


def _refuse(bad: np.ndarray, name: str, values: np.ndarray, wanted: str) -> None:
    if bad.any():
        rank = int(bad.argmax())
        raise ValueError(f"rank {rank}: {name}={values[rank]:g} must be {wanted}; leave the report out or correct it")
