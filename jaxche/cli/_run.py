"""What each process of `jaxche train` does: joins, measures, trains, writes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxche.cli import _pace
from jaxche.cli._outcome import outcome
from jaxche.cli._replay import replay
from jaxche.cli._report import Result, round_header, step_text, table
from jaxche.cli._settings import cadence, policies, trainer_options
from jaxche.cli._tasks import TASKS, Task, load
from jaxche.cli._watch import Watch, barrier, say
from jaxche.cli._write import read_whole, write_policy, write_result, write_whole
from jaxche.cluster import share
from jaxche.distributed import PACE_MS
from jaxche.drawing import per_rank
from jaxche.sharding import devices
from jaxche.training import Advice, Checkpoints, History, ReplicaState, Trainer

_PROBE_S, _MEASURE_S = 0.7, 2.0
# Of a policy in a comparison: what it reached, written last.
_DONE = "done.json"
_PATIENCE_S = 300.0


class Refused(ValueError):
    """Something every process found at once, in the same words."""


def train(args: argparse.Namespace, folder: Path) -> None:
    """Trains with each policy in turn and writes what came out.

    Args:
      args: the arguments of `jaxche train`.
      folder: for the files.

    Raises:
      Exception: whatever the trainer raises, and ``Refused``.
    """
    if args.replay:
        replay(args)
        return
    if jax.process_index() == 0:
        refuse_folder(args, folder)
    task = load(args.task, args.batch_size, args.learning_rate, args.seed)
    start = task.init(args.seed)
    world = len(devices())
    epochs, every = args.epochs or task.epochs, args.checkpoint_every or (args.max_restarts and 1)
    try:
        che = cadence(args, world)
        paces, step_ms = _paces(args, task, start, world)
        options = [trainer_options(args, policy) for policy in policies(args)]
    except ValueError as error:
        raise Refused(str(error)) from error
    say(_header(task, start[0], epochs, paces, step_ms))

    results, advice = [], []
    for chosen in options:
        trainer = Trainer(task.loss_fn, task.tx, che=che, pace_ms=paces, **chosen)
        state = trainer.init(*start)
        say(f"\npolicy {chosen['policy']}, averaging {trainer.average}" if world > 1 else "\na plain training loop")
        if args.dry_run:
            _, history = trainer.fit(state, task.data, dry_run=True)
            say(f"dry run: one batch on every replica and one merge went well; loss {history[0].loss:.4f}")
            continue
        part = folder / chosen["policy"] if args.compare else folder
        result = _done(part, chosen["policy"]) if args.compare and every else None
        if result is not None:
            say(f"done by an earlier start, in {result.seconds:.1f} s")
            on_file = part / "history.jsonl"
            history = History.from_json(on_file, skip_damaged=True) if jax.process_index() == 0 else History()
        else:
            kept = Checkpoints(part / "checkpoints", every) if every else None
            state, result, history = _fit(trainer, task, state, epochs, kept, part)
            if jax.process_index() == 0:
                write_policy(part, history, trainer.params(state))
                if args.compare and every:
                    write_whole(part / _DONE, json.dumps(result.to_dict()))
            barrier("written")
        results.append(result)
        if history and math.isfinite(history[-1].noise):
            advice.append((result.policy, history.advice()))
    if args.dry_run:
        say("nothing was written")
    elif jax.process_index() == 0:
        _end(args, task, folder, results, advice, paces, step_ms)


def refuse_folder(args: argparse.Namespace, folder: Path) -> None:
    """Refuse a folder in which a run has ended, one that cannot go on, and one that cannot be written."""
    ended = read_whole(folder / "result.json") is not None
    if os.path.exists(folder) and (ended or not (args.checkpoint_every or args.max_restarts)):
        raise ValueError(f"{folder} is there already; choose another --name")
    if args.dry_run:
        return
    # The folder itself is not made: one that is there is of a run.
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
    try:
        # Permissions alone do not tell, for the superuser and on a file system that is read-only or full.
        with tempfile.TemporaryFile(dir=there) as probe:
            probe.write(b"\0")
    except OSError as error:
        raise ValueError(
            f"--out {args.out}: the run cannot be written to {folder}, for {there} takes no files ({error.strerror}). "
            "Write the path of a folder that does, e.g. --out ~/runs"
        ) from None


def _done(folder: Path, policy: str) -> Result | None:
    """What a policy reached, where an earlier start of this comparison came to its end; the same on every process."""
    found = json.dumps(read_whole(folder / _DONE)) if jax.process_index() == 0 else ""
    found = share(f"done {policy}", jax.process_index(), jax.process_count(), found, _PATIENCE_S)[0]
    saved = json.loads(found)
    return None if saved is None else Result.from_dict(saved)


def _paces(args: argparse.Namespace, task: Task, start: Any, world: int) -> tuple[Any, tuple[float, ...]]:
    """The pace of each rank, or None, and what a step took unpaced, where that had to be known."""
    asked = args.pace
    if asked is None and PACE_MS in os.environ:
        return None, ()
    os.environ.pop(PACE_MS, None)
    if asked is None:
        alike = world > 1 and all(device.platform == "cpu" for device in devices())
        asked = "auto" if args.ratios or alike else "none"
    if asked == "none":
        return None, ()
    probe = Trainer(task.loss_fn, task.tx, average="parameters", seed=args.seed)
    step_ms = tuple(1e3 / rate for rate in probe.measure_rates(probe.init(*start), task.data, seconds=_PROBE_S))
    if asked == "auto":
        return _pace.auto_paces(step_ms, args.ratios or _pace.default_ratios(world)), step_ms
    _pace.check_paces(asked, step_ms)
    return asked, step_ms


def _header(task: Task, params: Any, epochs: int, paces: Sequence[float] | None, step_ms: Sequence[float]) -> str:
    plural = "s" if epochs > 1 else ""
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    kinds = sorted({device.device_kind for device in devices()})
    found = f"{len(devices())} x {' and '.join(kinds)}"
    pace = ""
    if paces is not None:
        pace = f", paced to {per_rank(paces, '{:g}')} ms a step ({step_text(step_ms)})"
    elif PACE_MS in os.environ:
        pace = f", paced by {PACE_MS}"
    return "\n".join(
        [
            f"task {task.name}: {TASKS[task.name][0]}",
            f"  {size:,} parameters, {epochs} epoch{plural} of {len(task.data)} batches of {task.data.batch_size}",
            f"  {found}{pace}",
        ]
    )


def _fit(
    trainer: Trainer, task: Task, state: ReplicaState, epochs: int, checkpoints: Checkpoints | None, folder: Path
) -> tuple[ReplicaState, Result, History]:
    rates = trainer.measure_rates(state, task.data, seconds=_MEASURE_S)
    _compile_last_batch(trainer, task, state)
    say(round_header(trainer.world_size))
    watch = Watch(trainer, task, epochs, folder, goes_on=checkpoints is not None)
    state, history = trainer.fit(state, task.data, epochs, callbacks=[watch], progress=False, checkpoints=checkpoints)
    if state.epoch < epochs or state.owed:  # Ctrl-C, to which fit answers with what was reached
        raise KeyboardInterrupt
    watch.finish(state)
    result = outcome(trainer.policy.value, history, rates, watch.seconds, watch.test, watch.curve)
    return state, result, history


def _compile_last_batch(trainer: Trainer, task: Task, state: ReplicaState) -> None:
    """The last batch of an epoch may be smaller, a program of its own; without this it would be on the clock."""
    last = len(task.data) - 1
    if jax.tree.map(len, task.data[last]) == jax.tree.map(len, task.data[0]):
        return
    place = dataclasses.replace(state, cursor=last)
    for rank in range(trainer.world_size):
        trainer.round(place, task.data, counts=[int(r == rank) for r in range(trainer.world_size)])


def _end(
    args: argparse.Namespace,
    task: Task,
    folder: Path,
    results: Sequence[Result],
    advice: Sequence[tuple[str, Advice]],
    paces: Sequence[float] | None,
    step_ms: Sequence[float],
) -> None:
    say("\n" + table(results, task.metric))
    for policy, found in advice:
        say(f"\n{policy if args.compare else 'advice'}: {found.summary}" + (f"\n  {found.line}" if found.line else ""))
    write_result(
        folder,
        {
            "task": task.name,
            "metric": task.metric,
            "devices": [device.device_kind for device in devices()],
            "pace_ms": paces,
            "step_ms": step_ms,
            "batch_size": task.data.batch_size,
            "results": {result.policy: result.to_dict() for result in results},
            "advice": {policy: found.rows() for policy, found in advice},
            "arguments": {name: value for name, value in vars(args).items() if name != "words"},
            "command": ["jaxche", *args.words],
        },
    )
    files = "result.json, and a folder a policy with" if args.compare else "result.json,"
    say(f"\nwritten to {folder}:\n  {files} history.jsonl, history.png, params (an Orbax checkpoint)")
    if args.compare or len(devices()) == 1:
        say("next: jaxche simulate --ms 20,50, or your own script: jaxche launch -n 2 train.py")
    else:
        say(f"next: jaxche train --task {task.name} --compare sync,cadence,async")
    say(f"      jaxche report {shlex.quote(str(folder))}")
