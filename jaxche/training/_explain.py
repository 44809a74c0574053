"""What a trainer does, in one line each: its replicas and arguments, how it uses them and why, and what is faster."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from jaxche.cadence import DEAR, ApplyPolicy, VirtualFleet, better_than_cadence, is_long_merge, merge_share
from jaxche.messages import per_rank
from jaxche.sharding import NoShard, show_bytes
from jaxche.training._arguments import rule_text
from jaxche.training._plan import unit_of_shares
from jaxche.training._rounds import Rounds
from jaxche.training._state import TrainerState

# Replicas whose times differ by less are equally fast.
_ALIKE = 1.1


def summary(trainer: Rounds) -> str:
    """The replicas of a trainer, and the arguments by which they train."""
    settings, world_size, policy = trainer._settings, trainer.world_size, trainer.policy
    if world_size == 1:
        rules = ["a plain training loop"]
    else:
        rules = [f"policy={policy.value!r}"]
        if policy is not ApplyPolicy.AUTO:
            rules.append(f"average={settings.average!r}")
            rules += [f"merge={settings.merge!r}"] if settings.average == "parameters" else []
        rules += [f"wire={settings.wire!r}"] if settings.wire != "float32" else []
        rules += [f"overlap={settings.overlap:g}"] if settings.overlap else []
        rules += [f"groups={settings.groups.ranks}"] if settings.groups.ranks else []
        by_speed = policy in (ApplyPolicy.SYNC, ApplyPolicy.AUTO)  # by default
        rules += [f"rows={settings.rows!r}"] if (settings.rows == "speed") != by_speed else []
    rules += [f"strategy={settings.strategy}"] if settings.strategy != NoShard() else []
    rules += [f"ema={settings.ema:g}"] if settings.ema else []
    rules += [f"scaling={rule_text(settings.scaling.rule)}"] if settings.scaling else []
    return f"Trainer({', '.join([_replicas_text(trainer._engine.devices, settings.fleet), *rules])})"


def _replicas_text(replicas: Sequence[np.ndarray], fleet: VirtualFleet | None) -> str:
    """The replicas and their devices, e.g. ``"3 replicas on 2 x NVIDIA H100 and 1 x NVIDIA L4"``."""
    sizes = sorted({devices.size for devices in replicas})
    text = f"{len(replicas)} replica{'s' if len(replicas) > 1 else ''}"
    if fleet is not None:
        return f"{text} on a virtual clock, {per_rank(fleet.ms_per_batch, '{:g}')} ms a batch"
    if sizes[-1] > 1:
        text += f" of {' or '.join(map(str, sizes))} devices"
    kinds = Counter(device.device_kind for devices in replicas for device in devices.flat)
    return f"{text} on {' and '.join(f'{count} x {kind}' for kind, count in kinds.items())}"


def explanation(trainer: Rounds, state: TrainerState) -> str:
    """What the trainer does after this state, and why; see :meth:`Trainer.explain`."""
    state = trainer._with_own_choices(state)
    parts = [state.choice.reason if state.choice is not None else _given_policy(trainer, state)]
    if state.wire is not None and state.wire.reason:
        parts.append(state.wire.reason)
    elif advice := _cheaper_syncs(trainer, state) or _cheaper_merges(trainer, state):
        parts.append(advice)
    if advice := _better_policy(trainer, state):
        parts.append(advice)
    if state.che is not None and state.che.limit and trainer.policy not in (ApplyPolicy.SYNC, ApplyPolicy.AUTO):
        parts.append(state.che.limit)
    return "; ".join(parts)


def _given_policy(trainer: Rounds, state: TrainerState) -> str:
    """The policy as given, with its rounds and merges, in one line."""
    policy = f"policy={trainer.policy.value!r}, as given"
    if state.row_shares.rows:
        joined = state.row_shares.joined
        policy += f": rows {state.row_shares.rows} of {'a batch' if joined == 1 else f'{joined} batches'} by speed"
    elif trainer.policy is ApplyPolicy.SYNC:
        policy += f": {trainer._settings.joined} batches in a round"
    elif state.che is not None:
        policy += f": {state.che.batch_counts} batches in a round"
    if sent := trainer._engine.sent_bytes:
        policy += f"; a merge sends {show_bytes(sent)} of each replica, wire={trainer._engine.wire!r}"
    if trainer._engine.overlaps:
        policy += f", beside the first {trainer._engine.overlap:.0%} of the next round"
        if state.exchange_ms:
            policy += f", and measurements {state.exchange_ms:.3g} ms beside the last steps of this one"
    if trainer._engine.groups.ranks:
        groups = trainer._settings.groups.ranks
        policy += f"; groups {groups} merge {state.group_merges} times in a round, the last time with all"
    return policy


def _better_policy(trainer: Rounds, state: TrainerState) -> str:
    """What ``policy="auto"`` expects more progress of than of whole batches between merges, in one line."""
    settings, rows = trainer._settings, trainer._engine.batch_size
    is_sharded = state.stream is not None and trainer._has_peers  # whose rows may have to stay in their process
    if trainer.policy is not ApplyPolicy.CADENCE or settings.rows != "equal" or not settings.fits_auto or is_sharded:
        return ""
    if state.che is None or not rows:
        return ""
    return better_than_cadence(state.che, rows, unit_of_shares(settings.unit, rows))


def _cheaper_merges(trainer: Rounds, state: TrainerState) -> str:
    """Arguments that would make merges cheaper, in one line; empty if merges are cheap or none would help."""
    settings = trainer._settings
    if trainer._rules.policy_of(state) is ApplyPolicy.SYNC or settings.average != "parameters" or settings.staged:
        return ""
    if state.che is None or (share := merge_share(state.che)) < DEAR:
        return ""
    advice = []
    if settings.wire == "float32":
        advice.append("wire='int4' sends about 1/8 of the bytes")
    can_overlap = trainer.policy in (ApplyPolicy.CADENCE, ApplyPolicy.AUTO) and settings.scaling is None
    shares_batches = trainer.policy is ApplyPolicy.AUTO or settings.rows == "speed"  # in short rounds
    if can_overlap and not any(settings.overlaps) and (shares_batches or is_long_merge(state.che)):
        advice.append("overlap=0.5 hides up to half a round")
    return f"merges take {share:.0%} of the time: {', '.join(advice)}" if advice else ""


def _cheaper_syncs(trainer: Rounds, state: TrainerState) -> str:
    """The argument that makes the equally fast devices of a process one replica; empty if it would not help.

    ``"auto"`` gets it under local steps too, which it may take because a sync of a replica each is slow.
    """
    settings, shares, rows = trainer._settings, state.row_shares, trainer._engine.batch_size
    if trainer.policy not in (ApplyPolicy.SYNC, ApplyPolicy.AUTO) or not (shares.is_measured and rows):
        return ""
    if len(shares.ranks) != trainer.world_size:  # of another trainer
        return ""
    if settings.staged or settings.fleet is not None or any(settings.paces):
        return ""
    fixed, slope = shares.fit()
    found: dict[int, list[float]] = defaultdict(list)
    for rank, ms in zip(trainer._engine.order, fixed + slope * rows, strict=True):
        if settings.placements[rank].devices.size > 1:
            return ""
        found[settings.processes_of_ranks[rank][0]].append(ms)
    if any(max(own) > _ALIKE * min(own) for own in found.values()) or len(found) == len(fixed):
        return ""
    return "the replicas of a process are equally fast: replicas='process' makes one of them, which syncs faster"
