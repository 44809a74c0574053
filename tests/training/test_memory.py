"""What a round needs, counted by hand where that can be done."""

import jax
import optax

import jaxche


def test_bytes_of_a_round(problem, devices):
    trainer = jaxche.Trainer(problem.loss, optax.adam(1e-2), replicas=devices[:2])
    state = trainer.init(problem.params)
    assert trainer.memory(state) == []
    state, history = trainer.fit(state, problem.data, progress=False)
    rows = trainer.memory(state)
    assert [row["rank"] for row in rows] == [0, 1]
    row, whole = rows[0], 4 * (5 * 2 + 2)
    assert row["parameters"] == whole
    assert row["optimizer state"] == 2 * whole + 4  # two moments and the count
    assert row["working copy"] >= 3 * whole
    assert row["8 batches ahead"] == 8 * 8 * (5 + 2) * 4
    assert row["in all"] == sum(size for name, size in row.items() if name not in ("rank", "in all"))
    assert list(history.memory) == rows


def test_an_island_shares_it(problem, devices):
    island = jaxche.FullShard().mesh(devices[:2])
    alone = jaxche.Trainer(problem.loss, optax.sgd(1e-2, momentum=0.9), replicas=[devices[0]])
    shared = jaxche.Trainer(problem.loss, optax.sgd(1e-2, momentum=0.9), replicas=[island], strategy=jaxche.FullShard())
    kept = []
    for trainer in (alone, shared):
        state, _ = trainer.fit(trainer.init(problem.params), problem.data, dry_run=True)
        kept.append(trainer.memory(state)[0]["optimizer state"])
    assert jax.tree.leaves(kept) == [kept[0], kept[0] / 2]
