"""The weights in the record of a round are those that the merge program used, by every merge rule."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxche
from jaxche.averaging import MERGE_RULES

EXAMPLES = 8 * 64
COUNTS = [(1, 4, 2), (0, 2, 3), (3, 0, 0), (2, 2, 2)]


def loss_fn(params, batch):
    """Each step of SGD takes 1 in all from the parameters of its examples."""
    return params[batch].mean()


def used_weights(before, after, info, first):
    """The weights by which the steps of each replica, on the rows that follow those of the one before, were added."""
    moved = np.split((before - after)[first : first + info.examples], np.cumsum(info.rows)[:-1])
    return [part.sum() / max(n, 1) / info.alpha for part, n in zip(moved, info.counts, strict=True)]


def check(trainer, data, rounds):
    state, first, infos = trainer.init(jnp.zeros(EXAMPLES)), 0, []
    for counts in rounds:
        before = np.asarray(trainer.params(state))
        state, info = trainer.round(state, data, counts=counts)
        assert used_weights(before, np.asarray(trainer.params(state)), info, first) == pytest.approx(info.weights)
        first = (first + info.examples) % EXAMPLES  # no round crosses the end of the epoch
        infos.append(info)
    return infos


@pytest.mark.parametrize("rule", MERGE_RULES)
def test_of_unequal_counts_and_batches(rule, devices):
    sizes = [8, 2, 5, 1, 7, 3] * 6
    data = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    check(jaxche.Trainer(loss_fn, optax.sgd(1.0), merge=rule, replicas=devices[:3]), data, COUNTS)


@pytest.mark.parametrize("policy", ["sync", "cadence"])
@pytest.mark.parametrize("rule", MERGE_RULES)
def test_of_shares_of_batches(rule, policy, devices):
    data = jaxche.Batches(np.arange(EXAMPLES), 8, seed=None)
    fleet = jaxche.VirtualFleet([20, 20, 40, 80], sync_ms=11.0)
    options = {"policy": policy, "average": "parameters", "merge": rule, "rows": "speed", "fleet": fleet}
    infos = check(jaxche.Trainer(loss_fn, optax.sgd(1.0), replicas=devices[:4], **options), data, [None] * 8)
    assert len(set(infos[-1].rows)) > 1
    assert infos[-1].shares
