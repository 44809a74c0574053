"""An elastic run with policy="auto", some processes of which die and are replaced; run by ``jaxche launch``."""

import itertools
import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import optax
import resumed

import jaxche
from jaxche import ApplyPolicy
from jaxche.training import _plan, _preparation
from jaxche.training._state_dict import metadata

WORLD = 3
# Rounds of all processes before the next death, and before the end.
BETWEEN = 14
# Each process measures these for itself, and the table of a round has those of all.
LOCAL = ("sync_ms", "merge_ms")


class Problem(resumed.Problem):
    """The same in every process, and in the test: epochs long enough for some rounds of each policy."""

    def __init__(self):
        super().__init__(8 * 40)

    def trainer(self, replicas, wire="float32"):
        return jaxche.Trainer(self.loss, optax.adam(0.02), policy="auto", replicas=replicas, wire=wire)


def alternate():
    """Once replicas and merges are measured, exact sync and local steps in turns, whatever this machine measures."""
    choose = _plan.choose

    def chosen(now, shares, che, batch_rows, round, *rest):
        found = choose(now, shares, che, batch_rows, round, *rest)
        if found is now:  # not measured yet
            return now
        policy, joined = (ApplyPolicy.CADENCE, 0) if round // 5 % 2 else (ApplyPolicy.SYNC, che.world_size + 1)
        since = now.since if policy is now.policy else round
        return replace(found, policy=policy, joined=joined, active=(), since=since)

    _plan.choose = chosen


def main(folder, wire, *victims):
    # A stall of this machine cuts no round short.
    _plan._MIN_EXTRA_MS = 60_000.0
    alternate()
    jaxche.initialize(timeout_s=60)
    own, restart = jax.process_index(), int(os.environ["JAXCHE_RESTART"])
    # Processes whose devices have different memory: one of them takes its rows in several steps.
    _preparation.row_limit = lambda *_: 4.0 if own == 0 else 100.0
    problem, worlds, states = Problem(), [], {}
    trainer = problem.trainer(jaxche.devices(), wire)

    def callback(state, info):
        world = len(info.counts)
        worlds.append(world)
        states[info.round] = {name: value for name, value in metadata(state).items() if name not in LOCAL}
        if world < WORLD:
            time.sleep(0.3)  # so that a replacement comes in time
        deaths = sum(before == WORLD > after for before, after in itertools.pairwise(worlds))
        if worlds[-BETWEEN:] != [WORLD] * BETWEEN:
            return False
        if not restart and deaths < len(victims) and int(victims[deaths]) == own:
            signal.raise_signal(signal.SIGKILL)
        return deaths == len(victims)

    start = trainer.init(problem.params)
    state, history = trainer.fit(start, problem.data, 1000, callbacks=[callback], progress=False)
    result = {
        "params": jax.tree.map(np.ndarray.tolist, jax.device_get(trainer.params(state))),
        "history": history.to_json(),
        "states": states,
    }
    (Path(folder) / f"{own}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
