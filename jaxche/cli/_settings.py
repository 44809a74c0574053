"""From arguments to a trainer's settings, checked before any process starts."""

from __future__ import annotations

import argparse
from typing import Any

from jaxche.cadence import ApplyPolicy, ElChe
from jaxche.scaling import AdamScale, AdaScale, LinearScale, SqrtScale
from jaxche.training import DEFAULT_CADENCE

# Rules that need no arguments, by the words for them.
SCALING: dict[str, Any] = {
    "adamscale": AdamScale(),
    "adascale": AdaScale(),
    "linear": LinearScale(),
    "sqrt": SqrtScale(),
}


def policies(args: argparse.Namespace) -> tuple[str, ...]:
    """The policies to run, in turn."""
    return args.compare or (args.policy or ApplyPolicy.CADENCE.value,)


def cadence(args: argparse.Namespace, world_size: int) -> ElChe | None:
    """The cadence the arguments ask for; None leaves it to the trainer.

    Raises:
      ValueError: a knob out of range.
    """
    names = ("anchor", "overhead_target", "tuner", "max_batch_diff")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if world_size == 1 or not given:
        return None
    return ElChe(world_size=world_size, **(DEFAULT_CADENCE | given))


def trainer_options(args: argparse.Namespace, policy: str) -> dict[str, Any]:
    """The trainer's arguments for one policy.

    Raises:
      ValueError: settings that cannot act together.
    """
    average = args.average or ("gradients" if policy == ApplyPolicy.SYNC else "parameters")
    rules = {"merge": args.merge, "opt_state": args.opt_state}
    given = {name: value for name, value in rules.items() if value is not None}
    if average == "gradients":
        if given and not args.compare:
            flags = " and ".join("--" + name.replace("_", "-") for name in given)
            raise ValueError(
                f"{flags} acts on averaged parameters, but policy {policy} averages gradients here; "
                "leave it out or add --average parameters"
            )
        # In a comparison they are for the other policies.
        given = {}
    scaling = {"scaling": SCALING[args.scaling]} if args.scaling else {}
    if args.scaling == "adamscale" and given.get("opt_state") == "reset":
        raise ValueError(
            "--scaling adamscale reads optimizer states: leave out --opt-state reset or write --scaling adascale"
        )
    return {"policy": policy, "average": average, "seed": args.seed} | scaling | given
