"""How fast each replica is to be: paces on equal devices, from what a step takes here."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

# Below this, a pace asks more of the system's clock than of the cadence.
_LEAST_MS = 20.0
_ROOM = 1.3
_SLOWEST = 2.5

Pace = str | tuple[float, ...] | None


def pace_argument(text: str) -> Pace:
    """Reads ``--pace``: "auto", "none" or milliseconds.

    Example:
      >>> pace_argument("20,50"), pace_argument("auto")
      ((20.0, 50.0), 'auto')
    """
    if text in ("auto", "none"):
        return text
    try:
        paces = tuple(float(word) for word in text.split(","))
    except ValueError:
        paces = ()
    if not paces or not all(0 < pace < math.inf for pace in paces):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no pace; write --pace auto, --pace none, or ms a step of each process, e.g. --pace 20,50"
        )
    return paces


def default_ratios(world_size: int) -> tuple[float, ...]:
    """Times a step of each rank compared with rank 0's: evenly from 1 to 2.5.

    Example:
      >>> default_ratios(2), default_ratios(4), default_ratios(1)
      ((1.0, 2.5), (1.0, 1.5, 2.0, 2.5), (1.0,))
    """
    if world_size == 1:
        return (1.0,)
    return tuple(round(1 + (_SLOWEST - 1) * rank / (world_size - 1), 2) for rank in range(world_size))


def auto_paces(step_ms: Sequence[float], ratios: Sequence[float]) -> tuple[float, ...]:
    """Paces in the given ratios that every rank can keep: base = max(20 ms, ⌈1.3 · slowest step⌉).

    Args:
      step_ms: what a step takes on each rank, all of them at work.
      ratios: one a rank; scaled so that the smallest is 1.

    Example:
      >>> auto_paces([3.1, 3.4], (1, 2.5)), auto_paces([20.0, 31.0], (1, 2.5))
      ((20.0, 50.0), (41.0, 102.5))
    """
    if len(ratios) != len(step_ms):
        raise ValueError(
            f"--ratios has {len(ratios)} value(s) for {len(step_ms)} replicas; "
            f"write --ratios {','.join(f'{ratio:g}' for ratio in default_ratios(len(step_ms)))}"
        )
    base = max(_LEAST_MS, math.ceil(_ROOM * max(step_ms)))
    return tuple(base * ratio / min(ratios) for ratio in ratios)


def check_paces(paces: Sequence[float], step_ms: Sequence[float]) -> None:
    """Refuse paces that the computation cannot keep.

    Raises:
      ValueError: says which rank, and what to write.
    """
    if len(paces) != len(step_ms):
        raise ValueError(f"--pace has {len(paces)} value(s) for {len(step_ms)} replicas; give each its ms a step")
    late = [rank for rank, pace in enumerate(paces) if step_ms[rank] > pace]
    if late:
        enough = [max(pace, math.ceil(_ROOM * step)) for pace, step in zip(paces, step_ms, strict=True)]
        rank = late[0]
        raise ValueError(
            f"--pace: rank {rank} is to take {paces[rank]:g} ms a step, but a step takes {step_ms[rank]:.1f} ms here; "
            f"write --pace {','.join(f'{pace:g}' for pace in enough)}, or a smaller --batch-size"
        )
