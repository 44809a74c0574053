"""Faults in elastic runs of two to six processes, in which the others continue.

A run has to come to its end, with every batch of every epoch trained on exactly once by its record, equal parameters
on all ranks, no process and no temporary file left, no more than the round in flight lost, and for every so manieth
run the losses of its record when its rounds are run again undisturbed. The figure is the longest time without a merged
round after the fault, by the clock that does not jump; "none" where the run ended before another round.

Some faults end all processes by their nature: SIGTERM, the death of the coordinator, and that of the launcher, after
which the same command is started a second time. Such runs go on from a checkpoint, one of which is made every
``EVERY`` rounds. ``network.py`` has the faults of networks.
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
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from chaos_parts import network, worker
from chaos_parts.faults import (
    Target,
    corrupt,
    disk_full,
    kill_two,
    load,
    nothing,
    pause,
    processes,
    read,
    signalled,
    tear,
    then_kill,
    throttle,
)
from chaos_parts.record import ROUNDING, ROUNDING_OF_FIRST, batches, replayed
from chaos_parts.worker import BATCHES

# ms a step of each rank, and rounds between two checkpoints. A run takes so long undisturbed, and may take at most so
# long.
PACES, EVERY, RUN_S, LIMIT_S = (10, 10, 25, 10, 10, 25), 10, 14.0, 240.0


class Kind(NamedTuple):
    """A kind of fault: what hits a run, and what it may cost."""

    hit: Callable[[Target], None]
    # Finished rounds that may be done again, and whether all processes may be started again.
    lost: int = 1
    starts_again: bool = False
    # What happens in the processes themselves, as worker.py reads it.
    job: Callable[[random.Random], dict[str, Any]] = lambda rng: {}
    # When it may hit: while processes start and compile is no part of it, nor is a time without what it needs.
    moments: tuple[str, ...] = ("later", "later", "first", "last")
    needs_checkpoint: bool = False
    # Whether no rank may be lost: all live and answer.
    keeps_all: bool = False
    # Of runs in namespaces of their own.
    is_network: bool = False


def slow_start(rng: random.Random) -> dict[str, Any]:
    return {"drips": True} if rng.random() < 0.5 else {"late_s": rng.uniform(2.0, 8.0)}


def flip(rng: random.Random) -> dict[str, Any]:
    part = rng.choice(("head", "text", "state"))
    return {"flip": {"part": part, "at": rng.random(), "bit": rng.randrange(8)}}


KINDS = {
    "kill": Kind(signalled(signal.SIGKILL)),
    "stop": Kind(signalled(signal.SIGSTOP)),
    "pause": Kind(pause),
    "two": Kind(lambda target: kill_two(target, 0.0)),
    "again": Kind(lambda target: kill_two(target, 1.5)),
    "term": Kind(signalled(signal.SIGTERM), starts_again=True),
    "launcher": Kind(lambda target: os.kill(target.launcher, signal.SIGKILL), starts_again=True),
    "coordinator": Kind(then_kill(nothing, lambda t: t.coordinator), 2 * EVERY, True),
    "torn": Kind(then_kill(tear, lambda t: t.coordinator), 3 * EVERY, True, needs_checkpoint=True),
    "corrupt": Kind(then_kill(corrupt, lambda t: t.coordinator), 3 * EVERY, True, needs_checkpoint=True),
    "throttle": Kind(throttle, keeps_all=True),
    "load": Kind(load, moments=("first", "later"), keeps_all=True),
    "disk full": Kind(disk_full),
    "flip": Kind(signalled(signal.SIGKILL), job=flip, moments=("first", "later")),
    "clock": Kind(
        signalled(signal.SIGUSR1),
        job=lambda rng: {"shift_s": rng.choice((-1, 1)) * 10 ** rng.uniform(1, 6)},
        keeps_all=True,
    ),
    "slow join": Kind(signalled(signal.SIGKILL), job=slow_start, moments=("first", "later")),
    **{name: Kind(nothing, is_network=True) for name in network.KINDS},
}


class Options(NamedTuple):
    """Of a campaign; ``results`` and ``keep`` may be None."""

    seed: int
    heartbeat_timeout_s: float
    replay_every: int
    results: Path | None
    keep: Path | None


class Fault(NamedTuple):
    """A fault as it follows from a number and the seed."""

    number: int
    kind: str
    moment: str
    rank: int
    paces: tuple[int, ...]
    rng: random.Random

    @classmethod
    def of(cls, number: int, seed: int) -> Fault:
        rng = random.Random(f"{seed} {number}")
        kind = list(KINDS)[number % len(KINDS)]
        paces = PACES[: rng.choice((2, 3, 3, 4, 5, 6))]
        return cls(number, kind, rng.choice(KINDS[kind].moments), number // len(KINDS) % len(paces), paces, rng)

    @property
    def epochs(self) -> int:
        return round(RUN_S * sum(1e3 / pace for pace in self.paces) / BATCHES)


def campaign(numbers: range, options: Options, kinds: Sequence[str] | None) -> int:
    """Hit elastic runs; faults that the results have already are not repeated."""
    if unknown := set(kinds or ()) - set(KINDS):
        print(f"chaos: --kinds has {', '.join(sorted(unknown))}, which is none of {', '.join(KINDS)}")
        return 2
    every = (Fault.of(number, options.seed) for number in itertools.count(numbers.start))
    faults = itertools.islice((fault for fault in every if not kinds or fault.kind in kinds), len(numbers))
    rows = [row for row in read(options.results) if row["seed"] == options.seed] if options.results else []
    done = {row["number"] for row in rows}
    print("number fault       moment processes rank round replaced lost seconds without a round  verdict", flush=True)
    with tempfile.TemporaryDirectory(prefix="jaxche-chaos-") as folder:
        for fault in faults:
            if fault.number in done:
                continue
            row = one(fault, Path(folder), options)
            rows.append(row)
            if options.results:
                with options.results.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            gap = "none" if row["gap_s"] is None else f"{row['gap_s']:.2f}"
            verdict = row["skipped"] or "; ".join(row["wrong"]) or "ok"
            print(
                f"{fault.number:6d} {fault.kind:11s} {fault.moment:6s} {len(fault.paces):9d} {fault.rank:4d} "
                f"{row['round']:5d} {row['replaced']:8d} {row['lost']:4d} {gap:>23s}  {verdict}",
                flush=True,
            )
    return report(rows)


def report(rows: list[dict[str, Any]]) -> int:
    """A line a kind, the failures, and the exit code."""
    print("\nfault        runs failed  none  p50 s  p95 s  max s  without a merged round")
    ran = [row for row in rows if not row["skipped"]]
    for kind in [*KINDS, "all"]:
        those = [row for row in ran if kind in (row["kind"], "all")]
        if those:
            gaps = sorted(row["gap_s"] for row in those if row["gap_s"] is not None)
            failed = sum(bool(row["wrong"]) for row in those)
            figures = [statistics.median(gaps), gaps[math.ceil(0.95 * len(gaps)) - 1], gaps[-1]] if gaps else []
            cells = " ".join(f"{figure:6.2f}" for figure in figures)
            print(f"{kind:12s} {len(those):4d} {failed:6d} {len(those) - len(gaps):5d} {cells}")
    for row in ran:
        if row["wrong"]:
            print(f"seed {row['seed']} number {row['number']} ({row['kind']}): {'; '.join(row['wrong'])}")
    if skipped := len(rows) - len(ran):
        print(f"{skipped} skipped")
    good = sum(not row["wrong"] for row in ran)
    print(f"{good} of {len(ran)} runs came through; {sum(row['replayed'] for row in ran)} were run again")
    return 0 if good == len(ran) else 1


def one(fault: Fault, parent: Path, options: Options) -> dict[str, Any]:
    """One run, its fault, and what is wrong with how it ended."""
    kind, folder = KINDS[fault.kind], parent / str(fault.number)
    row: dict[str, Any] = {"seed": options.seed, "number": fault.number, "kind": fault.kind, "moment": fault.moment}
    row |= {"rank": fault.rank, "processes": len(fault.paces), "heartbeat_timeout_s": options.heartbeat_timeout_s}
    row |= {"skipped": "", "round": -1, "replaced": 0, "lost": 0, "gap_s": None, "replayed": False, "wrong": []}
    (folder / "tmp").mkdir(parents=True)
    job = {"times": 1, "epochs": fault.epochs, "elastic": True, "every": EVERY} | kind.job(fault.rng)
    (folder / "job.json").write_text(json.dumps(job))
    began = time.monotonic()
    try:
        if kind.is_network:
            done = network.run(folder, fault, environment(folder, options), wait_for)
            row |= {"round": done.round}
            code, hit_at, wrong = done.code, done.hit_at, done.wrong
        else:
            row["round"], hit_at, code, wrong = launched(fault, folder, kind, options)
    except network.Unavailable as error:
        return row | {"skipped": f"skipped: {error}"}
    row["seconds"] = round(time.monotonic() - began, 2)
    rounds, events = read(folder / "rounds"), read(folder / "events.jsonl")
    row["gap_s"], row["lost"] = longest_gap(hit_at, [line["t"] for line in rounds]), lost(rounds)
    row["replaced"] = sum(event["event"] == "replace" for event in events)
    row["wrong"] = wrong + judge(fault, folder, kind, code, row, events)
    record = folder / "checkpoints0" / "history.jsonl"
    if not row["wrong"] and fault.number % options.replay_every == 0:
        loss, other = replayed(record)
        row["replayed"] = True
        recorded = read(folder / "losses.json")
        if other or (recorded and not math.isclose(recorded[0][0], loss, rel_tol=ROUNDING, abs_tol=ROUNDING_OF_FIRST)):
            row["wrong"] = [f"{other} rounds, or the end, have other losses when run again"]
    if row["wrong"] and options.keep:
        shutil.copytree(folder, options.keep / str(fault.number), dirs_exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    return row


def judge(
    fault: Fault, folder: Path, kind: Kind, code: int, row: dict[str, Any], events: list[dict[str, Any]]
) -> list[str]:
    """What is wrong with how a run ended."""
    if code != 0:
        return [f"exit code {code}: {(folder / 'output').read_text()[-800:]}"]
    wrong = []
    if batches(folder / "checkpoints0" / "history.jsonl") != sorted(
        (e, i) for e in range(fault.epochs) for i in range(BATCHES)
    ):
        wrong.append("batches left out or used twice")
    if not kind.starts_again and any(event["event"] == "restart" for event in events):
        wrong.append("all were started again")
    if kind.keeps_all and any(line["world"] < len(fault.paces) for line in read(folder / "rounds")):
        wrong.append("a rank that lives was lost")
    if row["lost"] > kind.lost:
        wrong.append(f"{row['lost']} rounds done again")
    if len({path.read_text() for path in folder.glob("parameters-*")}) != 1:
        wrong.append("the ranks ended with different parameters, or with none")
    # The coordinator that process 0 starts outlives the run by some seconds.
    if left := orphans(folder, within_s=15.0 if kind.is_network else 5.0):
        wrong.append(f"{left} processes left")
    if files := sorted(str(path.relative_to(folder)) for path in (folder / "tmp").rglob("*")):
        wrong.append(f"left: {', '.join(files[:5])}")
    return wrong


def environment(folder: Path, options: Options) -> dict[str, str]:
    """Of the processes: one folder of compiled programs for all runs, one of temporary files for each."""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    own = {"JAX_PLATFORMS": "cpu", "TMPDIR": str(folder / "tmp"), "JAXCHE_EVENTS": str(folder / "events.jsonl")}
    return os.environ | cache | own | {"JAXCHE_HEARTBEAT_TIMEOUT": f"{options.heartbeat_timeout_s:g}"}


def launched(fault: Fault, folder: Path, kind: Kind, options: Options) -> tuple[int, float, int, list[str]]:
    """A run under ``jaxche launch``: the round before the fault, its time, the exit code, and what was wrong."""
    paces, wrong = ",".join(map(str, fault.paces)), []
    command = [sys.executable, "-m", "jaxche", "launch", "-n", str(len(fault.paces)), "--pace", paces, "--elastic"]
    command += ["--max-restarts", "4", "--hang-timeout", "40", "--grace", "2", "--events", str(folder / "events.jsonl")]
    command += [worker.__file__, str(folder)]
    with running(command, folder, options) as child:
        target = Target(folder, child.pid, fault.rank, fault.rng)
        at = wait_for(fault, folder, child, lambda: len(target.pids) == len(fault.paces))
        hit_at = time.monotonic()
        # Of those that have ended already there is nothing to hit.
        with contextlib.suppress(ProcessLookupError, ValueError):
            kind.hit(target)
        code = child.wait(timeout=LIMIT_S)
    if fault.kind == "launcher" and code != 0:
        if left := orphans(folder, within_s=45.0):
            wrong.append(f"{left} processes left by the launcher that was killed")
        if files := list((folder / "tmp").iterdir()):
            wrong.append(f"left by the launcher that was killed: {files[0].name}")
        with running(command, folder, options) as child:
            code = child.wait(timeout=LIMIT_S)
    return at, hit_at, code, wrong


@contextlib.contextmanager
def running(command: Sequence[str], folder: Path, options: Options) -> Iterator[subprocess.Popen[bytes]]:
    """A launch, which is ended if it takes too long."""
    with (folder / "output").open("a") as output:
        child = subprocess.Popen(command, env=environment(folder, options), stdout=output, stderr=output)
        try:
            yield child
        except subprocess.TimeoutExpired:
            output.write(f"\nit was ended after {LIMIT_S:g} s\n")
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait(timeout=60)


def wait_for(
    fault: Fault, folder: Path, child: subprocess.Popen[bytes], has_started: Callable[[], bool] = lambda: True
) -> int:
    """Wait until a run has come to the moment of its fault, and a little longer; returns its last round."""
    wanted = {"first": fault.rng.randrange(2), "later": fault.rng.randrange(2, 30), "last": 1}[fault.moment]
    while child.poll() is None:
        rounds = read(folder / "rounds")
        seen = max((line["round"] for line in rounds), default=-1)
        there = seen >= wanted and has_started()
        if KINDS[fault.kind].needs_checkpoint:
            there &= any(path.name.isdigit() for path in (folder / "checkpoints0").glob("*"))
        if fault.moment == "last":
            # No more is left than what the last one took.
            sizes = {line["round"]: line["batches"] for line in rounds}
            there &= bool(sizes) and fault.epochs * BATCHES - sum(sizes.values()) <= sizes[seen]
        if there:
            time.sleep(fault.rng.random() * 0.3)
            return seen
        time.sleep(0.02)
    raise RuntimeError(f"the run ended before its fault: {(folder / 'output').read_text()[-2000:]}")


def longest_gap(hit_at: float, times: Sequence[float]) -> float | None:
    """The longest time from a fault, or a round after it, to the next round; None if there was none."""
    after = [hit_at, *sorted(time for time in times if time > hit_at)]
    return max((round(late - early, 3) for early, late in itertools.pairwise(after)), default=None)


def lost(rounds: list[dict[str, Any]]) -> int:
    """The most finished rounds that were done again, by one process or by one that came later."""
    most, newest, last = 0, -1, {}
    for line in sorted(rounds, key=lambda line: line["t"]):
        before = last.get(line["pid"], newest if line["pid"] not in last else -1)
        most = max(most, before + 1 - line["round"])
        last[line["pid"]], newest = line["round"], max(newest, line["round"])
    return most


def orphans(folder: Path, within_s: float = 5.0) -> int:
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
