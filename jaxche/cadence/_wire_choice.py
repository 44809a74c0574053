"""The choice of ``wire="auto"``: numbers in float32 while merges are cheap, then codes, if they are merged faster."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median_low

from jaxche.cadence._elche import ElChe
from jaxche.cadence._tuner import MEMORY

# The two wires to choose from: exact numbers, and the fewest bytes.
AUTO_WIRES = ("float32", "int4")
# Codes are tried where merges take this share of the time.
DEAR = 0.05
# They are taken if a merge takes this part of one in float32, or less: on a fast link their arithmetic costs more than
# the bytes that they save.
_FASTER = 0.7
# A merge is long if it takes so many steps of the fastest replica. To run it beside steps on whole batches is worth the
# delay of its result then.
_LONG = 20


@dataclass(frozen=True)
class WireChoice:
    """The wire of the next merge, and the reason in one line; empty before the decision."""

    wire: str = AUTO_WIRES[0]
    reason: str = ""


def merge_share(che: ElChe) -> float:
    """The share of the time that merges take at the present length of a round, hidden or not: C / (T + C).

    0 until three merges were measured, or one that is long.
    """
    steps_ms = max(n * ms for n, ms in zip(che.batch_counts, che.ms_per_batch, strict=True))
    if not (che.sync_samples and steps_ms):
        return 0.0
    if len(che.sync_samples) < MEMORY and not is_long_merge(che):
        return 0.0
    return median_low(che.sync_samples) / (steps_ms + median_low(che.sync_samples))


def is_long_merge(che: ElChe) -> bool:
    """Whether merges take as long as 20 steps of the fastest replica."""
    return median_low(che.sync_samples) >= _LONG * min(ms for ms in che.ms_per_batch if ms)


def choose_wire(che: ElChe, coded_ms: float) -> WireChoice:
    """The choice where merges are dear; ``coded_ms`` is the measured time of one with codes."""
    exact, coded = AUTO_WIRES
    exact_ms, share = median_low(che.sync_samples), merge_share(che)
    found = f"merges in {exact} of {exact_ms:.3g} ms took {share:.0%} of the time, and one in {coded} takes"
    wire = coded if coded_ms <= _FASTER * exact_ms else exact
    return WireChoice(wire, f"{found} {coded_ms:.3g} ms: wire={wire!r}")
