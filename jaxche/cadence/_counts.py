"""Counts, the batches of each rank in a round: limit the lead, clamp to a total, split by ratio, interleave."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxche.cadence._checks import whole_number

# NumPy holds counts in 64 bits; a time near 0 must not overflow them.
LARGEST_COUNT = 2.0**53


def round_half_away(x: np.ndarray) -> np.ndarray:
    """Round non-negative numbers as Rust does, halves up; NumPy and Python round halves to even."""
    whole = np.floor(x)
    return whole + (x - whole >= 0.5)


def limit_lead(counts: Sequence[int], max_batch_diff: int | None) -> tuple[int, ...]:
    """Lower the counts that lead the smallest one by more than ``max_batch_diff``.

    n_i ← min(n_i, min_j n_j + max_batch_diff)

    Args:
      counts: batches of each rank in a round.
      max_batch_diff: largest lead in batches; 0 is lockstep, None is no limit.

    Returns:
      The limited counts, one int a rank.

    Raises:
      ValueError: if ``max_batch_diff`` is negative or not a whole number.

    References:
      flodl 0.4.0, ``ElChe::with_max_batch_diff``: documented as this limit; its code only limits the change of a
      count in one report.

    Example:
      >>> limit_lead((46, 20), 10)
      (30, 20)
      >>> limit_lead((46, 20), 0)
      (20, 20)
    """
    if max_batch_diff is None or not counts:
        return tuple(counts)
    top = min(counts) + whole_number("max_batch_diff", max_batch_diff, 0, "max_batch_diff=10, or None for no limit")
    return tuple(n if n < top else top for n in counts)


def split_by_ratio(total: int, ratios: Sequence[float]) -> tuple[int, ...]:
    """Split ``total`` into whole parts proportional to ``ratios``, by largest remainder, as flodl 0.4.0 splits epochs.

    Ties go to the lower rank; ratios that are all zero give equal parts.
    """
    total = whole_number("total", total, 0, "total=100")
    share = np.asarray(ratios, np.float64)
    if share.ndim != 1 or not share.size or not np.isfinite(share).all() or (share < 0).any():
        raise ValueError(f"ratios={ratios!r} must be finite and at least 0, one a part; write e.g. ratios=[3, 2, 1]")
    # Dividing by the largest first keeps the sum of huge ratios finite.
    share = share / share.max() if share.max() > 0 else np.ones_like(share)
    exact = total * (share / share.sum())
    parts = np.floor(exact).astype(np.int64)
    short = total - int(parts.sum())
    # Stable, so equal remainders favour the lower rank. A remainder of −1 can only come from rounding just above total.
    order = np.argsort(parts - exact, kind="stable")
    parts[order[: max(short, 0)]] += 1
    if short < 0:
        parts[np.argmax(parts)] += short
    return tuple(parts.tolist())


def proportional_clamp(counts: Sequence[int], max_total: int) -> tuple[int, ...]:
    """The rule of flodl 0.4.0: scale and floor, at least 1 a rank; the remainder goes one each to the first ranks.

    The sum can exceed ``max_total``, because every rank gets at least 1; ``clamp_counts`` corrects that.
    """
    total = sum(counts)
    if total <= max_total:
        return tuple(counts)
    scaled = np.maximum(np.floor(np.asarray(counts, np.float64) * (max_total / total)), 1).astype(np.int64)
    scaled[: max(max_total - int(scaled.sum()), 0)] += 1
    return tuple(scaled.tolist())


def clamp_counts(counts: Sequence[int], max_total: int) -> tuple[int, ...]:
    """Clamp counts to a sum of at most ``max_total``, in proportion.

    Each rank gets at least one batch. If there are fewer batches than ranks, the ranks with the largest counts (the
    fastest) get one each and the others 0.

    Args:
      counts: batches of each rank, at least 1 each.
      max_total: number of batches left, at least 0.

    Returns:
      One int a rank, summing to min(Σ n_i, max_total).

    Raises:
      ValueError: if ``max_total`` is negative or not a whole number.

    References:
      flodl 0.4.0, ``ElChe::clamp_total``, which gives 1 a rank even past the end of an epoch.

    Example:
      >>> clamp_counts((46, 20), 33), clamp_counts((46, 20), 1), clamp_counts((100, 1, 1), 5)
      ((23, 10), (1, 0), (3, 1, 1))
    """
    max_total = whole_number("max_total", max_total, 0, "max_total=100")
    world_size = len(counts)
    if max_total < min(world_size, sum(counts)):
        ones = np.zeros(world_size, np.int64)
        ones[np.argsort(-np.asarray(counts), kind="stable")[:max_total]] = 1
        return tuple(ones.tolist())
    clamped = proportional_clamp(counts, max_total)
    if sum(clamped) > max_total:
        spare = split_by_ratio(max_total - world_size, counts)
        clamped = tuple(1 + extra for extra in spare)
    return clamped


def interleave(counts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The places of the batches of each rank, in the order in which ranks of these counts finish them.

    Batch i of n ends at (i + 1/2) / n of the round; ties go to the lower rank.

    Example:
      >>> interleave((4, 2))
      ((0, 2, 3, 5), (1, 4))
    """
    order = sorted(((i + 0.5) / n, rank) for rank, n in enumerate(counts) for i in range(n))
    places: list[list[int]] = [[] for _ in counts]
    for place, (_, rank) in enumerate(order):
        places[rank].append(place)
    return tuple(map(tuple, places))
