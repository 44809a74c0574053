"""The share of time in which a device computes, from a profile of JAX."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax


def busy_share(spans: Iterable[tuple[float, float]]) -> float | None:
    """The share of the time between the first start and the last end that these spans (start, end) cover."""
    ordered = sorted(spans)
    if not ordered:
        return None
    covered, end = 0.0, ordered[0][0]
    for start, stop in ordered:
        covered += max(0.0, stop - max(start, end))
        end = max(end, stop)
    whole = end - ordered[0][0]
    return covered / whole if whole > 0 else None


def device_spans(profile: Any) -> list[tuple[float, float]]:
    """The spans of the kernels on the first GPU; none if the profile has no GPU.

    Streams of copies alone do not count: a device that only copies does not compute.
    """
    planes = sorted((plane for plane in profile.planes if plane.name.startswith("/device:GPU")), key=lambda p: p.name)
    if not planes:
        return []
    lines = list(planes[0].lines)
    streams = [line for line in lines if line.name.startswith("Stream")]
    # The profiler may trace a CUDA graph, into which XLA puts kernels, as one event.
    kernels = [line for line in streams if "Compute" in line.name or "CudaGraph" in line.name]
    return [_span(event) for line in kernels or streams or lines[:1] for event in line.events]


def busy_shares(run: Callable[[], Any], turns: int = 3) -> list[float]:
    """The share of each of some runs; empty where a profile shows no device."""
    return [share for _ in range(turns) if (share := _profiled(run)) is not None]


def _profiled(run: Callable[[], Any]) -> float | None:
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # a trace of Python calls delays the dispatch of steps, and makes gaps
    options.host_tracer_level = 1
    with tempfile.TemporaryDirectory() as folder:
        try:
            with jax.profiler.trace(folder, profiler_options=options):
                run()
        except (RuntimeError, OSError):  # the profiler of the card is not available to this user
            return None
        files: Sequence[Path] = sorted(Path(folder).rglob("*.xplane.pb"))
        if not files:
            return None
        return busy_share(device_spans(jax.profiler.ProfileData.from_file(str(files[0]))))


def _span(event: Any) -> tuple[float, float]:
    return event.start_ns, event.start_ns + event.duration_ns
