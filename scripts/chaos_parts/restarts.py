"""Faults in runs that are started again from their checkpoints, of three processes of unequal speeds.

Each run is supervised (``jaxche launch --max-restarts``), saved after every round before the next begins, and hit by
one fault. It has to come to its end, with every batch of every epoch trained on exactly once by its record, and no more
than one finished round done again. Its rounds are then repeated without a fault, on devices of this process, and must
give the losses of the record. Counts follow the clock, so no two runs end alike: the losses of all faulted runs
together are compared with those of undisturbed runs. A full disk costs more: rounds of that time are not saved. Other
ranks wait for a throttled rank for at most one more planned round and its present step.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chaos_parts import worker
from chaos_parts.faults import Launch, Target, disk_full, read, signalled, throttle_by_stops, torn
from chaos_parts.record import batches, replayed, same
from chaos_parts.worker import BATCHES

PACES, EPOCHS = (10, 10, 25), 3
FAULTS = {
    "kill": signalled(signal.SIGKILL),
    "stop": signalled(signal.SIGSTOP),
    "term": signalled(signal.SIGTERM),
    "throttle": lambda target: throttle_by_stops(target.pid),
    "disk full": disk_full,
    "torn checkpoint": torn,
}
# While processes start and compile, in the first rounds, in later ones, in the last or after it.
MOMENTS = ("later", "start", "first", "last")
# A late rank stops after its present step, which takes four times as long on a throttled one. A round may take twice
# its planned time, and a short one LEAST_PATIENCE_MS more than planned.
STEP_MS, LEAST_PATIENCE_MS = 4.0 * max(PACES), 200.0
# Finished rounds that are done again at most, by kind of fault.
LOST = {"disk full": None}


def campaign(faults: int, undisturbed: int, seed: int, kinds: Sequence[str] = tuple(FAULTS)) -> int:
    """Hit as many runs, each kind at each moment in turn; undisturbed ones come first."""
    if unknown := set(kinds) - set(FAULTS):
        print(f"chaos: --kinds has {', '.join(sorted(unknown))}, which is none of {', '.join(FAULTS)}")
        return 2
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="jaxche-chaos-") as folder:
        # One after the other in the same processes, so that they differ in measured times only, not in their start.
        calm = run(Path(folder) / "calm", None, "", 0.0, rng, times=undisturbed)
        if calm["code"]:
            print(f"undisturbed: exit code {calm['code']}: {calm['tail']}")
            return 1
        losses = calm["losses"]
        # Counts follow measured times, so all runs end differently; a few of them do not show the whole range.
        low, high = min(losses), max(losses)
        longest = max(STEP_MS, calm["over_ms"])
        print(f"{len(losses)} undisturbed: loss {low:.5f} to {high:.5f}, {calm['seconds']:.1f} s together")
        print("fault            moment rank round restarts redone seconds     loss replayed  verdict")
        failed, rows = 0, []
        for number in range(faults):
            # Each kind at each moment in turn.
            kind, moment = kinds[number % len(kinds)], MOMENTS[(number + number // len(kinds)) % len(MOMENTS)]
            row = run(Path(folder) / str(number), kind, moment, calm["start_s"], rng)
            wrong = judge(kind, row, longest)
            failed += bool(wrong)
            rows.append(row)
            print(
                f"{kind:16s} {moment:6s} {row['rank']:4d} {row['round']:5d} {row['restarts']:8d} {row['redone']:6d} "
                f"{row['seconds']:7.1f} {row['loss']:8.5f} {row['replayed']:8.5f}  {'; '.join(wrong) or 'ok'}",
                flush=True,
            )
    summary(rows)
    print(f"{faults - failed} of {faults} runs came through")
    found = statistics.median(row["loss"] for row in rows)
    within = sum(low <= row["loss"] <= high for row in rows)
    print(f"median loss {found:.5f}; {within} within {low:.5f} to {high:.5f}")
    if not 2 * low - high <= found <= 2 * high - low:
        print("that is outside the spread of undisturbed runs")
        failed += 1
    return 1 if failed else 0


def summary(rows: list[dict[str, Any]]) -> None:
    """A line a kind."""
    print("\nfault            runs restarts redone   longest wait of another rank")
    for kind in FAULTS:
        those = [row for row in rows if row["kind"] == kind]
        if those:
            restarts, redone = (max(row[name] for row in those) for name in ("restarts", "redone"))
            wait = max(row["wait_ms"] for row in those)
            print(f"{kind:16s} {len(those):4d} {restarts:8d} {redone:6d} {wait:27.0f} ms")


def judge(kind: str, row: dict[str, Any], longest: float) -> list[str]:
    """What is wrong with how a run ended.

    Args:
      kind: of its fault.
      row: what came out.
      longest: ms that others may wait for a throttled rank beyond the length of a planned round.
    """
    wrong = []
    if row["code"] != 0:
        return [f"exit code {row['code']}: {row['tail']}"]
    if row["batches"] != sorted((e, i) for e in range(EPOCHS) for i in range(BATCHES)):
        wrong.append("batches left out or used twice")
    elif not same(row["loss"], row["replayed"]):
        wrong.append(f"its rounds undisturbed give {row['replayed']:.5f}")
    allowed = LOST.get(kind, 1)
    if allowed is not None and row["redone"] > allowed:
        wrong.append(f"{row['redone']} rounds done again")
    if kind == "throttle" and row["over_ms"] > longest:
        wrong.append(f"waited {row['over_ms']:.0f} ms longer than one planned round, and {longest:.0f} are right")
    # A fault in the last round may come after the end of the run.
    if kind != "throttle" and kind != "disk full" and row["moment"] != "last" and not row["restarts"]:
        wrong.append("no restart: the fault did not hit")
    return wrong


def run(
    folder: Path, kind: str | None, moment: str, start_s: float, rng: random.Random, times: int = 1
) -> dict[str, Any]:
    """One supervised run with one fault, as a row; ``start_s`` is the time of a start.

    It trains ``times`` times, each time from the beginning.
    """
    folder.mkdir()
    every = 1 if kind else 1000  # a run that nothing hits needs no checkpoint to continue from
    (folder / "job.json").write_text(json.dumps({"times": times, "epochs": EPOCHS, "elastic": False, "every": every}))
    log = folder / "events.jsonl"
    command = [sys.executable, "-m", "jaxche", "launch", "-n", str(len(PACES)), "--pace", ",".join(map(str, PACES))]
    command += ["--max-restarts", "3", "--hang-timeout", "25", "--grace", "2", "--events", str(log)]
    command += [worker.__file__, str(folder)]
    # All runs compile the same small programs: into a cache of theirs, unless there is one already.
    cache = {"COMPILATION_CACHE_DIR": str(folder.parent / "cache"), "PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    env = {f"JAX_{name}": value for name, value in cache.items()} | os.environ | {"JAX_PLATFORMS": "cpu"}
    began = time.perf_counter()
    rank, at = rng.randrange(len(PACES)), 0
    with (folder / "output").open("w") as output:
        child = subprocess.Popen(command, env=env, stdout=output, stderr=output)
        try:
            if kind:
                target = Target(Launch(folder, child.pid), rank, rng)
                at = wait_for(moment, target, child)
                time.sleep(rng.random() * {"start": start_s, "last": 0.6}.get(moment, 0.3))
                # The process may have ended.
                with contextlib.suppress(ProcessLookupError):
                    FAULTS[kind](target)
            code = child.wait(timeout=240)
        except (subprocess.TimeoutExpired, SystemExit) as error:
            child.terminate()
            code = child.wait(timeout=60)
            if isinstance(error, SystemExit):
                raise
    seconds = time.perf_counter() - began
    events = read(log)
    rounds = [event for event in events if event["event"] == "round"]
    tail = (folder / "output").read_text()[-600:]
    row = {"kind": kind, "moment": moment, "rank": rank, "round": at, "code": code, "seconds": seconds, "tail": tail}
    row |= {"restarts": sum(event["event"] == "restart" for event in events), "redone": redone(rounds)}
    row["wait_ms"] = max((event["wait_ms"] for event in rounds), default=0.0)
    records = [folder / f"checkpoints{number}" / "history.jsonl" for number in range(times)]
    row["over_ms"] = max(map(over_ms, records))
    began_at = min((event["time"] for event in events if event["event"] == "start"), default=0.0)
    row["start_s"] = min((event["time"] for event in rounds), default=began_at) - began_at
    end = folder / "end-0"
    row["losses"] = json.loads(end.read_text())["losses"] if end.exists() else [math.nan]
    row |= {"loss": row["losses"][0], "batches": batches(records[0])}
    return row | {"replayed": replayed(records[0])[0] if kind and not code else math.nan}


def redone(rounds: list[dict[str, Any]]) -> int:
    """The most finished rounds that a restart did again."""
    most = 0
    for restart in range(1, 1 + max((event["restart"] for event in rounds), default=0)):
        before = [event["round"] for event in rounds if event["restart"] < restart]
        after = [event["round"] for event in rounds if event["restart"] == restart]
        if before and after:
            most = max(most, max(before) + 1 - min(after))
    return most


def over_ms(record: Path) -> float:
    """How much longer than twice its planned time a round took, at most; negative where none did.

    The first has no plan by the clock.
    """
    most = -math.inf
    for line in record.read_text().splitlines()[1:] if record.exists() else []:
        info = json.loads(line)
        planned = max(count * pace for count, pace in zip(info["planned"], PACES, strict=True))
        most = max(most, max(info["wall_ms"]) - planned - max(planned, LEAST_PATIENCE_MS))
    return most


def wait_for(moment: str, target: Target, child: subprocess.Popen[bytes]) -> int:
    """Wait until a run has come so far, and return its last round, -1 before the first."""
    rng = target.rng
    wanted = {"start": -1, "first": rng.randrange(2), "later": rng.randrange(2, 8), "last": 1}[moment]
    while child.poll() is None:
        rounds = [event for event in target.run.events.read() if event["event"] == "round"]
        seen = max((event["round"] for event in rounds), default=-1)
        there = seen >= wanted and len(target.run.pids) == len(PACES)
        if moment == "last":
            # The next round may be the last: the last one took as many batches as are left.
            left = EPOCHS * BATCHES - sum(event["steps"] for event in rounds)
            there &= left <= sum(event["steps"] for event in rounds if event["round"] == seen)
        if there:
            return seen
        time.sleep(0.01)
    raise RuntimeError("the run ended before its fault")
