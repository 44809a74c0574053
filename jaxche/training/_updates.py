"""A log line that compares the updates of a run with those of one device on as many examples."""

from __future__ import annotations

import logging

from jaxche.cadence import TUNERS, ApplyPolicy
from jaxche.data import EPOCH_SIZE
from jaxche.replicas import are_accumulators
from jaxche.scaling import has_second_moments
from jaxche.training._hooks import Hook, Run
from jaxche.training._rounds import Rounds

_log = logging.getLogger("jaxche")


def expected_updates(trainer: Rounds, batches: int, size: int) -> tuple[int, bool]:
    """The updates of each replica for so many batches in epochs of ``size``, and whether the number is exact.

    Under ``sync`` an update joins batches of one epoch. Averaging parameters, the batches are dealt out, and a replica
    makes an update of each of its own; those of unequal speed make more or fewer than the mean. Averaging gradients in
    rounds, a round is one update, and rounds begin with the first cadence.
    """
    settings = trainer._settings
    if trainer.world_size == 1:
        return batches, True
    if trainer.policy is ApplyPolicy.SYNC and settings.average == "gradients":
        first, whole = batches % size, batches // size
        return -(-first // settings.joined) + whole * -(-size // settings.joined), True
    in_round = trainer.world_size
    if settings.average == "gradients" and settings.che is not None:
        in_round = settings.che.total_batches
    return -(-batches // in_round), False


def updates_line(trainer: Rounds, run: Run) -> str | None:
    """The line for a run that makes fewer updates than one device would; None where it makes as many, or for a stream.

    A scaling rule already makes the steps larger, and local steps that share batches are about as many. ``"auto"``
    takes such steps, or weighs the number of updates against their cost. If ``tx`` accumulates gradients, the steps are
    the mini-steps of ``optax.MultiSteps``.
    """
    world, left, settings = trainer.world_size, run.batches_left, trainer._settings
    shares_batches = settings.rows == "speed" and trainer.policy is not ApplyPolicy.SYNC
    shares_batches &= settings.che is not None and TUNERS[settings.che.tuner].chooses_round_ms
    if (left is None and run.size == EPOCH_SIZE) or (shares_batches and settings.average == "parameters"):
        return None
    batches, span = (run.size, "an epoch") if left is None else (left, "this fit")
    updates, exact = expected_updates(trainer, batches, run.size)
    if updates >= batches or settings.scaling is not None:
        return None
    step = "mini-step" if _accumulates(run) else "update"
    number = f"{'' if exact else 'about '}{updates:,} {step}{'s' if updates > 1 else ''}"
    return (
        f"{world} replicas: {number} of each in {span}, against {batches:,} on "
        f"one device with as many examples. For as many: {', or '.join(_choices(trainer, run, batches, updates))}. "
        "See docs/batches_and_steps.md"
    )


def _choices(trainer: Rounds, run: Run, batches: int, updates: int) -> list[str]:
    """The arguments with which this trainer would make as many updates, or larger ones."""
    settings, in_rounds = trainer._settings, trainer.policy is not ApplyPolicy.SYNC
    parts = trainer.world_size if in_rounds else settings.joined
    found = []
    if not settings.staged:
        words = 'policy="sync", ' if in_rounds else 'average="gradients", ' if settings.average == "parameters" else ""
        steps = "mini-steps" if _accumulates(run) else "updates"
        found.append(f"{words}joined_batches=1 (the {steps} of one device, each cut over all replicas)")
    if not (in_rounds and settings.average == "gradients"):
        examples = getattr(run.data, "batch_size", None)
        if not isinstance(examples, int):
            found.append(f"batches of 1/{parts} of the size, if not yet divided")
        elif examples >= parts:
            found.append(f"batch_size={examples // parts}, if {examples} is not yet divided")
    for name, limit in (("epochs", run.end.epochs), ("max_steps", run.end.steps)):
        if limit is not None:
            found.append(f"{name}={-(-batches * limit // updates):,}".replace(",", "_"))
    if not (settings.staged or trainer.policy is ApplyPolicy.AUTO or _accumulates(run)):
        rule = "AdamScale" if has_second_moments(run.state.local_states[0].opt_state) else "AdaScale"
        found.append(f"fewer and larger steps by scaling=jaxche.{rule}(), if the loss is a mean over examples")
    return found


def _accumulates(run: Run) -> bool:
    """Whether the optimizer makes an update of the gradients of several steps, as ``optax.MultiSteps`` does."""
    return any(are_accumulators(run.state.local_states[0].opt_state))


class UpdatesHook(Hook):
    """Logs the line at the start of a run, once per trainer."""

    def __init__(self, trainer: Rounds):
        self._trainer = trainer

    def on_start(self, run: Run) -> None:
        trainer = self._trainer
        if run.state.round or trainer.updates_logged or run.is_done:
            return
        trainer.updates_logged = True
        if (line := updates_line(trainer, run)) and trainer._group.is_leader:
            _log.warning("%s", line)
