"""The fields of a cadence: its settings and its measurements."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, repr=False)
class CadenceState:
    """The fields of :class:`~jaxche.ElChe`, which documents them; its tuners read them."""

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
    round_ms: float = field(default=0.0, kw_only=True)
    overlap: float = field(default=0.0, kw_only=True)
    half_life: float = field(default=1.0, kw_only=True)
