"""What a loss returns beside loss and scalars reaches the user: each row of each batch once, in order."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jaxche
from jaxche.replicas._results import of_step


def loss_fn(params, batch):
    found = batch["x"] @ params
    return jnp.mean((found - batch["y"]) ** 2), {"row": batch["row"], "found": [found], "bias": jnp.mean(found)}


ROWS, BATCH = 50, 4
X = np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32)
ARRAYS = {"x": X, "y": X[:, 0], "row": np.arange(ROWS)}
DATA = jaxche.Batches(ARRAYS, BATCH, seed=5)
PARAMS = np.float32([0.1, 0.2, -0.3])


class Kept(list):
    def __call__(self, info, batches):
        self.append((info, batches))

    @property
    def batches(self):
        return [batch for _, batches in self for batch in batches]


def make(devices, kept, replicas=3, loss=loss_fn, **options):
    tx = options.pop("tx", optax.sgd(0.05))
    return jaxche.Trainer(loss, tx, replicas=devices[:replicas], outputs=kept, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"policy": "cadence"},
        {"policy": "sync", "rows": "equal"},
        {"policy": "sync", "fleet": jaxche.VirtualFleet([20, 20, 50])},
        {"policy": "async"},
        {"replicas": 1},
    ],
    ids=["cadence", "equal rows", "rows by speed", "async", "one replica"],
)
def test_every_row_of_every_epoch_comes_once(options, devices):
    kept = Kept()
    one = make(devices, kept, **options)
    _, history = one.fit(one.init(PARAMS), DATA, epochs=3, progress=False)
    assert [info for info, _ in kept] == list(history)
    for _, found in kept:  # a replica out of time leaves its batches to the next round
        places = [(batch.epoch, batch.index, batch.rows.start) for batch in found]
        assert places == sorted(places)
    for epoch in range(3):
        rows = [batch for batch in kept.batches if batch.epoch == epoch]
        seen = np.concatenate([batch.values["row"] for batch in rows])
        assert sorted(seen.tolist()) == list(range(ROWS))
        for batch in rows:
            own = DATA.epoch(epoch)[batch.index]
            np.testing.assert_array_equal(batch.values["row"], own["row"][batch.rows])
            assert isinstance(batch.values["found"][0], np.ndarray)
    assert set(history[-1].metrics) == {"bias"}
    split = [batch for batch in kept.batches if batch.rows.stop - batch.rows.start < BATCH and batch.index != 12]
    assert bool(split) == ("fleet" in options)


def test_the_values_are_those_before_the_step(devices, close):
    kept = Kept()
    one = make(devices, kept, replicas=1, tx=optax.sgd(0.0))
    one.round(one.init(PARAMS), DATA, counts=(2,))
    for batch in kept.batches:
        close(batch.values["found"][0], DATA[batch.index]["x"] @ PARAMS)


@pytest.mark.parametrize("strategy", [jaxche.FullShard(), jaxche.NoShard()], ids=repr)
def test_islands_join_the_rows_of_their_devices(strategy, devices, close):
    kept, whole = Kept(), Kept()
    island = jaxche.Trainer(
        loss_fn, optax.sgd(0.05), replicas=[strategy.mesh(devices[:2])], strategy=strategy, outputs=kept
    )
    plain = make(devices, whole, replicas=1)
    for one in (island, plain):  # two devices do not divide the last batch
        one.fit(one.init(PARAMS), jaxche.Batches(jax.tree.map(lambda x: x[:11], ARRAYS), BATCH), progress=False)
    for mine, theirs in zip(kept.batches, whole.batches, strict=True):
        assert (mine.index, mine.rows) == (theirs.index, theirs.rows)
        close(mine.values, theirs.values)


def test_logits_alone_are_kept_with_model_state_and_with_flax(devices):
    kept = Kept()

    def with_state(params, batch, model_state):
        return jnp.mean(batch["x"] @ params), (batch["x"] @ params, {"seen": model_state["seen"] + 1})

    one = make(devices, kept, replicas=1, loss=with_state)
    one.round(one.init(PARAMS, {"seen": jnp.float32(0)}), DATA, counts=(1,))
    assert kept.batches[0].values.shape == (BATCH,)

    def flax_loss(model, batch):
        logits = model(batch["x"])
        return jnp.mean(logits**2), logits

    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    loss = jaxche.NNXLoss(model, flax_loss)
    one = make(devices, kept, replicas=1, loss=loss)
    one.round(one.init(loss.params, loss.model_state), DATA, counts=(1,))
    linen = nn.Dense(2)
    one = make(devices, kept, replicas=1, loss=jaxche.linen_loss(linen, flax_loss))
    one.round(one.init(linen.init(jax.random.key(0), X)["params"]), DATA, counts=(1,))
    assert [batch.values.shape for batch in kept.batches[1:]] == [(BATCH, 2)] * 2


def test_a_step_on_rows_of_two_batches_gives_each_its_own():
    first, second = of_step([((0, 3), slice(6, 8)), ((1, 0), slice(0, 1))], 3, {"a": jnp.arange(3)})
    assert (first.epoch, first.index, first.rows, first.values["a"].tolist()) == (0, 3, slice(6, 8), [0, 1])
    assert (second.epoch, second.index, second.rows, second.values["a"].tolist()) == (1, 0, slice(0, 1), [2])


def confusion(params, batch):
    return jnp.mean(batch["x"] @ params), jnp.zeros((2, 2))


def test_an_output_of_a_whole_batch_needs_whole_batches(devices):
    kept = Kept()
    one = make(devices, kept, loss=confusion, policy="sync")
    with pytest.raises(ValueError, match=r"outputs\S* has the shape \(2, 2\).*rows='equal'"):
        one.round(one.init(PARAMS), DATA)
    one = make(devices, kept, loss=confusion, policy="sync", rows="equal")
    one.round(one.init(PARAMS), DATA)
    assert [batch.values.shape for batch in kept.batches] == [(2, 2)] * 3
    strategy = jaxche.FullShard()
    island = jaxche.Trainer(
        confusion, optax.sgd(0.1), replicas=[strategy.mesh(devices[:2])], strategy=strategy, outputs=kept
    )
    with pytest.raises(ValueError, match=r"shape \(2, 2\).*leading axis of the rows"):
        island.round(island.init(PARAMS), DATA)


def test_what_is_not_kept_is_refused(devices, problem):
    def refuses(match, loss, outputs=None, **options):
        one = make(devices, outputs, replicas=1, loss=loss, **options)
        with pytest.raises(ValueError, match=match):
            one.round(one.init(PARAMS), DATA)

    refuses(r"returned float32\[4\] beside the loss.*outputs=lambda", lambda p, b: (p.sum(), b["x"] @ p))
    refuses(r"'row' has shape \(4,\).*outputs=lambda", loss_fn)
    refuses(r'number beside the loss.*return loss, {"accuracy"', lambda p, b: (p.sum(), p.max()), Kept())
    refuses(r"nothing to keep", lambda p, b: (p.sum(), {"max": p.max()}), Kept())
    refuses(r"outputs\['name'\] is 'x', not an array", lambda p, b: (p.sum(), {"a": p, "name": "x"}), Kept())
    with pytest.raises(ValueError, match=r"outputs=3 is not a function; write outputs=lambda"):
        make(devices, 3)
    staged = jaxche.Partitioned([lambda p, b: b["x"] @ p], lambda y, b: y.mean(), jaxche.Direct(), devices=devices[:1])
    with pytest.raises(ValueError, match=r"outputs= are those of a loss function"):
        jaxche.Trainer(staged, optax.sgd(0.1), replicas=[devices[:1]], outputs=Kept())


def test_a_dry_run_gives_nothing(devices):
    kept = Kept()
    one = make(devices, kept)
    one.fit(one.init(PARAMS), DATA, dry_run=True, progress=False)
    assert kept == []
