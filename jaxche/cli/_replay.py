"""`jaxche train --replay`: repeats a recorded run and compares the parameters."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxche.averaging import path_names
from jaxche.cli._command import print_error
from jaxche.cli._progress import print_once
from jaxche.cli._run_folder import read_params
from jaxche.cli._settings import trainers
from jaxche.cli._tasks import load
from jaxche.distributed import PACE_MS, process_group
from jaxche.reports import History
from jaxche.sharding import devices
from jaxche.training import Trainer

# Arguments of this call, which the recorded ones do not replace.
_OF_THIS_CALL = ("words", "replay", "name", "out")
# Recorded arguments that a replay drops: it saves nothing and does not restart.
_DROPPED = {"pace": None, "checkpoint_every": None, "max_restarts": 0, "hang_timeout": None}


def recorded_arguments(args: argparse.Namespace) -> argparse.Namespace:
    """The arguments and the number of processes of the run in ``args.replay``."""
    folder = Path(args.replay)
    try:
        result = json.loads((folder / "result.json").read_text(encoding="utf8"))
        arguments, processes = dict(result["arguments"]), len(result["devices"])
    except (OSError, ValueError, TypeError, KeyError):
        raise ValueError(
            f"--replay {folder}: there is no result.json of a finished run; write e.g. --replay runs/first"
        ) from None
    if arguments.get("compare"):
        raise ValueError(f"--replay {folder} was a comparison; run one policy by itself, and replay that")
    _refuse_changed_ranks(folder)
    own = {name: value for name, value in vars(args).items() if name in _OF_THIS_CALL}
    own |= _DROPPED | {"processes": processes}
    return argparse.Namespace(**vars(args) | arguments | own)


def _refuse_changed_ranks(folder: Path) -> None:
    try:
        rounds = History.from_json(folder / "history.jsonl")
    except OSError:
        raise ValueError(
            f"--replay {folder}: there is no history.jsonl of its rounds; write e.g. --replay runs/first"
        ) from None
    if len(last := rounds.last_ranks) < len(rounds):
        before = rounds[-len(last) - 1]
        raise ValueError(
            f"--replay {folder}: the number of ranks changed from {len(before.counts)} to {len(last[0].counts)} at "
            f"round {last[0].round}, and a replay needs a constant number; write the folder of another run"
        )


def replay(args: argparse.Namespace) -> None:
    """Repeat the recorded rounds, on replicas of any speed."""
    folder = Path(args.replay)
    os.environ.pop(PACE_MS, None)
    task = load(args.task, args.batch_size, args.learning_rate, args.seed)
    record = History.from_json(folder / "history.jsonl")
    [options] = trainers(args, len(devices()))
    trainer = Trainer(task.loss_fn, task.tx, **options)
    print_once(f"replaying {len(record)} rounds of {folder} on {len(devices())} x {devices()[0].device_kind}")
    state, again = trainer.replay(trainer.init(*task.init(args.seed)), task.data, record)
    difference = None
    if jax.process_index() == 0:
        saved = read_params(folder / "params")
        difference = _first_difference(saved, trainer.params(state))
    process_group().barrier()
    if difference:
        print_error(
            "train",
            f"the replay of {folder} ended with other parameters: {difference}; other devices or versions round "
            f"otherwise. Its last loss is {again[-1].loss:.9g}, and the recorded one {record[-1].loss:.9g}",
        )
        raise SystemExit(1)
    print_once(f"the same parameters, bit for bit; last loss {again[-1].loss:.4f}")


def _first_difference(saved: Any, params: Any) -> str | None:
    for path, leaf in jax.tree.leaves_with_path(params):
        found: Any = saved
        for name in path_names(path):
            found = found[name]
        gap = np.abs(np.asarray(found, np.float64) - np.asarray(leaf, np.float64)).max()
        if gap or np.isnan(gap):
            return f"{jax.tree_util.keystr(path, simple=True, separator='/')} by up to {gap:.2g}"
    return None
