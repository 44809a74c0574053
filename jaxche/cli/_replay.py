"""`jaxche train --replay`: a run made again from its record."""

from __future__ import annotations

import argparse
import itertools
import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxche.averaging import path_names
from jaxche.cli._paint import complain
from jaxche.cli._settings import cadence, policies, trainer_options
from jaxche.cli._tasks import load
from jaxche.cli._watch import barrier, say
from jaxche.cli._write import read_params
from jaxche.distributed import PACE_MS
from jaxche.sharding import devices
from jaxche.training import History, Trainer

# What is of this call, whatever the recorded one had.
_OWN = ("words", "replay", "name", "out")
# What the recorded one had and a replay does not: it saves nothing, and another result would be another each time.
_NOT_AGAIN = {"pace": None, "checkpoint_every": None, "max_restarts": 0, "hang_timeout": None}


def recorded(args: argparse.Namespace) -> argparse.Namespace:
    """The arguments that a run was made with, and its number of processes.

    Args:
      args: with ``replay``, the folder of the run.

    Raises:
      ValueError: not the folder of one run that came to its end.
    """
    folder = Path(args.replay)
    try:
        result = json.loads((folder / "result.json").read_text(encoding="utf8"))
    except (OSError, ValueError):
        raise ValueError(
            f"--replay {folder}: there is no result.json of a run that came to its end; write e.g. --replay runs/first"
        ) from None
    if result["arguments"]["compare"]:
        raise ValueError(f"--replay {folder} was a comparison; run one policy by itself, and replay that")
    _refuse_changed_ranks(folder)
    own = {name: value for name, value in vars(args).items() if name in _OWN}
    own |= _NOT_AGAIN | {"processes": len(result["devices"])}
    return argparse.Namespace(**vars(args) | result["arguments"] | own)


def _refuse_changed_ranks(folder: Path) -> None:
    try:
        rounds = History.from_json(folder / "history.jsonl")
    except OSError:
        raise ValueError(
            f"--replay {folder}: there is no history.jsonl of its rounds; write e.g. --replay runs/first"
        ) from None
    for before, info in itertools.pairwise(rounds):
        if len(info.counts) != len(before.counts):
            raise ValueError(
                f"--replay {folder}: this run went on from {len(before.counts)} to {len(info.counts)} ranks at round "
                f"{info.round}, and a replay has one number of ranks; write the folder of a run that kept its own"
            )


def replay(args: argparse.Namespace) -> None:
    """Run the recorded rounds again, on replicas of any speed, and compare.

    Raises:
      SystemExit: with code 1, on rank 0: another result than the recorded one.
    """
    folder = Path(args.replay)
    os.environ.pop(PACE_MS, None)
    task = load(args.task, args.batch_size, args.learning_rate, args.seed)
    record = History.from_json(folder / "history.jsonl")
    (policy,) = policies(args)
    che = cadence(args, len(devices()))
    trainer = Trainer(task.loss_fn, task.tx, che=che, **trainer_options(args, policy))
    say(f"replaying {len(record)} rounds of {folder} on {len(devices())} x {devices()[0].device_kind}")
    state, again = trainer.replay(trainer.init(*task.init(args.seed)), task.data, record)
    different = None
    if jax.process_index() == 0:
        saved = read_params(folder / "params")
        different = _different(saved, trainer.params(state))
    barrier("replayed")
    if different:
        complain(
            "train",
            f"the replay of {folder} ended with other parameters: {different}; other devices or versions round "
            f"otherwise. Its last loss is {again[-1].loss:.9g}, and the recorded one {record[-1].loss:.9g}",
        )
        raise SystemExit(1)
    say(f"the same parameters, bit for bit; last loss {again[-1].loss:.4f}")


def _different(saved: Any, params: Any) -> str | None:
    for path, leaf in jax.tree.leaves_with_path(params):
        found: Any = saved
        for name in path_names(path):
            found = found[name]
        gap = np.abs(np.asarray(found, np.float64) - np.asarray(leaf, np.float64)).max()
        if gap or np.isnan(gap):
            return f"{jax.tree_util.keystr(path, simple=True, separator='/')} by up to {gap:.2g}"
    return None
