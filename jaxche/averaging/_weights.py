"""Merge rules: the weight of each replica's local progress in a merge."""

from __future__ import annotations

import math
from collections.abc import Sequence

MERGE_RULES = ("steps", "batch", "fednova")


def merge_weights(
    rule: str,
    counts: Sequence[float],
    batch_sizes: Sequence[float] | None = None,
    p: Sequence[float] | None = None,
) -> tuple[tuple[float, ...], float]:
    r"""Weights :math:`w_i` (summing to one) and step length :math:`\alpha` of a merge.

    .. math:: x' = x_0 - \alpha \sum_i w_i \Delta_i, \qquad \Delta_i = x_0 - x_i

    ===========  =========================  ==========================================================
    rule         :math:`w_i`                :math:`\alpha`
    ===========  =========================  ==========================================================
    ``steps``    :math:`n_i / N`            1
    ``batch``    :math:`b_i / \sum b`       1
    ``fednova``  :math:`\propto p_i / n_i`  :math:`\tau \sum p_i / n_i`, with :math:`\tau = \sum p_i n_i`
    ===========  =========================  ==========================================================

    ``steps`` weights replicas by their local steps. ``batch`` is the uniform mean if batches are equal (the best ratio
    of signal to noise on shuffled data). ``fednova`` gives replica i exactly the share ``p_i`` of the objective. A
    replica without a step has weight 0 under every rule.

    Args:
      rule: ``"steps"``, ``"batch"`` or ``"fednova"``.
      counts: local steps ``n_i`` of each replica in the round; a step on a part of a batch may count as that part.
      batch_sizes: examples per batch ``b_i`` of each replica; equal if not given. Only for ``batch``.
      p: share of each replica in the objective, not necessarily normalised; ``n_i / N`` if not given. Only for
        ``fednova``.

    Returns:
      ``(weights, alpha)``: a tuple of floats that sum to one, and a float.

    Raises:
      ValueError: an unknown rule, no steps at all, lists of different lengths, numbers that are negative or not
        finite, or a sum that is not.

    References:
      `steps` is flodl's weighted average. `fednova`: Wang et al., *Tackling the objective inconsistency problem in
      heterogeneous federated optimization*, NeurIPS 2020.

    Example:
      >>> merge_weights("steps", [1, 3])
      ((0.25, 0.75), 1.0)
      >>> merge_weights("batch", [1, 3])
      ((0.5, 0.5), 1.0)
      >>> merge_weights("fednova", [1, 3])
      ((0.5, 0.5), 1.25)
    """
    if rule not in MERGE_RULES:
        raise ValueError(f"merge={rule!r} is not a merge rule; write one of {', '.join(map(repr, MERGE_RULES))}")
    try:
        n = [float(c) for c in counts]
    except (TypeError, ValueError):
        raise ValueError(f"counts={counts!r} must be a list of numbers; write e.g. counts=[10, 23]") from None
    if not n or any(not math.isfinite(c) or c < 0 for c in n) or sum(n) == 0:
        raise ValueError(
            f"counts={list(counts)!r}: a merge needs at least one step and no negative count, e.g. counts=[10, 23]"
        )
    if rule == "steps":
        raw, alpha = n, 1.0
    elif rule == "batch":
        sizes = _checked("batch_sizes", batch_sizes, n) if batch_sizes is not None else [1.0] * len(n)
        raw, alpha = [b if c else 0.0 for b, c in zip(sizes, n, strict=True)], 1.0
    else:
        shares = _checked("p", p, n) if p is not None else n
        shares = [share / (sum(shares) or 1.0) for share in shares]
        raw = [share / c if c else 0.0 for share, c in zip(shares, n, strict=True)]
        alpha = sum(raw) * sum(share * c for share, c in zip(shares, n, strict=True))
    norm = sum(raw)
    if not all(map(math.isfinite, (sum(n), norm, alpha))):
        raise ValueError(
            f"merge={rule!r} with counts={list(counts)!r}: the numbers are too large or too small for sums in float64; "
            "write e.g. counts=[10, 23]"
        )
    if norm == 0:
        raise ValueError(f"merge={rule!r} with counts={list(counts)!r} gives every replica weight 0")
    return tuple(r / norm for r in raw), alpha


def _checked(name: str, values: Sequence[float], counts: Sequence[float]) -> list[float]:
    try:
        values = [float(v) for v in values]
    except (TypeError, ValueError):
        raise ValueError(f"{name}={values!r} must be a list of numbers; give one per replica") from None
    if len(values) != len(counts):
        raise ValueError(f"{name} has {len(values)} entries for {len(counts)} replicas; give one per replica")
    if any(not math.isfinite(v) or v < 0 for v in values):
        raise ValueError(f"{name}={values!r}: every entry must be finite and not negative")
    return values
