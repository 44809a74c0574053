"""The arms of bench_quality.py: ways to use a fleet of devices of unequal speed. To add one, add a line to ``ARMS``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import optax

import jaxche

Speeds = tuple[float, ...]
Counts = tuple[int, ...]


class Progress(NamedTuple):
    """What the rule of an arm may look at before a round."""

    speeds: Speeds  # ms a batch of the arm's devices
    history: Sequence[jaxche.RoundInfo]
    clock_ms: float
    decay: float  # learning rate now, relative to its peak


@dataclass(frozen=True, eq=False)
class Arm:
    """A way to use a fleet: which of its devices, a trainer for them, and possibly a rule for the steps of a round."""

    name: str
    options: Mapping[str, Any]  # of jaxche.Trainer
    devices: Callable[[Speeds], Speeds]
    counts: Callable[[Progress], Counts] | None
    every: int = 1  # with ``rarely``: options of every so-many-th round
    rarely: Mapping[str, Any] = field(default_factory=dict)
    # With overlap, the exchange of the measurements of a round relative to a merge, where the cell has no link: 0 where
    # bytes take the time of a merge, 1 where trips over the network do.
    exchange: float = 0.0

    @property
    def group_ms(self) -> float:
        """Milliseconds of a merge of two devices behind a fast switch."""
        return GROUP_MS if "groups" in self.options else 0.0

    def trainers(
        self, loss_fn: Any, tx: Any, fleet: jaxche.VirtualFleet, ema: float | None = None
    ) -> list[jaxche.Trainer]:
        """The trainer of the ordinary rounds, and that of the rare ones."""
        kinds = [self.options, {**self.options, **self.rarely}][: 2 if self.rarely else 1]
        replicas = jax.devices()[: len(fleet.ms_per_batch)]
        made = [
            {n: option(len(replicas)) if callable(option) else option for n, option in one.items()} for one in kinds
        ]
        return [jaxche.Trainer(loss_fn, tx, replicas=replicas, fleet=fleet, ema=ema, **options) for options in made]


def whole(speeds: Speeds) -> Speeds:
    return speeds


def fastest(speeds: Speeds) -> Speeds:
    return (min(speeds),)


def equal_fast(speeds: Speeds) -> Speeds:
    return tuple(ms for ms in speeds if ms == min(speeds))


def summed(speeds: Speeds) -> Speeds:
    return (1 / sum(1 / ms for ms in speeds),)


def fitting(speeds: Speeds, ms: float) -> Counts:
    """Whole batches of each device in a round of ``ms``, or of one batch of the slowest if that takes longer."""
    return tuple(int(max(ms, max(speeds)) / one + 1e-9) for one in speeds)


def throughput(world_size: int) -> jaxche.ElChe:
    """The cadence that keeps merging and waiting near 1.5 % of the time."""
    return jaxche.ElChe(world_size, 2, 0.015, tuner="steady")


def pairs(world_size: int) -> list[list[int]]:
    """Two devices behind each switch."""
    return [[rank, rank + 1] for rank in range(0, world_size, 2)]


def rounds_of(ms: float) -> Callable[[Progress], Counts]:
    """Rounds of a fixed length."""
    return lambda progress: fitting(progress.speeds, ms)


def qsr(base_ms: float, share: float, most_ms: float) -> Callable[[Progress], Counts]:
    """The quadratic synchronization rule, H = max(H_base, (alpha / lr)^2); at the peak (alpha / lr)^2 is a share."""

    def counts(progress: Progress) -> Counts:
        ms = base_ms * max(1.0, share / max(progress.decay, 1e-3) ** 2)
        return fitting(progress.speeds, min(ms, most_ms))

    return counts


def adacomm(first_ms: float, interval_ms: float) -> Callable[[Progress], Counts]:
    """AdaComm: in each interval rounds of tau = ceil(tau_0 sqrt(F / F_0)), halved where that is no shorter."""

    def counts(progress: Progress) -> Counts:
        tau, last = first_ms, 0
        for info in progress.history:
            if info.clock_ms // interval_ms > last:
                last = info.clock_ms // interval_ms
                wanted = first_ms * math.sqrt(info.loss / progress.history[0].loss)
                tau = wanted if wanted < tau else tau / 2
        return fitting(progress.speeds, tau)

    return counts


def arm(
    name: str,
    devices: Callable[[Speeds], Speeds] = whole,
    counts: Callable[[Progress], Counts] | None = None,
    every: int = 1,
    rarely: Mapping[str, Any] | None = None,
    exchange: float = 0.0,
    **options: Any,
) -> Arm:
    """An arm; ``options`` are those of the trainer."""
    return Arm(name, options, devices, counts, every, rarely or {}, exchange)


GROUP_MS = 5.0
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)
BASELINE, CEILING = "fast device alone", "one device of the summed speed"
ARMS = {
    one.name: one
    for one in (
        arm(BASELINE, fastest),
        arm("equal fast devices, sync", equal_fast, policy="sync", rows="equal"),
        arm("all devices, sync, equal batches", policy="sync", rows="equal"),
        arm(CEILING, summed),
        arm("auto", policy="auto", exchange=0.5),
        arm("auto, overlap 0", policy="auto", overlap=0),
        arm("auto, int4", policy="auto", wire="int4", exchange=0.5),
        arm("auto, wire auto", policy="auto", wire="auto", exchange=0.5),
        arm("auto, overlap 0.5, int4", policy="auto", overlap=0.5, wire="int4"),
        arm("auto, overlap 0.5, int4, exchanges", policy="auto", overlap=0.5, wire="int4", exchange=0.5),
        arm("sync, rows by speed", policy="sync"),
        arm("cadence, default"),
        arm("cadence, uniform", merge="batch"),
        arm("cadence, rows by speed", rows="speed"),
        arm("cadence, overlap 0.5", overlap=0.5),
        arm("cadence, groups of two", groups=pairs),
        arm("cadence, groups of two, overlap 0.5", groups=pairs, overlap=0.5),
        arm("cadence, int4", wire="int4"),
        arm("cadence, overlap 0.5, int4", overlap=0.5, wire="int4"),
        arm("cadence, most throughput", che=throughput, opt_state="local"),
        *(
            arm(f"rounds of {ms} ms, averaged", counts=rounds_of(ms), opt_state="average")
            for ms in (80, 160, 200, 320, 640)
        ),
        *(arm(f"rounds of {ms} ms, uniform", counts=rounds_of(ms), merge="batch") for ms in (80, 160, 200)),
        arm("DiLoCo, 320 ms", counts=rounds_of(320), outer=NESTEROV),
        arm("QSR from 160 ms", counts=qsr(160, 0.25, 1280), opt_state="average"),
        arm("AdaComm from 640 ms", counts=adacomm(640, 2000), opt_state="average"),
        arm("80 ms, moments every 3rd (DES-LOC)", counts=rounds_of(80), every=3, rarely={"opt_state": "average"}),
    )
}
MAIN = [
    BASELINE,
    "equal fast devices, sync",
    "auto",
    "sync, rows by speed",
    "cadence, default",
    "cadence, most throughput",
    "rounds of 160 ms, averaged",
    CEILING,
]
# What a user has without this library.
PLAIN = [BASELINE, "equal fast devices, sync", "all devices, sync, equal batches"]
