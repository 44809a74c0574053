"""Faults in elastic runs of two to six processes, in which the others continue.

A run takes many faults one after another, each when all ranks have merged rounds again since the one before; the
first hits in the first rounds, and the last while the run ends. After each fault no more than the round in flight may
be lost, and all ranks have to be back in time. The run has to come to its end with every batch of every epoch trained
on exactly once by its record, equal parameters on all ranks, no process and no temporary file left, and the losses of
its record when its rounds are run again undisturbed. The figure is the longest time without a merged round after each
fault, by the monotonic clock; "none" where the run ended before another round.

Some faults end all processes by their nature: SIGTERM, the death of the coordinator, and that of the launcher, after
which the same command is started again. Such runs continue from a checkpoint, one of which is made every ``EVERY``
rounds. Every ``NETWORK_EVERY``-th run has faults of networks, of which ``network.py`` has the kinds.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import random
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from chaos_parts import network
from chaos_parts.faults import (
    Target,
    corrupt,
    disk_full,
    kill_coordinator,
    kill_two,
    load,
    orphans,
    pause,
    read,
    signalled,
    tear,
    throttle,
)
from chaos_parts.launched import launch
from chaos_parts.record import batches, done_again, ended, replayed, same, trained
from chaos_parts.watch import StuckError, Watch

# ms a step of each rank, and rounds between two checkpoints. Steps of a large state have no pace.
PACES, EVERY, NETWORK_EVERY = (10, 10, 25, 10, 10, 25), 4, 5
PROCESSES, PROCESSES_OF_LARGE = (2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 5, 6), (2, 3)
# At most so many seconds are between the return of all ranks and the next fault.
PAUSE_S = 1.5
# Checkpoints that a run keeps, the default of jaxche.Checkpoints.
KEPT = 3
# Rounds between two checkpoints of a large state, which take longer than a fault.
EVERY_OF_LARGE = 1000


class Kind(NamedTuple):
    """A kind of fault: what hits a run, and what it may cost."""

    # Returns what went wrong, if it looks for that.
    hit: Callable[[Target], list[str] | None]
    # Finished rounds that may be done again, and whether all processes may be started again.
    lost: int = 1
    starts_again: bool = False
    # Whether no rank may be lost, because all are alive and answer.
    keeps_all: bool = False
    # The fault that worker.py makes inside the processes.
    job: Callable[[random.Random], dict[str, Any]] = lambda rng: {}
    # The moment, "first", "later" or "last", at which it is not tried.
    never: str = ""
    # What brings a rank back when the others have gone on without it.
    mend: Callable[[Target], list[str] | None] | None = None


def slow_start(rng: random.Random) -> dict[str, Any]:
    return {"drips": True} if rng.random() < 0.5 else {"late_s": rng.uniform(2.0, 8.0)}


def flip(rng: random.Random) -> dict[str, Any]:
    part = rng.choice(("head", "text", "state"))
    return {"flip": {"part": part, "at": rng.random(), "bit": rng.randrange(8)}}


def shift(rng: random.Random) -> dict[str, Any]:
    return {"shift_s": rng.choice((-1, 1)) * 10 ** rng.uniform(1, 6)}


LAUNCHED = {
    "kill": Kind(signalled(signal.SIGKILL)),
    "stop": Kind(signalled(signal.SIGSTOP), mend=signalled(signal.SIGKILL)),
    "pause": Kind(pause),
    "two": Kind(lambda target: kill_two(target, 0.0)),
    "again": Kind(lambda target: kill_two(target, 1.5)),
    "term": Kind(signalled(signal.SIGTERM), starts_again=True),
    "launcher": Kind(lambda target: target.run.kill_launcher(), starts_again=True),
    # A full disk may have cost two checkpoints before.
    "coordinator": Kind(kill_coordinator(), 4 * EVERY, True),
    "torn": Kind(kill_coordinator(tear), 5 * EVERY, True, never="first"),
    "corrupt": Kind(kill_coordinator(corrupt), 5 * EVERY, True, never="first"),
    "throttle": Kind(throttle, keeps_all=True),
    "load": Kind(load, keeps_all=True, never="last"),
    "disk full": Kind(disk_full),
    "flip": Kind(signalled(signal.SIGKILL), job=flip, never="last"),
    "clock": Kind(signalled(signal.SIGUSR1), job=shift, keeps_all=True),
    "slow join": Kind(signalled(signal.SIGKILL), job=slow_start, never="last"),
}
NETWORK = {
    "cut": Kind(network.cut, never="last", mend=network.mend_cut),
    "short cut": Kind(network.short_cut),
    "loss": Kind(network.lossy),
    "delay": Kind(network.late),
}
KINDS = LAUNCHED | NETWORK


class Options(NamedTuple):
    """The options of a campaign; ``kinds``, ``results`` and ``keep`` may be None. ``gpu``: all use the first GPU."""

    seed: int
    faults_a_run: int
    heartbeat_timeout_s: float
    state_mb: float
    kinds: Sequence[str] | None
    results: Path | None
    keep: Path | None
    gpu: bool = False


class Fault(NamedTuple):
    """A fault as it follows from a number and the options."""

    number: int
    kind: str
    moment: str
    rank: int
    rng: random.Random


class Run(NamedTuple):
    """A run and its faults, which follow from its number and the options."""

    number: int
    paces: tuple[int, ...]
    faults: list[Fault]

    @classmethod
    def of(cls, number: int, options: Options, numbers: range) -> Run:
        """The faults are those with the given numbers."""
        rng = random.Random(f"{options.seed} run {number}")
        paces = PACES[: rng.choice(PROCESSES)]
        if options.state_mb:
            paces = (0,) * rng.choice(PROCESSES_OF_LARGE)
        pools = [[kind for kind in kinds if kind in (options.kinds or KINDS)] for kinds in (LAUNCHED, NETWORK)]
        pool = pools[number % NETWORK_EVERY == NETWORK_EVERY - 1] or pools[0] or pools[1]
        faults, first = [], number * options.faults_a_run
        for at in range(first, first + options.faults_a_run):
            rng = random.Random(f"{options.seed} {at}")
            kind, rank = rng.choice(pool), rng.randrange(len(paces))
            moment = {first + options.faults_a_run - 1: "last", first: "first"}.get(at, "later")
            moment = "later" if moment == KINDS[kind].never else moment
            faults.append(Fault(at, kind, moment, rank, rng))
        return cls(number, paces, [fault for fault in faults if fault.number in numbers])


def campaign(numbers: range, options: Options) -> int:
    """Hit elastic runs; those that the results have already are not repeated."""
    if unknown := set(options.kinds or ()) - set(KINDS):
        print(f"chaos: --kinds has {', '.join(sorted(unknown))}, which is none of {', '.join(KINDS)}")
        return 2
    rows = [row for row in read(options.results) if row["seed"] == options.seed] if options.results else []
    done = {row["number"] for row in rows}
    print(
        "run number fault       moment processes rank round replaced lost seconds without a round verdict", flush=True
    )
    with tempfile.TemporaryDirectory(prefix="jaxche-chaos-") as folder:
        for number in range(numbers.start // options.faults_a_run, -(-numbers.stop // options.faults_a_run)):
            run = Run.of(number, options, numbers)
            if done.issuperset(fault.number for fault in run.faults):
                continue
            found = hit_run(run, Path(folder) / f"run-{number}", options)
            rows += found
            if options.results:
                with options.results.open("a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in found)
            for row in found:
                gap = "none" if row["gap_s"] is None else f"{row['gap_s']:.2f}"
                print(
                    f"{number:3d} {row['number']:6d} {row['kind']:11s} {row['moment']:6s} {row['processes']:9d} "
                    f"{row['rank']:4d} {row['round']:5d} {row['replaced']:8d} {row['lost']:4d} {gap:>23s} "
                    f"{row['skipped'] or '; '.join(row['wrong']) or 'ok'}",
                    flush=True,
                )
    return report(rows)


def report(rows: list[dict[str, Any]]) -> int:
    """A line a kind, the failures, and the exit code."""
    print("\nfault       faults failed  none  p50 s  p95 s  max s  without a merged round")
    ran = [row for row in rows if not row["skipped"]]
    for kind in [*KINDS, "all"]:
        those = [row for row in ran if kind in (row["kind"], "all")]
        if those:
            gaps = sorted(row["gap_s"] for row in those if row["gap_s"] is not None)
            failed = sum(bool(row["wrong"]) for row in those)
            figures = [statistics.median(gaps), gaps[math.ceil(0.95 * len(gaps)) - 1], gaps[-1]] if gaps else []
            cells = " ".join(f"{figure:6.2f}" for figure in figures)
            print(f"{kind:12s} {len(those):5d} {failed:6d} {len(those) - len(gaps):5d} {cells}")
    for row in ran:
        if row["wrong"]:
            print(f"seed {row['seed']} number {row['number']} ({row['kind']}): {'; '.join(row['wrong'])}")
    if skipped := len(rows) - len(ran):
        print(f"{skipped} skipped")
    good = sum(not row["wrong"] for row in ran)
    runs = {row["run"] for row in ran}
    again = {row["run"] for row in ran if row["replayed"]}
    print(f"{good} of {len(ran)} faults came through, in {len(runs)} runs, of which {len(again)} were run again")
    return 0 if good == len(ran) else 1


def hit_run(run: Run, folder: Path, options: Options) -> list[dict[str, Any]]:
    """A row for each fault of a run: when it hit, what it cost, and what is wrong; what ended wrong is in the last."""
    base = {"seed": options.seed, "run": run.number, "processes": len(run.paces), "state_mb": options.state_mb}
    base |= {"heartbeat_timeout_s": options.heartbeat_timeout_s, "round": -1, "replaced": 0, "lost": 0, "gap_s": None}
    base |= {"seconds": 0.0, "replayed": False, "skipped": "the run ended before"}
    rows = [
        base | {"number": fault.number, "kind": fault.kind, "moment": fault.moment, "rank": fault.rank, "wrong": []}
        for fault in run.faults
    ]
    (folder / "tmp").mkdir(parents=True)
    job = {"times": 1, "epochs": 1_000_000, "elastic": True, "state_mb": options.state_mb}
    job["every"] = EVERY_OF_LARGE if options.state_mb else EVERY
    (folder / "job.json").write_text(json.dumps(job))
    is_network, hits, wrong = run.faults[0].kind in NETWORK, [], []
    start = network.machines if is_network else launch
    try:
        with start(folder, run.paces, environment(folder, options)) as fleet:
            watch = Watch(fleet, len(run.paces))
            try:
                for fault, row in zip(run.faults, rows, strict=True):
                    strike(fault, row, fleet, watch, hits)
                (folder / "stop").touch()
                watch.wait_for("its end", lambda: fleet.code == 0)
            except StuckError as error:
                wrong.append(str(error))
    except network.Unavailable as error:
        return [row | {"skipped": f"skipped: {error}"} for row in rows]
    hit = [row for row in rows if not row["skipped"]] or rows[:1]
    hit[0]["skipped"] = ""
    judge_faults(hit, hits, read(folder / "rounds"))
    # The coordinator that process 0 starts outlives the run by some seconds.
    wrong = wrong or judge_end(folder, 15.0 if is_network else 5.0)
    if not wrong and not any(row["wrong"] for row in hit):
        loss, other = replayed(folder / "checkpoints0" / "history.jsonl", options.state_mb)
        for row in hit:
            row["replayed"] = True
        if other or not same(ended(folder)[0]["losses"][0], loss):
            wrong.append(f"{other} rounds, or the end, have other losses when run again")
    hit[-1]["wrong"] += wrong
    if any(row["wrong"] for row in hit) and options.keep:
        shutil.copytree(folder, options.keep / folder.name, dirs_exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    return rows


def strike(fault: Fault, row: dict[str, Any], fleet: Any, watch: Watch, hits: list[float]) -> None:
    """One fault, and the time until all ranks are back; ``hits`` gets when it was."""
    kind, target = KINDS[fault.kind], Target(fleet, fault.rank, fault.rng)
    if fault.moment == "first":
        wanted = fault.rng.randrange(2)
        watch.wait_for("the first rounds", lambda: watch.round() >= wanted and len(fleet.pids) == row["processes"])
    elif not hits:
        watch.wait_for("rounds of all ranks", lambda: watch.is_whole(0.0, set()))
    if fault.moment == "last":
        (fleet.folder / "stop").touch()
    time.sleep(fault.rng.random() * PAUSE_S)
    job, pids, restarts = fleet.folder / "fault.json", set(fleet.pids.values()), fleet.restarts
    if inside := kind.job(fault.rng):
        job.write_text(json.dumps(inside))
    hits.append(time.monotonic())
    row |= {"round": watch.round(), "skipped": ""}
    # The process may have ended.
    with contextlib.suppress(ProcessLookupError, ValueError):
        row["wrong"] += kind.hit(target) or []
    if fault.moment != "last":
        if kind.mend:
            watch.wait_for("rounds of the others", lambda: watch.is_smaller(hits[-1]) or fleet.restarts > restarts)
            row["wrong"] += kind.mend(target) or []
        since = time.monotonic()
        watch.wait_for("rounds of all ranks", lambda: watch.is_whole(since, pids if kind.starts_again else set()))
        if "flip" in inside and job.exists():
            row["wrong"].append("no state was sent")
        job.unlink(missing_ok=True)
    else:
        watch.wait_for("its end", lambda: fleet.code == 0)
    row["seconds"] = round(time.monotonic() - hits[-1], 2)
    row["replaced"] = len(set(fleet.pids.values()) - pids)
    if fleet.restarts > restarts and not kind.starts_again:
        row["wrong"].append("all were started again")


def judge_faults(rows: list[dict[str, Any]], hits: list[float], rounds: list[dict[str, Any]]) -> None:
    """What each fault cost, from its time to that of the next one."""
    rounds = sorted(rounds, key=lambda line: line["t"])
    redone, damaged = done_again(rounds), 0
    for row, hit_at, next_at in zip(rows, hits, [*hits[1:], math.inf], strict=False):
        kind = KINDS[row["kind"]]
        after = [(line, lost) for line, lost in zip(rounds, redone, strict=True) if hit_at < line["t"] < next_at]
        times = [hit_at, *(line["t"] for line, _ in after)]
        row["gap_s"] = max((round(late - early, 3) for early, late in itertools.pairwise(times)), default=None)
        row["lost"] = max((lost for _, lost in after), default=0)
        # Such faults in a row damage all checkpoints that are kept, and their costs add up.
        damaged = damaged + 1 if row["kind"] in ("torn", "corrupt") else 0
        if row["lost"] > kind.lost * (KEPT if damaged >= KEPT else 1):
            row["wrong"].append(f"{row['lost']} rounds done again")
        if kind.keeps_all and any(line["world"] < row["processes"] for line, _ in after):
            row["wrong"].append("a rank that lives was lost")


def judge_end(folder: Path, within_s: float) -> list[str]:
    """What is wrong with how a run ended."""
    wrong, ends = [], ended(folder)
    if len(ends) != 1:
        wrong.append("the ranks ended with different parameters, or with none")
    elif batches(folder / "checkpoints0" / "history.jsonl") != trained(ends[0]):
        wrong.append("batches left out or used twice")
    if left := orphans(folder, within_s):
        wrong.append(f"{left} processes left")
    if files := sorted(str(path.relative_to(folder)) for path in (folder / "tmp").rglob("*")):
        wrong.append(f"left: {', '.join(files[:5])}")
    return wrong


def environment(folder: Path, options: Options) -> dict[str, str]:
    """The environment of the processes: all runs share compiled programs, and each has its own temporary files."""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    if os.environ.get("PYTHONDONTWRITEBYTECODE"):  # else each process would compile all packages
        cache |= {"PYTHONPYCACHEPREFIX": str(folder.parent / "cache" / "python"), "PYTHONDONTWRITEBYTECODE": ""}
    own = {"TMPDIR": str(folder / "tmp"), "JAXCHE_EVENTS": str(folder / "events.jsonl")}
    own["JAXCHE_HEARTBEAT_TIMEOUT"] = f"{options.heartbeat_timeout_s:g}"
    if not options.gpu:
        return os.environ | cache | own | {"JAX_PLATFORMS": "cpu"}
    # The replay is on CPU devices, whose products are in float32.
    card = {"CUDA_VISIBLE_DEVICES": ",".join("0" * len(PACES)), "JAX_DEFAULT_MATMUL_PRECISION": "highest"}
    return {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"} | cache | own | card
