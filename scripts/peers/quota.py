"""Throttles processes to shares of a core by control groups of Linux, version 1 or 2."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

# Short, so that a step waits for a few slices and not for one long one.
_PERIOD_US = 10_000


def shares(paces: Sequence[float]) -> list[float]:
    """Cores of each process, in proportion to its speed: at most one core each, all available cores together."""
    speeds = [min(paces) / pace for pace in paces]
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    largest = min(1.0, available / sum(speeds))
    return [largest * speed for speed in speeds]


@contextlib.contextmanager
def groups(cores: Sequence[float]) -> Iterator[list[Path]]:
    """One control group for each process; raises OSError where this machine does not allow it."""
    parent = _parent()
    made: list[Path] = []
    try:
        for rank, share in enumerate(cores):
            group = parent / f"jaxche_peers_{os.getpid()}_{rank}"
            group.mkdir()
            made.append(group)
            quota = max(1000, round(share * _PERIOD_US))
            if (group / "cpu.cfs_quota_us").exists():
                (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
                (group / "cpu.cfs_quota_us").write_text(str(quota))
            else:
                (group / "cpu.max").write_text(f"{quota} {_PERIOD_US}")
        yield made
    finally:
        for group in made:
            with contextlib.suppress(OSError):  # a process that is still ending
                group.rmdir()


def join(group: Path) -> None:
    """Put this process into its group."""
    (group / "cgroup.procs").write_text(str(os.getpid()))


def _parent() -> Path:
    """The group of this process, below which its own may be made."""
    base = Path("/sys/fs/cgroup")
    if not base.is_dir():
        raise OSError("this system has no /sys/fs/cgroup")
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(","):
            return base / controllers / path.strip("/") if (base / controllers).is_dir() else base / "cpu" / path[1:]
        if not controllers and (base / "cgroup.controllers").exists():
            return base / path.strip("/")
    raise OSError("no control group of this process has the cpu controller")
