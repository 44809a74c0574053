"""Time to quality on a virtual clock, for several ways to use a fleet of unequal devices.

Every run trains for real in this process, on the clock of a ``jaxche.VirtualFleet``; nothing sleeps. There are three
measures. ``constant``: the time until the held-out loss reaches that of the fast device alone at the deadline, at a
constant learning rate. ``averaged``: the same of the moving average of the parameters, of all arms. ``annealed``: the
held-out loss at the deadline, with a learning rate that falls to zero there.
Each arm takes its learning rate from a grid, by its result on seed 0, and keeps it for the other seeds; where two rates
have the same seeds, their medians decide.

    python scripts/bench_quality.py                                  # the standard cells, the main arms, seed 0
    python scripts/bench_quality.py --seeds 0 1 2 --minutes 10       # ten minutes; repeat it to continue
    python scripts/bench_quality.py --task mnist --cells 20/50@5 --arms all
    python scripts/bench_quality.py --table                          # Markdown, from the results so far
    python scripts/bench_quality.py --write                          # the same, into docs/measurements.md

A cell is ``speeds@cost``: ms a batch of each device, and ms of a merge. Each run is one line of the results file; a run
whose line exists is not repeated. To add an arm, add one line to
``ARMS`` in quality_arms.py.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

# One core a run: before jax starts.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from fleet import fleet, title
from quality_arms import ARMS, BASELINE, CEILING, MAIN, PLAIN, Arm, Counts, Progress, Speeds, equal_fast

import jaxche
from jaxche.cli import _tasks
from jaxche.training._plan import GivenRound

RESULTS = Path(__file__).with_name("quality.jsonl")
# The page with the tables of the standard cells and of the averaged measure, between lines that name them.
PAGE = Path(__file__).resolve().parent.parent / "docs" / "measurements.md"
BEGIN, END = "<!-- {}: scripts/bench_quality.py --write -->", "<!-- end of {} -->"
EMA = 0.05  # of the averaged measure
STANDARD = ("20/20/40/80@0.2", "20/20/40/80@11", "20/50@0.2", "20/50@5")
# Seconds to the deadline on the clock: about 3,000 batches of the text task over the fleet.
DEADLINES = {"20/50": 40.0, "20/20/40/80": 24.0, "20/20/60": 24.0, "20/20/20/20/30/30/60/120": 12.0}
# The image tasks need fewer batches, and a late phase is short.
SHARE = {"text": 1.0, "late": 0.5, "mnist": 0.5, "momentum": 0.5, "digits": 0.25}
# Tasks that are others with a change.
VARIANTS = {"late": "text", "momentum": "mnist"}
GRIDS = {"text": (2e-3, 4e-3, 8e-3, 16e-3), "late": (5e-4, 1e-3, 2e-3, 4e-3), "mnist": (1e-3, 2e-3, 4e-3, 8e-3)}
GRIDS |= {"digits": GRIDS["text"], "momentum": (2e-2, 4e-2, 8e-2, 16e-2)}
POINTS = {"constant": 12, "annealed": 6, "averaged": 12}  # evaluations of a run
LATE = {"epochs": 10, "learning_rate": 4e-3}  # of the run from which the late task starts

# Cells: a task on a fleet.


@dataclass(frozen=True)
class Cell:
    task: str
    fleet: str  # ms a batch of each device, e.g. "20/50"
    sync_ms: float
    fixed_ms: float
    deadline_s: float
    schedule: str
    link_mbit: float | None = None  # that each device can send; sync_ms is then what a merge takes besides its bytes

    @property
    def speeds(self) -> Speeds:
        return fleet(self.fleet)

    def seen_by(self, arm: Arm) -> Cell:
        """The cell as far as an arm depends on it: a single device has no merges and no smaller batches."""
        if len(arm.devices(self.speeds)) > 1:
            return self
        return Cell(self.task, self.fleet, 0.0, 0.0, self.deadline_s, self.schedule)

    def holds(self, arm: Arm) -> bool:
        """Whether the arm is one of its own here; one fast device alone is no subset in sync."""
        return arm.devices is not equal_fast or len(equal_fast(self.speeds)) > 1


def parse_cell(text: str, args: argparse.Namespace) -> Cell:
    times, _, sync = text.partition("@")
    name = title(fleet(times))
    try:
        sync_ms = float(sync)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} has no ms of a merge after @; write {times}@11") from None
    deadline = args.deadline or DEADLINES.get(name, 24.0) * SHARE[args.task]
    return Cell(args.task, name, sync_ms, args.fixed_ms, deadline, args.schedule)


class Task(NamedTuple):
    """A task of ``jaxche train``, by what a run needs of it, and an optimizer without its learning rate."""

    loss_fn: Callable[..., Any]
    arrays: Any
    batch_size: int
    init: Callable[[int], Any]
    evaluate: Callable[[Any], dict[str, float]]
    direction: optax.GradientTransformation

    def data(self, seed: int) -> jaxche.Batches:
        # Epoch e is shuffled by seed + e: seeds far apart share no order.
        return jaxche.Batches(self.arrays, self.batch_size, 1000 * seed)


@functools.cache
def load(name: str, cache: Path) -> Task:
    found = _tasks.load(VARIANTS.get(name, name))
    direction = optax.trace(0.9, nesterov=True) if name == "momentum" else optax.scale_by_adam()

    def evaluate(params: Any) -> dict[str, float]:
        return {metric: round(value, 5) for metric, value in found.evaluate(params).items()}

    arrays, size = found.data.arrays, found.data.batch_size
    task = Task(found.loss_fn, arrays, size, lambda seed: found.init(seed)[0], evaluate, direction)
    if name == "late":
        params = late_start(task, cache / "late.npz")
        task = task._replace(init=lambda seed: params)
    return task


def late_start(task: Task, path: Path) -> Any:
    """The parameters after a longer run on one device at a constant rate, from the cache or made now."""
    params = task.init(0)
    leaves, treedef = jax.tree.flatten(params)
    if not path.exists():
        print(f"training {LATE['epochs']} epochs for {path}", flush=True)
        trainer = jaxche.Trainer(task.loss_fn, optax.adam(LATE["learning_rate"]), replicas=jax.devices()[:1])
        state, _ = trainer.fit(trainer.init(params), task.data(99), epochs=LATE["epochs"], progress=False)
        np.savez(path, *jax.tree.leaves(trainer.params(state)))
    with np.load(path) as saved:
        leaves = [saved[f"arr_{i}"] for i in range(len(leaves))]
    return jax.tree.unflatten(treedef, leaves)


# The optimizer, with a schedule whose numbers are in its state, so that one compiled program serves all runs.


class ScheduleState(NamedTuple):
    batches: optax.ScaleByScheduleState  # of all replicas
    peak: Any
    total: Any  # batches until the rate is at its end
    end: Any  # rate at the end, relative to the peak
    linear: Any  # 1 for a line, 0 for half a cosine

    def decay(self) -> Any:
        """The learning rate relative to its peak, after a warm-up over a fortieth of the run."""
        done = (self.batches.count + 1.0) / self.total
        cosine, line = 0.5 * (1 + jnp.cos(jnp.pi * jnp.minimum(done, 1))), jnp.maximum(1 - done, 0)
        shape = self.linear * line + (1 - self.linear) * cosine
        return jnp.minimum(1, 40 * done) * (self.end + (1 - self.end) * shape)


def scheduled(direction: optax.GradientTransformation) -> optax.GradientTransformation:
    def init(params: Any) -> ScheduleState:
        # Only the state from ``start`` has numbers.
        return ScheduleState(optax.ScaleByScheduleState(jnp.zeros([], jnp.int32)), *[jnp.full([], jnp.nan)] * 4)

    def update(updates: Any, state: ScheduleState, params: Any = None) -> Any:
        rate = state.peak * state.decay()
        count = optax.ScaleByScheduleState(state.batches.count + 1)
        return jax.tree.map(lambda u: -rate * u, updates), state._replace(batches=count)

    return optax.chain(direction, optax.GradientTransformation(init, update))


def start(tx: Any, params: Any, peak: float, total: int, end: float, schedule: str) -> Any:
    """The optimizer's state before the first batch."""
    first, state = tx.init(params)
    numbers = map(jnp.float32, (peak, total, end, schedule == "linear"))
    return first, ScheduleState(state.batches, *numbers)


