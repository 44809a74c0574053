"""What a run survives: faults at random moments, from start to end, in runs of three processes of unequal speeds.

Each run is supervised (``jaxche launch --max-restarts``), saved after every round before the next begins, and hit by
one fault. It has to come to its end, with every batch of every epoch trained on exactly once by its record, no more
than one finished round done again, and the loss of its record when nothing disturbs it: the rounds are run again, on
devices of this process. Counts follow the clock, so no two runs end alike; the losses of all together have to lie as
those of runs that nothing disturbed. One fault costs more by its
nature: a disk that is full keeps none of the rounds of that time. Beside a throttled rank nobody may wait for longer
than one planned round more, and the step it is in.

    python scripts/chaos.py                      # 54 faults, nine of each kind
    python scripts/chaos.py --faults 6 --seed 1  # one of each kind
    python scripts/chaos.py --elastic --faults 12  # the others continue: kills and stops, each rank in turn

With ``--elastic`` nothing is started again but the rank that was hit, and the figure is the time from the fault to the
next merged round, by rank. Such runs are longer, so that a replacement can join, and their rounds are not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PACES, EPOCHS, BATCHES = (10, 10, 25), 3, 120
ELASTIC_KINDS, ELASTIC_EPOCHS = ("kill", "stop"), 25
KINDS = ("kill", "stop", "term", "throttle", "disk full", "torn checkpoint")
# While processes start and compile, in the first rounds, in later ones, in the last or after it.
MOMENTS = ("later", "start", "first", "last")
# A rank that is late stops between two steps, of which a throttled one takes four times as long; and shorter rounds
# than this have its patience.
STEP_MS, LEAST_PATIENCE_MS = 4.0 * max(PACES), 200.0
# Of a loss that processes compute and one that devices of a single process do.
ROUNDING = 1e-3
# Finished rounds that are done again at most, by kind of fault.
LOST = {"disk full": None}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=54, help="how many (default 54)")
    parser.add_argument("--undisturbed", type=int, default=12, help="runs without a fault (default 12)")
    parser.add_argument("--seed", type=int, default=0, help="of kinds, ranks and moments (default 0)")
    parser.add_argument("--elastic", action="store_true", help="hit elastic runs")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--times", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(Path(args.worker), args.times, args.elastic)
    if args.elastic:
        return elastic_campaign(args.faults, random.Random(args.seed))

    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory(prefix="jaxche-chaos-") as folder:
        # In the same processes one after the other: what differs between them is the clock, not how they start.
        calm = run(Path(folder) / "calm", None, "", 0.0, rng, times=args.undisturbed)
        if calm["code"]:
            print(f"undisturbed: exit code {calm['code']}: {calm['tail']}")
            return 1
        losses = calm["losses"]
        # Counts follow the clock, so no two runs end alike, and of a handful the range is less than their whole spread.
        low, high = min(losses), max(losses)
        longest = max(STEP_MS, calm["over_ms"])
        print(f"{len(losses)} undisturbed: loss {low:.5f} to {high:.5f}, {calm['seconds']:.1f} s together")
        print("fault            moment rank round restarts redone seconds     loss replayed  verdict")
        failed, rows = 0, []
        for number in range(args.faults):
            # Each kind at each moment in turn.
            kind, moment = KINDS[number % len(KINDS)], MOMENTS[(number + number // len(KINDS)) % len(MOMENTS)]
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
    print(f"{args.faults - failed} of {args.faults} runs came through")
    found = statistics.median(row["loss"] for row in rows)
    within = sum(low <= row["loss"] <= high for row in rows)
    print(f"median loss {found:.5f}; {within} within {low:.5f} to {high:.5f}")
    if not 2 * low - high <= found <= 2 * high - low:
        print("that is outside the spread of undisturbed runs")
        failed += 1
    return 1 if failed else 0


def elastic_campaign(faults: int, rng: random.Random) -> int:
    """Hit elastic runs with kills and stops, each rank in turn."""
    failed, gaps = 0, {}
    print("fault  moment rank round replaced seconds to the next round  verdict")
    with tempfile.TemporaryDirectory(prefix="jaxche-chaos-") as folder:
        for number in range(faults):
            kind, rank = ELASTIC_KINDS[number // len(PACES) % len(ELASTIC_KINDS)], number % len(PACES)
            moment = ("later", "first", "later", "last")[number // (len(PACES) * len(ELASTIC_KINDS)) % 4]
            row = run(Path(folder) / str(number), kind, moment, 3.0, rng, rank=rank, elastic=True)
            wrong = []
            if row["code"] != 0:
                wrong.append(f"exit code {row['code']}: {row['tail']}")
            elif row["batches"] != sorted((e, i) for e in range(ELASTIC_EPOCHS) for i in range(BATCHES)):
                wrong.append("batches left out or used twice")
            if row["restarts"]:
                wrong.append("all were started again")
            failed += bool(wrong)
            gaps.setdefault((kind, rank), []).append(row["gap_s"])
            print(
                f"{kind:6s} {moment:6s} {rank:4d} {row['round']:5d} {row['replaced']:8d} {row['gap_s']:25.2f}  "
                f"{'; '.join(wrong) or 'ok'}",
                flush=True,
            )
    for (kind, rank), found in sorted(gaps.items()):
        print(f"{kind} of rank {rank}: median {statistics.median(found):.2f} s, most {max(found):.2f} s")
    print(f"{faults - failed} of {faults} runs came through")
    return 1 if failed else 0


def summary(rows: list[dict[str, Any]]) -> None:
    """A line a kind."""
    print("\nfault            runs restarts redone   longest wait of another rank")
    for kind in KINDS:
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
    elif not math.isclose(row["loss"], row["replayed"], rel_tol=ROUNDING):
        wrong.append(f"its rounds undisturbed give {row['replayed']:.5f}")
    allowed = LOST.get(kind, 1)
    if allowed is not None and row["redone"] > allowed:
        wrong.append(f"{row['redone']} rounds done again")
    if kind == "throttle" and row["over_ms"] > longest:
        wrong.append(f"waited {row['over_ms']:.0f} ms longer than one planned round, and {longest:.0f} are right")
    # Of the last round's fault the run's own end may be first.
    if kind != "throttle" and kind != "disk full" and row["moment"] != "last" and not row["restarts"]:
        wrong.append("no restart: the fault did not hit")
    return wrong


def run(
    folder: Path,
    kind: str | None,
    moment: str,
    start_s: float,
    rng: random.Random,
    times: int = 1,
    rank: int | None = None,
    elastic: bool = False,
) -> dict[str, Any]:
    """One supervised run, and what befell it; a start takes so long. ``times`` trainings, each from the beginning."""
    folder.mkdir()
    events = folder / "events.jsonl"
    command = [sys.executable, "-m", "jaxche", "launch", "-n", str(len(PACES)), "--pace", ",".join(map(str, PACES))]
    command += [
        "--max-restarts",
        "3",
        "--hang-timeout",
        "40" if elastic else "25",
        "--grace",
        "2",
        "--events",
        str(events),
    ]
    command += ["--elastic"] * elastic
    command += [__file__, "--worker", str(folder), "--times", str(times), *["--elastic"] * elastic]
    # All runs compile the same small programs.
    cache = {"COMPILATION_CACHE_DIR": str(folder.parent / "cache"), "PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    env = os.environ | {"JAX_PLATFORMS": "cpu"} | {f"JAX_{name}": value for name, value in cache.items()}
    began = time.perf_counter()
    rank, at, hit_at = rng.randrange(len(PACES)) if rank is None else rank, 0, math.inf
    with (folder / "output").open("w") as output:
        child = subprocess.Popen(command, env=env, stdout=output, stderr=output)
        try:
            if kind:
                at = wait_for(moment, events, child, rng, ELASTIC_EPOCHS if elastic else EPOCHS)
                time.sleep(rng.random() * {"start": start_s, "last": 0.6}.get(moment, 0.3))
                hit_at = time.time()
                # Of those that have ended already there is nothing to hit.
                with contextlib.suppress(ProcessLookupError):
                    FAULTS[kind](pids(events), rank, folder)
            code = child.wait(timeout=240)
        except subprocess.TimeoutExpired:
            child.terminate()
            code = child.wait(timeout=60)
    seconds = time.perf_counter() - began
    told = read(events)
    rounds = [event for event in told if event["event"] == "round"]
    tail = (folder / "output").read_text()[-600:]
    row = {"kind": kind, "moment": moment, "rank": rank, "round": at, "code": code, "seconds": seconds, "tail": tail}
    row |= {"restarts": sum(event["event"] == "restart" for event in told), "redone": redone(rounds)}
    row["replaced"] = sum(event["event"] == "replace" for event in told)
    row["gap_s"] = min(
        (e["time"] - hit_at for e in rounds if e["time"] > hit_at and e["rank"] != rank), default=math.nan
    )
    row["wait_ms"] = max((event["wait_ms"] for event in rounds), default=0.0)
    records = [folder / f"checkpoints{number}" / "history.jsonl" for number in range(times)]
    row["over_ms"] = math.nan if elastic else max(map(over_ms, records))
    began_at = min((event["time"] for event in told if event["event"] == "start"), default=0.0)
    row["start_s"] = min((event["time"] for event in rounds), default=began_at) - began_at
    done = folder / "losses.json"
    row["losses"] = json.loads(done.read_text()) if done.exists() else [float("nan")]
    row |= {"loss": row["losses"][0], "batches": batches(records[0])}
    return row | {"replayed": replayed(records[0]) if kind and not code and not elastic else math.nan}


def replayed(record: Path) -> float:
    """The final loss of a record that is run again, with nothing to disturb it."""
    import jax

    if jax.config.values["jax_num_cpu_devices"] != len(PACES):
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", len(PACES))
    import jaxche

    trainer, params, data, loss = problem(len(PACES))
    state, _ = trainer.replay(trainer.init(params), data, jaxche.History.from_json(record))
    return loss(trainer.params(state))


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


def batches(record: Path) -> list[tuple[int, int]]:
    """Every (epoch, index) that was trained on, as the record has it, in order."""
    found = []
    for line in record.read_text().splitlines() if record.exists() else []:
        info = json.loads(line)
        start = info["cursor"]
        for planned, done in zip(info["planned"], info["counts"], strict=True):
            found += [(info["epoch"] + at // BATCHES, at % BATCHES) for at in range(start, start + done)]
            start += planned
    return sorted(found)


def read(events: Path) -> list[dict[str, Any]]:
    lines = events.read_text().splitlines() if events.exists() else []
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):  # the last one may be in the making
            found.append(json.loads(line))
    return found


def pids(events: Path) -> dict[int, int]:
    """Of the ranks that run now."""
    return {event["rank"]: event["pid"] for event in read(events) if event["event"] == "start"}


def wait_for(moment: str, events: Path, child: subprocess.Popen[bytes], rng: random.Random, epochs: int) -> int:
    """Wait until a run has come so far, and return its last round, -1 before the first."""
    wanted = {"start": -1, "first": rng.randrange(2), "later": rng.randrange(2, 8), "last": 1}[moment]
    while child.poll() is None:
        rounds = [event for event in read(events) if event["event"] == "round"]
        seen = max((event["round"] for event in rounds), default=-1)
        there = seen >= wanted and len(pids(events)) == len(PACES)
        if moment == "last":
            # No more is left than what the last one took.
            left = epochs * BATCHES - sum(event["steps"] for event in rounds)
            there &= left <= sum(event["steps"] for event in rounds if event["round"] == seen)
        if there:
            return seen
        time.sleep(0.01)
    raise RuntimeError("the run ended before its fault")


def signalled(number: int) -> Callable[..., None]:
    return lambda pids, rank, folder: os.kill(pids[rank], number)


def throttle(pids: dict[int, int], rank: int, folder: Path) -> None:
    """A quarter of its time, for two seconds."""
    until = time.monotonic() + 2.0
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < until:
            os.kill(pids[rank], signal.SIGSTOP)
            time.sleep(0.06)
            os.kill(pids[rank], signal.SIGCONT)
            time.sleep(0.02)


def disk_full(pids: dict[int, int], rank: int, folder: Path) -> None:
    """No file of any rank may grow, for a second."""
    before = {pid: resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in pids.values()}
    for pid, (_, hard) in before.items():
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))

    def lift() -> None:
        for pid, limits in before.items():
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)

    threading.Timer(1.0, lift).start()


def torn(pids: dict[int, int], rank: int, folder: Path) -> None:
    """A rank is killed, and of the newest checkpoint half of each file is left."""
    os.kill(pids[rank], signal.SIGKILL)
    time.sleep(0.2)
    steps = [path for path in (folder / "checkpoints0").glob("*") if path.name.isdigit()]
    for path in files(max(steps, key=lambda path: int(path.name))) if steps else []:
        with contextlib.suppress(FileNotFoundError):
            os.truncate(path, path.stat().st_size // 2)


def files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


FAULTS = {
    "kill": signalled(signal.SIGKILL),
    "stop": signalled(signal.SIGSTOP),
    "term": signalled(signal.SIGTERM),
    "throttle": throttle,
    "disk full": disk_full,
    "torn checkpoint": torn,
}


def problem(world: int) -> tuple[Any, Any, Any, Callable[[Any], float]]:
    """A trainer, the parameters it begins with, its data, and the loss of all of them."""
    import jax.numpy as jnp
    import numpy as np
    import optax

    import jaxche

    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCHES * 8, 16)).astype(np.float32)
    y = np.tanh(x @ rng.normal(size=(16, 4)).astype(np.float32))
    params = {"hidden": rng.normal(size=(16, 32)).astype(np.float32) * 0.25, "out": np.zeros((32, 4), np.float32)}

    def loss(p: Any, batch: Any) -> Any:
        return jnp.mean((jnp.tanh(batch["x"] @ p["hidden"]) @ p["out"] - batch["y"]) ** 2)

    che = jaxche.ElChe(world_size=world, anchor=4, max_anchor=8, tuner="steady")
    data = {"x": x, "y": y}
    trainer = jaxche.Trainer(loss, optax.adam(0.01), che=che)
    return trainer, params, jaxche.Batches(data, batch_size=8), lambda params: float(loss(params, data))


def worker(folder: Path, times: int, elastic: bool) -> int:
    import jax

    import jaxche

    jaxche.initialize(timeout_s=60)
    losses = []
    for number in range(times):
        trainer, params, data, loss = problem(jax.device_count())
        checkpoints = jaxche.Checkpoints(
            folder / f"checkpoints{number}", durable=not elastic, every=25 if elastic else 1
        )
        epochs = ELASTIC_EPOCHS if elastic else EPOCHS
        state, _ = trainer.fit(trainer.init(params), data, epochs, progress=False, checkpoints=checkpoints)
        losses.append(loss(trainer.params(state)))
    if jax.process_index() == 0:
        (folder / "losses.json").write_text(json.dumps(losses))
    return 0


if __name__ == "__main__":
    sys.exit(main())
