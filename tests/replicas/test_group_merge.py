"""Merges of replicas of one process within a round: their means, their order, and the failure of one."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxche.replicas import Carry, Correction, GroupPause, group_pauses, merge_carries
from jaxche.replicas._group_merge import GroupMerge


def carry(device, seed):
    """A carry like those of a local step; every array has a leading axis of 1."""
    rng = np.random.default_rng(seed)
    one = Carry(
        model_state={
            "norm": {"mean": rng.normal(size=(1, 3)), "var": rng.uniform(1, 2, (1, 3))},
            "seen": np.int32([seed]),
        },
        index=np.uint32(seed),
        sums=rng.normal(size=(1, 2)),
        params={"w": rng.normal(size=(1, 4, 2)), "half": jnp.asarray(rng.normal(size=(1, 5)), jnp.bfloat16)},
        opt_state=({"mu": rng.normal(size=(1, 4, 2)), "count": np.int32([seed])},),
    )
    wide = jax.tree.map(lambda x: np.float32(x) if x.dtype == np.float64 else x, one)
    return jax.device_put(wide, device)


@pytest.mark.parametrize("average_moments", [True, False])
def test_the_mean_is_that_of_a_slow_twin_on_the_devices_of_each(devices, same, average_moments):
    carries, steps = [carry(devices[i], i) for i in range(3)], [3, 0, 5]
    merged = merge_carries(carries, steps, average_moments)

    def mean(*leaves):
        return (3 * np.float64(leaves[0]) + 5 * np.float64(leaves[2])) / 8

    for one, before, device in zip(merged, carries, devices, strict=False):
        jax.tree.map(lambda x, device=device: x.devices() == {device} or pytest.fail("another device"), one)
        w, half = (mean(*(c.params[name] for c in carries)) for name in ("w", "half"))
        np.testing.assert_allclose(one.params["w"], w, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(np.float32(one.params["half"]), half, rtol=2**-7)
        assert one.params["half"].dtype == jnp.bfloat16
        norm = [c.model_state["norm"] for c in carries]
        means = mean(*(c["mean"] for c in norm))
        spread = mean(*(np.float64(c["var"]) + (np.float64(c["mean"]) - means) ** 2 for c in norm))
        np.testing.assert_allclose(one.model_state["norm"]["mean"], means, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(one.model_state["norm"]["var"], spread, rtol=1e-5)
        mu = mean(*(c.opt_state[0]["mu"] for c in carries)) if average_moments else before.opt_state[0]["mu"]
        np.testing.assert_allclose(one.opt_state[0]["mu"], mu, rtol=1e-6, atol=1e-6)
        # Counts, sums and random numbers stay those of the replica.
        same(
            (one.model_state["seen"], one.opt_state[0]["count"]),
            (before.model_state["seen"], before.opt_state[0]["count"]),
        )
        same((one.index, one.sums), (before.index, before.sums))
    same([c.params for c in merged[1:]], [merged[0].params] * 2)


def test_equal_numbers_stay_as_they_are_and_one_of_no_weight_spoils_nothing(devices, same):
    equal = [jax.device_put(carry(devices[0], 0), device) for device in devices[:3]]
    bad = equal[2]._replace(params=jax.tree.map(lambda x: x * jnp.nan, equal[2].params))
    merged = merge_carries([equal[0], equal[1], bad], [3, 7, 0], True)
    same([one.params for one in merged], [equal[0].params] * 3)


def test_replicas_that_share_a_device_get_arrays_of_their_own(devices):
    merged = merge_carries([carry(devices[0], i) for i in range(2)], [1, 1], True)
    pointers = [{x.unsafe_buffer_pointer() for x in jax.tree.leaves((one.params, one.opt_state))} for one in merged]
    assert pointers[0].isdisjoint(pointers[1])


def test_members_are_weighted_by_the_steps_since_the_last_merge(devices):
    merge, found = GroupMerge(2, average_moments=True), {}

    def member(place):
        own = carry(devices[place], place)
        for steps in ((4, 1), (4, 3)):
            params = jax.tree.map(functools.partial(jnp.full_like, fill_value=steps[place]), own.params)
            own = merge.join(place, own.params, own._replace(params=params), steps[place])
            found.setdefault(place, []).append(float(own.params["w"].ravel()[0]))

    threads = [threading.Thread(target=member, args=(place,)) for place in range(2)]
    [thread.start() for thread in threads]
    [thread.join(60) for thread in threads]
    assert found[0] == found[1]
    # (4·4 + 1·1) / 5; then only the second took steps, so it is as that one is.
    assert found[0] == pytest.approx([3.4, 3.0])


def test_no_one_waits_for_a_member_that_failed(devices):
    merge, one, found = GroupMerge(2, average_moments=True), carry(devices[0], 0), []
    waiting = threading.Thread(target=lambda: found.append(merge.join(0, one.params, one, 3)), daemon=True)
    waiting.start()
    merge.leave()
    waiting.join(20)
    assert found
    assert found[0] is one
    assert merge.join(0, one.params, one, 4) is one


def test_pauses_are_at_the_same_part_of_the_round():
    pauses = group_pauses([(0, 1), (2, 3)], (10, 4, 3, 0), 4, True, [None] * 4)
    assert [[pause.after for pause in own] for own in pauses] == [[3, 5, 8], [1, 2, 3], [], []]
    assert len({id(pause.merge) for own in pauses for pause in own}) == 1
    assert [own[0].member for own in pauses[:2]] == [0, 1]


@pytest.mark.parametrize("part", [0.0, 0.2, 0.35, 0.5])
def test_members_take_in_a_merge_in_flight_between_the_same_merges(part):
    counts = (20, 9, 4)
    corrections = [Correction(int(part * n), None, i) for i, n in enumerate(counts)]
    pauses = group_pauses([(0, 1, 2)], counts, 4, True, corrections)
    kinds = [[isinstance(pause, GroupPause) for pause in own] for own in pauses]
    assert kinds[0] == kinds[1] == kinds[2]
    assert sum(kinds[0]) == 3
    for own in pauses:
        assert [pause.after for pause in own] == sorted(pause.after for pause in own)


@pytest.mark.parametrize("averages", [True, False])
def test_flags_of_the_optimizer_go_by_weight_as_in_a_merge_of_all_replicas(averages, devices):
    values, steps = [[True, False, True], [False, True, True], [False, False, True]], [3.0, 1.0, 1.0]
    carries = [
        Carry(
            None,
            jax.device_put(jnp.uint32(0), device),
            jax.device_put(jnp.zeros((1, 2)), device),
            jax.device_put({"w": jnp.zeros((1, 2))}, device),
            jax.device_put({"on": jnp.array([flags]), "m": jnp.zeros((1, 2))}, device),
        )
        for flags, device in zip(values, devices, strict=False)
    ]
    for carry, one in zip(carries, merge_carries(carries, steps, averages), strict=True):
        flags = one.opt_state["on"]
        assert (flags.dtype, flags.devices()) == (bool, carry.opt_state["on"].devices())
        assert flags.tolist() == ([[True, False, True]] if averages else carry.opt_state["on"].tolist())


def test_infinite_numbers_stay_infinite_as_in_a_weighted_sum(devices):
    values = [(jnp.inf, jnp.inf), (jnp.inf, 1.0), (1.0, jnp.inf), (1.0, 2.0)]
    carries = [
        Carry(
            None,
            jnp.uint32(0),
            jnp.zeros((1, 2)),
            {"w": jnp.zeros((1, 2))},
            {"best": jnp.array([[v[i] for v in values]])},
        )
        for i in range(2)
    ]
    for one in merge_carries(carries, [1.0, 1.0], True):
        assert one.opt_state["best"].tolist() == [[jnp.inf, jnp.inf, jnp.inf, 1.5]]
