"""One process of `jaxche train`: joins the run, measures, trains with each policy, writes the files."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import jaxche
from jaxche.cli._command import exit_at_once, join, print_error
from jaxche.cli._progress import Progress, print_once, round_header
from jaxche.cli._replay import replay
from jaxche.cli._result import Result, result_from_history, table
from jaxche.cli._run_folder import read_json, refuse_directory, write_atomic, write_policy, write_result
from jaxche.cli._settings import TASKS, auto_paces, check_paces, default_ratios, saves, trainers
from jaxche.cli._tasks import Task, load
from jaxche.distributed import PACE_MS, process_group
from jaxche.messages import per_rank
from jaxche.reports import Advice, History
from jaxche.sharding import devices
from jaxche.training import Checkpoints, Trainer, TrainerState

_PROBE_S, _MEASURE_S = 0.7, 2.0
# The result of a policy in a comparison, written after its other files.
_DONE = "done.json"
# The launcher names the first process that exits: this one should be the rank that prints the error.
_GRACE_S = 1.0


class UsageError(ValueError):
    """Invalid arguments, found by all processes at once with the same message."""


def work(args: argparse.Namespace, name: str) -> int:
    """Join the run, train, print an error in one line, and return the exit code."""
    # After an error, a process of several exits here: see `_exit`.
    logging.basicConfig(format="%(message)s")  # before Orbax does it, with another format
    info = join()
    try:
        if args.processes not in (None, info.num_processes):
            if args.replay:
                raise UsageError(
                    f"--replay {args.replay} was recorded with -n {args.processes}, but {info.num_processes} processes "
                    f"were started; start {args.processes}"
                )
            raise UsageError(f"-n {args.processes}, but {info.num_processes} processes were started; leave -n out")
        train(args, Path(args.out) / name)
        return 0
    except (UsageError, jaxche.NonFiniteLossError, jaxche.PlanMismatchError) as error:
        return _exit_together(error, prints=info.process_id == 0)
    except jaxche.RankError as error:
        return _exit_together(error, prints=False)
    except (ValueError, ImportError, OSError) as error:
        if any(note.startswith("raised on rank") for note in getattr(error, "__notes__", ())):
            return _exit_together(error, prints=True)
        print_error("train", error)
        return _exit(_exit_code(error))
    except KeyboardInterrupt:
        return _exit(130)


def train(args: argparse.Namespace, folder: Path) -> None:
    """Train with each policy and write the files of the run."""
    if args.replay:
        replay(args)
        return
    if jax.process_index() == 0 and not args.dry_run:
        refuse_directory(folder, args.out, saves(args))
    task = load(args.task, args.batch_size, args.learning_rate, args.seed)
    start = task.init(args.seed)
    world = len(devices())
    epochs = args.epochs or task.epochs
    try:
        options = trainers(args, world)
        paces, step_ms = _paces(args, task, start, world)
    except ValueError as error:
        raise UsageError(str(error)) from error
    print_once(_header(task, start[0], epochs, paces, step_ms))

    results: list[Result] = []
    advice: dict[str, Advice] = {}
    for chosen in options:
        policy = chosen["policy"]
        trainer = Trainer(task.loss_fn, task.tx, pace_ms=paces, **chosen)
        trainer.updates_logged = True  # that line has arguments of a trainer, which are no options of this command
        averaged = f", averaging {chosen['average']}" if "average" in chosen else ""
        print_once(f"\npolicy {policy}{averaged}" if world > 1 else "\na plain training loop")
        if args.dry_run:
            _, history = trainer.fit(trainer.init(*start), task.data, dry_run=True)
            print_once(f"dry run: one batch on every replica and one merge went well; loss {history[0].loss:.4f}")
            continue
        part = folder / policy if args.compare else folder
        result, history = _train_policy(args, trainer, task, trainer.init(*start), epochs, part)
        results.append(result)
        with contextlib.suppress(ValueError):  # there is no noise yet, or a replica without a batch
            advice[result.policy] = history.advice()
    if args.dry_run:
        print_once("nothing was written")
    elif jax.process_index() == 0:
        _finish(args, task, folder, results, advice, paces, step_ms)


def _train_policy(
    args: argparse.Namespace, trainer: Trainer, task: Task, state: TrainerState, epochs: int, folder: Path
) -> tuple[Result, History]:
    """Train with one policy and write its files, unless an earlier start of this comparison did."""
    is_first, resumes_comparison = jax.process_index() == 0, args.compare and saves(args)
    if resumes_comparison and (result := _earlier_result(folder)):
        print_once(f"done by an earlier start, in {result.seconds:.1f} s")
        return result, History.from_json(folder / "history.jsonl", skip_damaged=True) if is_first else History()
    rates = trainer.measure_rates(state, task.data, seconds=_MEASURE_S)
    print_once(round_header(trainer.world_size))
    state, history = trainer.fit(
        state,
        task.data,
        epochs,
        callbacks=[Progress(trainer, task, epochs, folder)],
        progress=False,
        checkpoints=Checkpoints(folder / "checkpoints", args.checkpoint_every) if saves(args) else None,
        validation=task.test,
        metric_fn=task.metric_fn,
    )
    if state.epoch < epochs or state.pending_batches:  # after Ctrl-C `fit` returns the state that it reached
        raise KeyboardInterrupt
    result = result_from_history(trainer.policy.value, history, rates)
    if is_first:
        write_policy(folder, history, trainer.params(state))
        if resumes_comparison:
            write_atomic(folder / _DONE, json.dumps(result.to_dict()))
    process_group().barrier()
    return result, history


def _earlier_result(folder: Path) -> Result | None:
    """The result of a policy that an earlier start of this comparison finished, the same on every process."""
    saved = process_group().broadcast(read_json(folder / _DONE) if jax.process_index() == 0 else None)
    return None if saved is None else Result.from_dict(saved)


def _paces(args: argparse.Namespace, task: Task, start: Any, world: int) -> tuple[Any, tuple[float, ...]]:
    """The pace of each rank, or None, and the unpaced step times, if they were measured."""
    pace = args.pace
    if pace is None and not args.ratios and PACE_MS in os.environ:
        return None, ()
    os.environ.pop(PACE_MS, None)
    if pace is None:
        all_cpu = world > 1 and all(device.platform == "cpu" for device in devices())
        pace = "auto" if args.ratios or all_cpu else "none"
    if pace == "none":
        return None, ()
    probe = Trainer(task.loss_fn, task.tx, average="parameters", seed=args.seed)
    step_ms = tuple(1e3 / rate for rate in probe.measure_rates(probe.init(*start), task.data, seconds=_PROBE_S))
    if pace == "auto":
        return auto_paces(step_ms, args.ratios or default_ratios(world)), step_ms
    check_paces(pace, step_ms)
    return pace, step_ms


def _header(task: Task, params: Any, epochs: int, paces: Sequence[float] | None, step_ms: Sequence[float]) -> str:
    plural = "s" if epochs > 1 else ""
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    kinds = sorted({device.device_kind for device in devices()})
    found = f"{len(devices())} x {' and '.join(kinds)}"
    pace = ""
    if paces is not None:
        step = sum(step_ms) / len(step_ms)
        pace = f", paced to {per_rank(paces, '{:g}')} ms a step (the step itself takes {step:.1f} ms)"
    elif PACE_MS in os.environ:
        pace = f", paced by {PACE_MS}"
    return (
        f"task {task.name}: {TASKS[task.name][0]}\n"
        f"  {size:,} parameters, {epochs} epoch{plural} of {len(task.data)} batches of {task.data.batch_size}\n"
        f"  {found}{pace}"
    )


def _finish(
    args: argparse.Namespace,
    task: Task,
    folder: Path,
    results: Sequence[Result],
    advice: Mapping[str, Advice],
    paces: Sequence[float] | None,
    step_ms: Sequence[float],
) -> None:
    """Print the table and write ``result.json``."""
    print_once("\n" + table(results, task.metric))
    for policy, found in advice.items():
        line = f"\n  {found.line}" if found.line else ""
        print_once(f"\n{policy if args.compare else 'advice'}: {found.summary}{line}")
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
            "advice": {policy: found.rows() for policy, found in advice.items()},
            "arguments": {name: value for name, value in vars(args).items() if name != "words"},
            "command": ["jaxche", *args.words],
        },
    )
    files = "result.json, and a folder a policy with" if args.compare else "result.json,"
    print_once(f"\nwritten to {folder}:\n  {files} history.jsonl, history.png, params (an Orbax checkpoint)")
    if args.compare or len(devices()) == 1:
        print_once("next: jaxche simulate --ms 20,50, or your own script: jaxche launch -n 2 train.py")
    else:
        print_once(f"next: jaxche train --task {task.name} --compare sync,cadence,async")
    print_once(f"      jaxche report {shlex.quote(str(folder))}")


def _exit_together(error: Exception, prints: bool) -> int:
    """Exit after an error that all processes raised, with one code: the launcher restarts after some codes only."""
    if prints:
        print_error("train", error)
    code = max(process_group().all_gather(_exit_code(error)))
    if jax.process_count() > 1:
        jax.distributed.shutdown()
        if not prints:
            time.sleep(_GRACE_S)
    return _exit(code)


def _exit(code: int) -> int:
    # The exit handlers of Python would wait for the other processes.
    return exit_at_once(code) if jax.process_count() > 1 else code


def _exit_code(error: Exception) -> int:
    return 2 if isinstance(error, (ValueError, ImportError)) else 1
