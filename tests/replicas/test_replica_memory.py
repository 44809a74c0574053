"""What a round needs, counted by hand where that can be done."""

import types

import jax
import numpy as np
import optax

import jaxche
from jaxche.replicas import row_limit
from jaxche.replicas._replica import RoundMemory


def test_bytes_of_a_round(problem, devices):
    trainer = jaxche.Trainer(problem.loss, optax.adam(1e-2), replicas=devices[:2])
    state = trainer.init(problem.params)
    assert trainer.memory == []
    state, history = trainer.fit(state, problem.data, progress=False)
    rows = trainer.memory
    assert [row["rank"] for row in rows] == [0, 1]
    row, whole = rows[0], 4 * (5 * 2 + 2)
    assert row["parameters"] == whole
    assert row["optimizer state"] == 2 * whole + 4  # two moments and the count
    assert row["working copy"] == 3 * whole + 4 + 4 + 4 * 3  # with Adam's count, the index and three sums
    assert row["8 batches ahead"] == 8 * 8 * (5 + 2) * 4
    assert row["in all"] == sum(size for name, size in row.items() if name not in ("rank", "in all"))
    assert list(history.memory) == rows


def test_what_a_step_reads_of_the_start_is_not_counted_again(problem, devices):
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2], average="gradients")
    trainer.fit(trainer.init(problem.params), problem.data, dry_run=True)
    row, whole = trainer.memory[0], 4 * (5 * 2 + 2)
    assert row["parameters"] == whole
    assert row["working copy"] == whole + 4 + 4 * 3  # the accumulator, the index and three sums


def test_an_island_shares_it(problem, devices):
    strategy = jaxche.FullShard(min_size=1)
    island = strategy.mesh(devices[:2])
    alone = jaxche.Trainer(problem.loss, optax.sgd(1e-2, momentum=0.9), replicas=[devices[0]])
    shared = jaxche.Trainer(problem.loss, optax.sgd(1e-2, momentum=0.9), replicas=[island], strategy=strategy)
    rows = []
    for trainer in (alone, shared):
        trainer.fit(trainer.init(problem.params), problem.data, dry_run=True)
        rows.append(trainer.memory[0])
    whole, half = rows
    for name in ("parameters", "optimizer state", "8 batches ahead"):
        assert half[name] == whole[name] / 2
    small = 4 + 4 * 3  # the index and three sums, whole on both
    assert half["working copy"] - small == (whole["working copy"] - small) / 2


def test_larger_steps_get_the_memory_that_the_rest_leaves():
    memory = RoundMemory(rows=8, fixed=1000, of_rows=500, by_purpose={})

    def device(**found):
        return types.SimpleNamespace(process_index=jax.process_index(), memory_stats=lambda: found)

    def limit(*devices):
        return row_limit(memory, types.SimpleNamespace(devices=np.array(devices)))

    # Four fifths of the smaller device, without the fixed part.
    assert limit(device(bytes_limit=10_000), device(bytes_limit=5000)) == 8 * (4000 - 1000) / 500
    assert limit(device(bytes_limit=1300)) == 8  # steps of a batch are known to fit
    assert limit(device()) == float("inf")