# Runs.


@dataclass(frozen=True)
class Job:
    cell: Cell
    arm: str
    lr: float
    seed: int
    measure: str

    @property
    def key(self) -> tuple[Any, ...]:
        return (*asdict(self.cell).values(), self.arm, self.lr, self.seed, self.measure)


class Trained(NamedTuple):
    curve: list[tuple[float, float]]
    metrics: dict[str, float]
    history: list[jaxche.RoundInfo]

    @property
    def batches(self) -> int:
        return sum(info.batches for info in self.history)


class Bench:
    """An arm on a cell, compiled once for all its learning rates and seeds."""

    def __init__(self, arm: Arm, cell: Cell, task: Task, averages: bool = False):
        self.arm, self.cell, self.task, self.averages = arm, cell, task, averages
        self.speeds = arm.devices(cell.speeds)
        fixed = cell.fixed_ms if len(self.speeds) > 1 else 0.0
        costs = {"sync_ms": cell.sync_ms, "group_sync_ms": arm.group_ms, "link_mbit": cell.link_mbit}
        if not cell.link_mbit:
            costs["exchange_ms"] = arm.exchange * cell.sync_ms
        self.fleet = jaxche.VirtualFleet(self.speeds, **costs, fixed_ms=fixed)
        self.tx = scheduled(task.direction)
        self.trainers = arm.trainers(task.loss_fn, self.tx, self.fleet, EMA if averages else None)

    def train(self, lr: float, seed: int, total: int, end: float, points: int) -> Trained:
        """Train to the deadline; with ``points`` evaluations at even times, the last one at the end."""
        deadline, schedule = self.cell.deadline_s * 1e3, self.cell.schedule
        params, data = self.task.init(seed), self.task.data(seed)
        schedule_state = start(self.tx, params, lr, total, end, schedule)
        state = self.trainers[0].init(params, opt_state=schedule_state)
        curve, history, metrics = [], [], {}
        marks = [deadline * (i + 1) / points for i in range(points)]
        while True:
            mark = next((mark for mark in marks if mark > state.clock_ms), deadline)
            done = schedule_state[1]._replace(batches=optax.ScaleByScheduleState(sum(i.batches for i in history)))
            progress = Progress(self.speeds, history, state.clock_ms, float(done.decay()) if self.arm.counts else 1)
            trainer = self.trainers[-1 if len(history) % self.arm.every == self.arm.every - 1 else 0]
            after, info = trainer.round(state, data, self._counts(progress, mark))
            # A merge in flight ends before the deadline too.
            if after.merged().clock_ms > deadline:
                # Take the last round again, with the steps that fit; an update of exact sync is left out.
                cut = self._cut(info, deadline - state.clock_ms)
                if cut is None:
                    break
                after, info = trainer._round(state, data, given=cut)
                if after.merged().clock_ms > deadline:
                    break
            state = after
            history.append(info)
            if points and info.clock_ms >= mark - 1e-6 and mark < deadline:
                curve.append((info.clock_ms, self._evaluated(state)["loss"]))
        if points:
            metrics = self._evaluated(state)
            curve.append((state.merged().clock_ms, metrics["loss"]))
        return Trained(curve, metrics, history)

    def _evaluated(self, state: Any) -> dict[str, float]:
        trainer = self.trainers[0]
        return self.task.evaluate(trainer.params(trainer.with_ema(state) if self.averages else state))

    def _cut(self, info: jaxche.RoundInfo, left_ms: float) -> GivenRound | None:
        """The round with the steps that fit into the time that is left; None if none do."""
        left_ms -= self.fleet.merge_ms(info.merge_bytes) if len(self.speeds) > 1 else 0.0
        left_ms -= info.group_ms + (self.fleet.exchange_cost_ms if info.overlap else 0.0)
        if info.average == "gradients":
            return None
        if info.shares:  # all replicas take as many steps, each on some batches
            steps = max(info.counts)
            fit = max(0, int(left_ms / max(info.wall_ms) * steps))
            counts = tuple(n and fit for n in info.counts)
            return (
                GivenRound(counts, shares=info.shares, joined=info.joined // steps * fit, sent_after=())
                if fit
                else None
            )
        counts = tuple(min(n, max(0, int(left_ms / ms))) for n, ms in zip(info.counts, self.speeds, strict=True))
        return GivenRound(counts, sent_after=()) if sum(counts) else None

    def _counts(self, progress: Progress, mark: float) -> Counts | None:
        if len(self.speeds) == 1:
            # A round of a single replica only reports, and an average takes it in: up to the next evaluation.
            most = math.ceil((mark - progress.clock_ms) / self.speeds[0] - 1e-9)
            return (max(1, min(most, _SOLO_STEPS) if self.averages else most),)
        return self.arm.counts(progress) if self.arm.counts else None


# Of a round whose end an average takes in.
_SOLO_STEPS = 5


@functools.lru_cache(maxsize=1)
def bench(arm: Arm, cell: Cell, cache: Path, averages: bool) -> Bench:
    return Bench(arm, cell, load(cell.task, cache), averages)


def rehearsal(arm: Arm, cell: Cell, cache: Path) -> int:
    """The batches to the deadline, from a run of the same rounds on a model of one number."""
    task = load(cell.task, cache)
    toy = task._replace(
        loss_fn=lambda w, x: jnp.mean((w - x) ** 2),
        arrays=np.zeros(len(jax.tree.leaves(task.arrays)[0]), np.float32),
        init=lambda seed: jnp.ones(()),
    )
    one, total = Bench(arm, cell, toy), 3000
    for _ in range(4):  # a rule that looks at the learning rate changes with the total
        before, total = total, one.train(1e-3, 0, total, 0.0, 0).batches
        if abs(total / before - 1) < 0.005 or arm.counts is None:
            break
    return total


def perform(job: Job, known: int | None, cache: Path) -> dict[str, Any]:
    """One run as a line of the results; ``known`` are the batches to the deadline, if another run has shown them."""
    began = time.perf_counter()
    arm, end = ARMS[job.arm], 0.0 if job.measure == "annealed" else 1.0
    one = bench(arm, job.cell, cache, job.measure == "averaged")
    total = round(sum(job.cell.deadline_s * 1e3 / ms for ms in one.speeds))  # here only the warm-up follows it
    if end == 0:
        total = known or rehearsal(arm, job.cell, cache) or 1
    for _ in range(3):
        try:
            trained = one.train(job.lr, job.seed, total, end, POINTS[job.measure])
        except jaxche.NonFiniteLossError:
            trained = Trained([], {"loss": math.inf}, [])
            break
        # Rounds that depend on the loss are not those of the rehearsal.
        if end == 1 or abs(trained.batches / total - 1) < 0.02 or not trained.batches:  # no merge fits
            break
        total = trained.batches
    periods = [info.period_ms for info in trained.history] or [math.nan]
    return {
        **asdict(job.cell),
        "arm": job.arm,
        "lr": job.lr,
        "seed": job.seed,
        "measure": job.measure,
        "loss": trained.metrics["loss"],
        "metrics": {name: value for name, value in trained.metrics.items() if name in ("loss", "accuracy")},
        "curve": [(round(ms), loss) for ms, loss in trained.curve],
        "batches": trained.batches,
        "scheduled": total if end == 0 else None,
        "rounds": len(trained.history),
        "round_ms": round(statistics.median(periods), 2),
        "merge_ms": round(statistics.median([i.sync_ms + i.hidden_ms for i in trained.history] or [math.nan]), 2),
        "seconds": round(time.perf_counter() - began, 1),
        "versions": versions(),
    }


@functools.cache
def versions() -> dict[str, str]:
    """The versions, and the last commit of the package that was imported, with a mark for changes since."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(jaxche.__file__).parent), *words, "--", "."]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    commit = git("log", "-1", "--format=%h") + "-dirty" * bool(git("status", "--porcelain"))
    return {"jaxche": jaxche.__version__, "commit": commit, "jax": jax.__version__}


class Results:
    """The lines of a results file."""

    def __init__(self, path: Path):
        self.path = path
        lines = path.read_text(encoding="utf8").splitlines() if path.exists() else []
        self.rows = {self._job(row).key: row for row in map(json.loads, lines)}

    @staticmethod
    def _job(row: dict[str, Any]) -> Job:
        cell = Cell(**{name: row[name] for name in Cell.__dataclass_fields__ if name in row})
        return Job(cell, row["arm"], row["lr"], row["seed"], row["measure"])

    @property
    def cells(self) -> list[Cell]:
        """The cells of fleets with merges, the standard ones first."""
        found = {job.cell: None for job in map(self._job, self.rows.values()) if job.cell.sync_ms}
        return sorted(found, key=lambda cell: (f"{cell.fleet}@{cell.sync_ms:g}" not in STANDARD, cell.task != "text"))

    def add(self, row: dict[str, Any]) -> None:
        self.rows[self._job(row).key] = row
        with self.path.open("a", encoding="utf8") as file:
            file.write(json.dumps(row, separators=(",", ":")) + "\n")

    def of(self, cell: Cell, arm: str, measure: str, seed: int | None = None) -> list[dict[str, Any]]:
        """The runs of an arm on a cell."""
        head = (*asdict(cell.seen_by(ARMS[arm])).values(), arm)
        found = [row for key, row in self.rows.items() if key[: len(head)] == head and key[-1] == measure]
        return [row for row in found if seed is None or row["seed"] == seed]

    def batches(self, cell: Cell, arm: str) -> int | None:
        """The batches to the deadline, if a run has shown them."""
        return next((row["batches"] for m in POINTS for row in self.of(cell, arm, m)[-1:] if row["batches"]), None)

    def score(self, row: dict[str, Any], cell: Cell) -> tuple[float, float]:
        """What the learning rate is chosen by: the time to the target at a constant rate, and the loss."""
        reached = math.inf
        if row["measure"] != "annealed" and row["arm"] != BASELINE:
            reached = self.seconds_to_target(row, cell)
        return reached, row["loss"]

    def best(self, cell: Cell, arm: str, measure: str) -> list[dict[str, Any]]:
        """The runs at the best learning rate, by seed."""
        scores: dict[float, dict[int, Any]] = {}
        for row in self.of(cell, arm, measure):
            scores.setdefault(row["lr"], {})[row["seed"]] = self.score(row, cell)
        tuned = {lr: score for lr, score in scores.items() if 0 in score}
        if not tuned:
            return []
        seeds = tuned[min(tuned, key=lambda lr: tuned[lr][0])].keys()
        rivals = {
            lr: statistics.median_low(score[s] for s in seeds) for lr, score in tuned.items() if seeds <= score.keys()
        }
        lr = min(rivals, key=lambda lr: rivals[lr])
        return sorted((row for row in self.of(cell, arm, measure) if row["lr"] == lr), key=lambda row: row["seed"])

    def seconds_to_target(self, row: dict[str, Any], cell: Cell) -> float:
        """Seconds until this run of a constant rate has the loss of the baseline at the deadline, on the same seed."""
        base = {one["seed"]: one["loss"] for one in self.best(cell, BASELINE, row["measure"])}
        if row["seed"] not in base:
            return math.inf
        return crossing(row["curve"], base[row["seed"]])


def crossing(curve: Sequence[Sequence[float]], target: float) -> float:
    """Seconds at which a curve of (ms, loss) first reaches ``target``, between its points on a line; or infinity."""
    for (before_ms, before), (ms, loss) in zip([(0.0, math.inf), *curve], curve, strict=False):
        if loss <= target:
            share = 1.0 if math.isinf(before) else (before - target) / (before - loss)
            return (before_ms + share * (ms - before_ms)) / 1e3
    return math.inf


def next_rate(grid: Sequence[float], losses: Mapping[float, Any]) -> float | None:
    """The next learning rate to try: from the middle of the grid up, then down, until both neighbours are worse."""
    if not losses:
        return grid[len(grid) // 2]
    at = grid.index(min(losses, key=lambda lr: losses[lr]))
    return next((grid[i] for i in (at + 1, at - 1) if 0 <= i < len(grid) and grid[i] not in losses), None)


def next_job(results: Results, cells: Sequence[Cell], arms: Sequence[str], args: argparse.Namespace) -> Job | None:
    """The next run that has no line yet.

    First every arm at the middle of the grid on seed 0, then over the grid, then at the best rate over the seeds.
    """
    every = [
        (measure, cell, name) for measure in args.measures for cell in cells for name in arms if cell.holds(ARMS[name])
    ]
    again: list[Job] = []
    for measure, cell, name in every:
        grid = tuple(args.grid or GRIDS[cell.task])
        tried = {row["lr"]: results.score(row, cell) for row in results.of(cell, name, measure, seed=0)}
        tried = {lr: score for lr, score in tried.items() if lr in grid}
        lr, seed = next_rate(grid, tried), 0
        if lr is None:
            runs = results.best(cell, name, measure)
            lr, done = runs[0]["lr"], {row["seed"] for row in runs}
            seed = next((seed for seed in args.seeds if seed not in done), None)
        if seed is None:
            continue
        job = Job(cell.seen_by(ARMS[name]), name, lr, seed, measure)
        if not tried:
            return job
        again.append(job)
    return min(again, key=lambda job: job.seed > 0, default=None)


# Tables.


def table(results: Results, cell: Cell) -> str:
    """Markdown of one cell: the loss at the deadline and the time to the target, medians over seeds (min to max)."""
    annealed = {name: results.best(cell, name, "annealed") for name in ARMS if cell.holds(ARMS[name])}
    losses = {name: {row["seed"]: row["loss"] for row in runs} for name, runs in annealed.items()}
    times = {
        name: [results.seconds_to_target(row, cell) for row in results.best(cell, name, "constant")]
        for name in annealed
    }
    best_time = min((statistics.median(times[name]) for name in PLAIN if times.get(name)), default=math.nan)
    plain = [name for name in PLAIN if losses.get(name)]
    best_plain = min(plain, key=lambda name: statistics.median(losses[name].values()), default="")
    lines = [
        f"**{cell.task}, {cell.fleet} ms, merges of {cell.sync_ms:g} ms, {cell.deadline_s:g} s, {cell.schedule}**",
        "",
        "| arm | rate | seeds | batches | round, ms | loss at deadline | gap closed | s to target | to best plain |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in annealed.items():
        if not runs and not times[name]:
            continue
        gaps = [
            (losses[BASELINE][s] - loss) / (losses[BASELINE][s] - losses[CEILING][s])
            for s, loss in losses[name].items()
            if s in losses[BASELINE] and s in losses[CEILING]
        ]
        first = (runs or results.best(cell, name, "constant"))[0]
        tried = {row["lr"] for row in results.of(cell, name, first["measure"])}
        ratio = statistics.median(times[name]) / best_time if times[name] else math.nan
        columns = [
            name + " (best plain)" * (name == best_plain),
            f"{first['lr']:g}" + "*" * (first["lr"] in (min(tried), max(tried))),
            str(max(len(runs), len(times[name]))),
            f"{first['batches']:,}",
            f"{first['round_ms']:g}" if len(ARMS[name].devices(cell.speeds)) > 1 else "",
            spread(losses[name].values(), ".3f"),
            spread(gaps, ".0%"),
            spread(times[name], ".1f"),
            "" if math.isnan(ratio) else spread([ratio], ".2f"),
        ]
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines)


def summary(results: Results, cells: Sequence[Cell]) -> str:
    """Markdown with one line a cell: the loss of ``policy="auto"`` against the best of the others.

    Ratios are of the losses of one seed, medians over the seeds that both have; below 1 is better.
    """
    lines = [
        "| cell | s | seeds | fast device alone | best plain | auto | auto to best plain | best by hand | auto to it |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for cell in cells:
        found = {name: results.best(cell, name, "annealed") for name, arm in ARMS.items() if cell.holds(arm)}
        losses = {name: {row["seed"]: row["loss"] for row in runs} for name, runs in found.items() if runs}
        if not {"auto", BASELINE} <= losses.keys():
            continue
        seeds = losses["auto"].keys()
        shared = {name: [by_seed[seed] for seed in seeds & by_seed.keys()] for name, by_seed in losses.items()}
        middle = {name: statistics.median(found) for name, found in shared.items() if found}
        plain = min((name for name in PLAIN if name in middle), key=middle.__getitem__)
        hand = min((name for name in middle if name not in (*PLAIN, CEILING, "auto")), key=middle.__getitem__)
        ratios = [
            statistics.median(
                losses["auto"][seed] / losses[name][seed] for seed in losses["auto"] if seed in losses[name]
            )
            for name in (plain, hand)
        ]
        columns = [
            f"{cell.task}, {cell.fleet} at {cell.sync_ms:g} ms" + f", {cell.fixed_ms:g} ms fixed" * (cell.fixed_ms > 0),
            f"{cell.deadline_s:g}",
            str(len(losses["auto"])),
            f"{middle[BASELINE]:.3f}",
            f"{middle[plain]:.3f}, {plain}",
            f"{middle['auto']:.3f}",
            f"{ratios[0]:.3f}",
            f"{middle[hand]:.3f}, {hand}",
            f"{ratios[1]:.3f}",
        ]
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines)


def averaged(results: Results, cells: Sequence[Cell]) -> str:
    """Markdown with one line for each arm of each cell: the loss at the deadline of the averaged and the annealed run.

    The last column has the time to the averaged loss of the fast device alone at the deadline, as a part of that.
    """
    lines = [
        "| cell | s | arm | rate | seeds | averaged | constant rate | annealed | part of the time |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for cell in cells:
        found = {name: results.best(cell, name, "averaged") for name, arm in ARMS.items() if cell.holds(arm)}
        if not any(runs for name, runs in found.items() if len(ARMS[name].devices(cell.speeds)) > 1):
            continue  # single devices belong to all cells of their fleet
        for name, runs in found.items():
            if not runs:
                continue
            seeds = {row["seed"] for row in runs}
            losses = [
                [row["loss"] for row in results.best(cell, name, measure) if row["seed"] in seeds]
                for measure in ("averaged", "constant", "annealed")
            ]
            tried = {row["lr"] for row in results.of(cell, name, "averaged")}
            columns = [
                f"{cell.task}, {cell.fleet} at {cell.sync_ms:g} ms",
                f"{cell.deadline_s:g}",
                name,
                f"{runs[0]['lr']:g}" + "*" * (runs[0]["lr"] in (min(tried), max(tried))),
                str(len(runs)),
                *(spread(found, ".3f") for found in losses),
                spread([results.seconds_to_target(row, cell) / cell.deadline_s for row in runs], ".2f"),
            ]
            lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines)


def with_tables(page: str, name: str, tables: str) -> str:
    """A page with these tables between the lines of that name."""
    begin, end = BEGIN.format(name), END.format(name)
    before, rest = page.split(begin)
    return f"{before}{begin}\n\n{tables}\n\n{end}{rest.split(end)[1]}"


def spread(values: Iterable[float], form: str) -> str:
    """The median, and the range of several values."""
    found = sorted(values)
    if not found:
        return ""
    shown = [
        "not reached" if math.isinf(x) else format(x, form) for x in (statistics.median(found), found[0], found[-1])
    ]
    return shown[0] if len(found) == 1 else f"{shown[0]} ({shown[1]} to {shown[2]})"


def configure(cache: Path, devices: int) -> None:
    """So many CPU devices, and compiled programs that are kept in a folder."""
    cache.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_compilation_cache_dir", str(cache.absolute() / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--task", choices=tuple(SHARE), default="text", help="late: text from a trained model; momentum: mnist with SGD"
    )
    parser.add_argument("--cells", nargs="+", default=STANDARD, help=f"speeds@cost (default: {' '.join(STANDARD)})")
    parser.add_argument("--fixed-ms", type=float, default=0.0, help="ms of a step that its rows do not change")
    parser.add_argument("--deadline", type=float, help="seconds on the clock (default: by fleet and task)")
    parser.add_argument("--schedule", choices=("cosine", "linear"), default="cosine", help="default: %(default)s")
    parser.add_argument(
        "--arms", nargs="+", default=MAIN, help='names, parts of names, or "all" (default: the main ones)'
    )
    parser.add_argument("--measures", nargs="+", choices=tuple(POINTS), default=("annealed",))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--grid", nargs="+", type=float, help="learning rates (default: by task)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no run after this time")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--cache", type=Path, default=Path("runs/quality"), help="compiled programs, start of late")
    parser.add_argument("--table", action="store_true", help="print the tables instead")
    parser.add_argument("--write", action="store_true", help="put the tables of the standard cells into the docs")
    args = parser.parse_args()
    until = time.monotonic() + 60 * args.minutes
    try:
        cells = [parse_cell(name, args) for name in args.cells]
    except argparse.ArgumentTypeError as error:
        parser.error(f"--cells: {error}")
    parts = [part for part in args.arms if part not in ARMS]
    arms = [name for name in ARMS if parts == ["all"] or name in args.arms or any(part in name for part in parts)]
    if not arms:
        parser.error(f"--arms {' '.join(args.arms)}: no such arm; write all, or names or parts of {'; '.join(ARMS)}")
    results, grid = Results(args.results), tuple(args.grid or GRIDS[args.task])
    if args.table or args.write:
        text = "\n\n".join(table(results, cell) for cell in cells)
        if args.write:
            page = PAGE.read_text(encoding="utf8")
            page = with_tables(page, "quality", f"{summary(results, results.cells)}\n\n{text}")
            PAGE.write_text(with_tables(page, "averages", averaged(results, results.cells)), encoding="utf8")
        else:
            print(text, averaged(results, cells), sep="\n\n")
        return 0
    configure(args.cache, max(len(cell.speeds) for cell in cells))
    print(
        f"learning rates: {', '.join(f'{lr:g}' for lr in grid)}, from the middle; arms: {'; '.join(arms)}", flush=True
    )
    while time.monotonic() < until and (job := next_job(results, cells, arms, args)) is not None:
        row = perform(job, results.batches(job.cell, job.arm), args.cache)
        results.add(row)
        print(
            f"{row['fleet']}@{row['sync_ms']:g} {row['measure']} {row['arm']}: rate {row['lr']:g}, seed {row['seed']}: "
            f"loss {row['loss']:.4f}, {row['batches']:,} batches, {row['rounds']} rounds, {row['seconds']} s",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
