"""The faults of chaos.py that come from outside of a process: signals, a slow core, a full disk, bad checkpoints."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

# Where version 1 of cgroups limits the time of processes.
CPU_CGROUP = Path("/sys/fs/cgroup/cpu")
THROTTLED_S, FULL_S, LOAD_S, BUSY_PER_CORE = 2.0, 1.0, 8.0, 8


class Lines:
    """The JSON lines of a file that grows, and that may not be there yet."""

    def __init__(self, path: Path):
        self._path, self._at, self._found = path, 0, []

    def read(self) -> list[dict[str, Any]]:
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._at)
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]  # the last one may be in the making
            self._at += len(whole)
            for line in whole.splitlines():
                with contextlib.suppress(ValueError):  # the disk was full
                    self._found.append(json.loads(line))
        return self._found


def read(lines: Path) -> list[dict[str, Any]]:
    """The JSON lines of a file, which may not be there yet."""
    return Lines(lines).read()


class Launch:
    """A run under ``jaxche launch``: its folder, and its processes."""

    def __init__(self, folder: Path, launcher: int):
        self.folder, self.launcher, self.events = folder, launcher, Lines(folder / "events.jsonl")

    @property
    def pids(self) -> dict[int, int]:
        """The processes of the ranks that were started last."""
        return {event["rank"]: event["pid"] for event in self.events.read() if event["event"] == "start"}

    @property
    def coordinator(self) -> int:
        """The process of the coordinator that was started last."""
        found = [
            (started, pid)
            for pid, parent, started, words in processes()
            if parent == self.launcher and b"jaxche.distributed._coordinator" in words
        ]
        return max(found)[1]


class Target(NamedTuple):
    """A run to hit, the rank, and what else chance decides."""

    run: Any
    rank: int
    rng: random.Random

    @property
    def pid(self) -> int:
        """The process of the rank."""
        return self.run.pids[self.rank]


def orphans(folder: Path, within_s: float) -> int:
    """Processes of a run that are still there some seconds after its end."""
    deadline = time.monotonic() + within_s
    while True:
        found = 0
        for pid, *_ in processes():
            with contextlib.suppress(OSError):
                found += os.fsencode(folder) in Path(f"/proc/{pid}/environ").read_bytes()
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def processes() -> Iterator[tuple[int, int, int, list[bytes]]]:
    """The number, the parent, the start and the words of every process that runs."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            words = (path / "cmdline").read_bytes().split(b"\0")
            yield int(path.name), int(fields[1]), int(fields[19]), words


def signalled(number: int) -> Callable[[Target], None]:
    return lambda target: os.kill(target.pid, number)


def pause(target: Target) -> None:
    """A rank is stopped for some seconds, which the others wait for or not."""
    pid = target.pid
    os.kill(pid, signal.SIGSTOP)
    time.sleep(target.rng.uniform(0.5, 8.0))
    os.kill(pid, signal.SIGCONT)


def kill_two(target: Target, between_s: float) -> None:
    """A rank and the next one are killed; of two ranks one stays."""
    pids = target.run.pids
    for rank in [target.rank, (target.rank + 1) % len(pids)][: len(pids) - 1]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[rank], signal.SIGKILL)
        time.sleep(between_s)


def throttle(target: Target) -> None:
    """A rank has a quarter of a core for two seconds: by a cgroup, or where none can be made by stops."""
    pid, group = target.pid, CPU_CGROUP / f"jaxche-chaos-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        throttle_by_stops(pid)
        return
    try:
        (group / "cpu.cfs_quota_us").write_text("25000")
        (group / "cgroup.procs").write_text(str(pid))
        time.sleep(THROTTLED_S)
    finally:
        for line in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (CPU_CGROUP / "cgroup.procs").write_text(line)
        group.rmdir()


def load(target: Target) -> None:
    """Other programs compute, eight processes per core, for some seconds."""
    words = [
        sys.executable,
        "-c",
        f"import time; end = time.monotonic() + {LOAD_S}\nwhile time.monotonic() < end: pass",
    ]
    busy = [subprocess.Popen(words) for _ in range(BUSY_PER_CORE * (os.cpu_count() or 1))]
    for child in busy:
        child.wait()


def throttle_by_stops(pid: int) -> None:
    until = time.monotonic() + THROTTLED_S
    while time.monotonic() < until:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.06)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.02)


def disk_full(target: Target) -> None:
    """No file of any rank may grow, for a second."""
    before = {pid: resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in target.run.pids.values()}
    for pid, (_, hard) in before.items():
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))

    def lift() -> None:
        for pid, limits in before.items():
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)

    threading.Timer(FULL_S, lift).start()


def newest_files(folder: Path) -> list[Path]:
    """The files of the newest checkpoint, which the ranks may be writing."""
    steps = [path for path in (folder / "checkpoints0").glob("*") if path.name.isdigit()]
    newest = max(steps, key=lambda path: int(path.name), default=None)
    return [] if newest is None else sorted(path for path in newest.rglob("*") if path.is_file())


def tear(target: Target) -> None:
    """Cut each file of the newest checkpoint to half its size."""
    for path in newest_files(target.run.folder):
        with contextlib.suppress(FileNotFoundError):
            os.truncate(path, path.stat().st_size // 2)


def corrupt(target: Target) -> None:
    """In the newest checkpoint a bit of the largest files, which hold the arrays, is wrong."""
    files = [path for path in newest_files(target.run.folder) if path.stat().st_size]
    for path in sorted(files, key=lambda path: path.stat().st_size)[-2:]:
        with contextlib.suppress(FileNotFoundError):
            data = bytearray(path.read_bytes())
            data[target.rng.randrange(len(data))] ^= 1 << target.rng.randrange(8)
            path.write_bytes(data)


def kill_coordinator(harm: Callable[[Target], None] = lambda target: None) -> Callable[[Target], None]:
    """The coordinator is killed, after something else was done."""

    def hit(target: Target) -> None:
        harm(target)
        os.kill(target.run.coordinator, signal.SIGKILL)

    return hit


def torn(target: Target) -> None:
    """A rank is killed, and the newest checkpoint is torn before it is read again."""
    os.kill(target.pid, signal.SIGKILL)
    time.sleep(0.2)
    tear(target)
