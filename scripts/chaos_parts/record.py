"""What a run of chaos.py has written: its batches and rounds, its end, and the losses when its rounds are run again."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from chaos_parts.worker import BATCHES, problem

# Relative difference of the losses of several processes and of the same devices in one process.
ROUNDING = 1e-3
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


def ended(folder: Path) -> list[dict[str, Any]]:
    """How the run ended, as its ranks wrote it: one value if they agree."""
    return [json.loads(text) for text in {path.read_text() for path in folder.glob("end-*")}]


def trained(end: dict[str, Any]) -> list[tuple[int, int]]:
    """Every (epoch, index) that a run has trained on which ended there, in order."""
    pending = {(epoch, at) for epoch, start, stop in end["pending"] for at in range(start, stop)}
    found = [divmod(at, BATCHES) for at in range(end["epoch"] * BATCHES + end["cursor"])]
    return [one for one in found if one not in pending]


def replayed(record: Path, state_mb: float = 0.0) -> tuple[float, int]:
    """The final loss of a record whose rounds are run again undisturbed, and how many rounds have another loss.

    In a process of its own: this one starts others, and has no threads of JAX and no devices meanwhile.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as process:
        return process.submit(replay, record, state_mb).result()


def replay(record: Path, state_mb: float) -> tuple[float, int]:
    """What ``replayed`` returns, computed in this process.

    Rounds of as many ranks are one replay, which begins with what the one before it ended with: after a merge all
    replicas are equal, their optimizers too.
    """
    import jax

    if jax.config.values["jax_num_cpu_devices"] != MOST_RANKS:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", MOST_RANKS)
    import jaxche

    @functools.cache
    def of(world: int) -> Any:
        return problem(world, state_mb, replicas=jax.devices()[:world])

    history, last, final, other = jaxche.History.from_json(record), None, math.nan, 0
    for world, rounds in itertools.groupby(history, lambda info: len(info.counts)):
        trainer, params, data, loss = of(world)
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
        other += sum(not same(a.loss, b.loss) for a, b in zip(rounds, again, strict=True))
        final = loss(trainer.params(last))
    return final, other


def same(loss: float, again: float) -> bool:
    """Whether two losses are equal up to rounding."""
    return math.isclose(loss, again, rel_tol=ROUNDING)


def done_again(rounds: list[dict[str, Any]]) -> list[int]:
    """For each round of a process, the finished rounds that it does again: its own, or those of the process before."""
    found, newest, last = [], -1, {}
    for line in rounds:
        before = last.get(line["pid"], newest)
        found.append(max(0, before + 1 - line["round"]))
        last[line["pid"]] = newest = line["round"]
    return found
