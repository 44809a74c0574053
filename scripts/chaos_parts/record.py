"""What the record of a run of chaos.py says: its batches, and the losses when its rounds are run again."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path

from chaos_parts.worker import BATCHES, problem

# Of a loss that processes compute and one that devices of a single process do, and of the first loss: Adam amplifies
# rounding where next to nothing is left of the loss.
ROUNDING, ROUNDING_OF_FIRST = 1e-3, 1e-3
MOST_RANKS = 6


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


def replayed(record: Path) -> tuple[float, int]:
    """The final loss of a record whose rounds are run again undisturbed, and how many rounds have another loss.

    Rounds of as many ranks are one replay, which begins with what the one before it ended with: after a merge all
    replicas are equal, their optimizers too.
    """
    import jax

    if jax.config.values["jax_num_cpu_devices"] != MOST_RANKS:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", MOST_RANKS)
    import jaxche

    history, last, final, other = jaxche.History.from_json(record), None, math.nan, 0
    for world, rounds in itertools.groupby(history, lambda info: len(info.counts)):
        trainer, params, data, loss = problem(world, replicas=jax.devices()[:world])
        state = trainer.init(params)
        if last is not None:
            devices = [jax.tree.leaves(local.params)[0].sharding for local in state.local_states]
            local_states = tuple(jax.device_put(last.local_states[0], device) for device in devices)
            # The view of this trainer, which has as many replicas.
            state = dataclasses.replace(
                last, local_states=local_states, che=state.che, row_shares=state.row_shares, _view=state._view
            )
        rounds = list(rounds)
        last, again = trainer.replay(state, data, rounds)
        least = ROUNDING_OF_FIRST * history[0].loss
        pairs = zip(rounds, again, strict=True)
        other += sum(not math.isclose(a.loss, b.loss, rel_tol=ROUNDING, abs_tol=least) for a, b in pairs)
        final = loss(trainer.params(last))
    return final, other
