"""Codes of few bits against NumPy, and the means that replicas make of them."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxche.averaging import WIRES, exchange_means, gather_means, is_gathered, part_size
from jaxche.averaging._wire import BLOCK, coded_bytes, decode, encode, mean_of_rows

CODED = ("bfloat16", "int8", "int4")
LARGEST = {"int8": 127, "int4": 7}
FLOATS = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)
encoded = jax.jit(encode, static_argnums=(1, 2))
decoded = jax.jit(decode, static_argnums=(1, 2))


def bfloat16(x, cut):
    return (x.view(np.uint32) & 0xFFFF0000).view(np.float32) if cut else x.astype(ml_dtypes.bfloat16).astype(np.float32)


def small_float(x, wire, largest):
    """A positive number as a power of 4, or with three bits after the leading one; 0 if it is far below the largest."""
    if x == 0:
        return 0.0
    exponent, top = (int(np.floor(np.log2(np.float64(number)))) for number in (x, largest))
    if wire == "int4":
        # The exponents of powers of 4 are odd in float32, whose bias is 127.
        level, high = ((e - 1) // 2 * 2 + 1 for e in (exponent, top))
        return 2.0**level if level > high - 30 else 0.0
    kept = np.floor(x * 2.0 ** (3 - exponent)) * 2.0 ** (exponent - 3)

    def steps(x, e):
        return 8 * e + int(np.floor(x * 2.0 ** (3 - e))) - 8

    return kept if steps(x, exponent) > steps(largest, top) - 255 else 0.0


def twin(x, wire, cut=False):
    """What is left of a vector that was sent, number by number."""
    if wire == "float32":
        return x
    if wire == "bfloat16":
        return bfloat16(x, cut)
    sent = np.zeros_like(x)
    for first in range(0, len(x), BLOCK):
        block = x[first : first + BLOCK]
        exact = np.float32(np.abs(block).max() / np.float32(LARGEST[wire]))
        if cut and (block >= 0).all():
            sent[first : first + BLOCK] = [small_float(one, wire, block.max()) for one in block]
            continue
        if exact < np.finfo(np.float32).tiny:
            continue
        scale = bfloat16(np.array([exact]), cut)[0]
        codes = (np.trunc if cut else np.round)(np.float64(block) / np.float64(scale))
        codes = codes.clip(-LARGEST[wire], LARGEST[wire])
        sent[first : first + BLOCK] = codes.astype(np.float32) * scale
    return sent


def sent(x, wire, cut=False):
    data = encoded(x, wire, cut)
    assert data.dtype == jnp.uint8
    assert data.size == coded_bytes(x.size, wire)
    return np.asarray(decoded(data, x.size, wire))


@pytest.mark.slow
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("size", [0, 1, 127, 128, 129, 1000])
def test_codes_are_those_of_the_twin(wire, size, cut):
    rng = np.random.default_rng(size)
    x = (rng.normal(size=size) * 10.0 ** rng.integers(-8, 8, size)).astype(np.float32)
    for numbers in (x, np.abs(x), x**2):
        np.testing.assert_array_equal(sent(numbers, wire, cut), twin(numbers, wire, cut))


def test_bytes_are_counted_with_their_scales():
    assert {wire: coded_bytes(1000 * BLOCK, wire) / (1000 * BLOCK) for wire in WIRES} == {
        "float32": 4,
        "bfloat16": 2,
        "int8": 1 + 2 / 128,
        "int4": 0.5 + 2 / 128,
    }
    assert coded_bytes(1, "int4") == 64 + 2  # whole blocks


@settings(max_examples=60)
@given(st.lists(FLOATS, min_size=150, max_size=150), st.sampled_from(["int8", "int4"]), st.booleans())
def test_each_number_is_off_by_less_than_a_part_of_the_largest_of_its_block(numbers, wire, cut):
    x = np.array(numbers, np.float32)
    x[::BLOCK] = -np.abs(x[::BLOCK]) - 2.0**-100  # so that blocks have a negative number
    off = np.abs(x.astype(np.float64) - sent(x, wire, cut))
    for first in range(0, 150, BLOCK):
        block = slice(first, first + BLOCK)
        largest = np.abs(x[block]).max()
        bound = largest / LARGEST[wire] * (1 + 2**-7) * (1 if cut else 0.5)
        assert off[block].max() <= max(bound, (LARGEST[wire] + 1) * np.finfo(np.float32).tiny)


@settings(max_examples=30)
@given(st.lists(FLOATS, min_size=150, max_size=150), st.sampled_from(CODED))
def test_what_is_cut_off_has_the_sign_of_its_number(numbers, wire):
    """So moments of at least 0 stay at least 0; and those of no magnitude are lost, down to a range of 4 to the 14."""
    x = np.array(numbers, np.float32)
    cut = sent(x, wire, cut=True)
    assert (np.abs(cut) <= np.abs(x)).all()
    assert (np.sign(cut) * np.sign(x) >= 0).all()
    x = np.abs(x)
    cut = sent(x, wire, cut=True)
    assert (cut <= x).all()
    largest = np.concatenate([np.full(BLOCK, x[:BLOCK].max()), np.full(150 - BLOCK, x[BLOCK:].max())])
    near = (x > largest * 4.0**-13) & (x > 2.0**-120)
    assert (cut[near] > x[near] / (4 if wire == "int4" else 1.125)).all()


@settings(max_examples=20)
@given(st.integers(0, 2**31), st.sampled_from(CODED))
def test_what_was_sent_and_the_rest_are_the_sum_of_all_changes(seed, wire):
    rng, rest, total, arrived = np.random.default_rng(seed), np.zeros(200, np.float32), 0, 0
    for _ in range(20):
        change = rng.normal(size=200).astype(np.float32) * np.float32(10.0 ** rng.integers(-3, 3))
        due = rest + change
        rest = due - sent(due, wire)
        total, arrived = total + change.astype(np.float64), arrived + (due - rest).astype(np.float64)
    np.testing.assert_allclose(arrived + rest, total, atol=1e-3 * np.abs(total).max())


@pytest.mark.parametrize("wire", CODED)
def test_zeros_stay_and_numbers_of_other_blocks_change_nothing(wire):
    x = np.zeros(3 * BLOCK, np.float32)
    x[BLOCK] = 3.0
    np.testing.assert_array_equal(sent(x, wire), twin(x, wire))
    assert np.flatnonzero(sent(x, wire)).tolist() == [BLOCK]


@pytest.mark.parametrize("wire", ["int8", "int4"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("others", [0, 1, -1])
def test_what_is_not_finite_changes_no_other_number(wire, bad, cut, others):
    x = np.full(2 * BLOCK, others, np.float32)
    x[3] = bad
    found = sent(x, wire, cut)
    assert np.flatnonzero(np.isnan(found)).tolist() == [3]
    np.testing.assert_allclose(np.delete(found[:BLOCK], 3), others, rtol=2**-6)
    np.testing.assert_array_equal(found[BLOCK:], sent(np.full(BLOCK, others, np.float32), wire, cut))


@pytest.mark.parametrize("wire", CODED)
def test_what_was_not_finite_leaves_nothing_to_send(wire):
    x = np.ones((3, 200), np.float32)
    x[1, 150] = np.inf
    none = jnp.zeros((3, part_size(200, 3)))

    def body(change, part):
        return exchange_means([[change]], jnp.ones(3), part, "r", wire)

    found, part = replicas(body, x, none)
    assert np.flatnonzero(~np.isfinite(found.means[0][0]).all(0)).tolist() == [150]
    assert np.isfinite(part).all()


@pytest.mark.parametrize("wire", ["int8", "int4"])
def test_numbers_near_the_ends_of_float32(wire):
    largest = np.float32(3e38)
    assert abs(sent(np.full(5, largest), wire)[0] / largest - 1) < 2**-7
    assert (sent(np.full(5, np.float32(1e-40)), wire) == 0).all()  # sent later, with more


def joined(found):
    """Pieces of vectors as whole vectors."""
    return type(found)(*([jnp.concatenate(pieces) for pieces in one] for one in found))


def replicas(body, *arrays):
    return jax.jit(jax.vmap(body, axis_name="r"))(*arrays)


@pytest.mark.slow
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("count", [2, 3])
def test_the_gathered_mean_is_the_same_everywhere_and_that_of_the_codes(wire, count):
    rng = np.random.default_rng(count)
    changes, moments = (rng.normal(size=(count, size)).astype(np.float32) for size in (300, 150))
    moments, weights = np.abs(moments), np.array([3.0, 1.0, 0.0][:count], np.float32)
    changes[weights == 0] = np.nan  # a replica of weight 0
    exact = np.arange(count * 2, dtype=np.float32).reshape(count, 2)

    def body(change, moment, exact, weight):
        found, sums = gather_means([[change[:256], change[256:]], [moment]], exact, weight, "r", wire)
        return joined(found), sums

    found, sums = replicas(body, changes, moments, exact, weights)
    np.testing.assert_array_equal(sums, np.broadcast_to(exact.sum(0), sums.shape))
    for mean, x, own, cut in zip(found.means, (changes, moments), found.sent, (False, True), strict=True):
        coded = np.stack([twin(row, wire, cut) for row in np.nan_to_num(x)])
        np.testing.assert_array_equal(mean, np.broadcast_to(mean[0], mean.shape))
        np.testing.assert_allclose(mean[0], weights @ coded / weights.sum(), rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(own[0], coded[0])


@pytest.mark.parametrize("wire", CODED)
def test_exchanged_means_and_their_rest_are_the_means_of_the_codes(wire):
    rng, count = np.random.default_rng(5), 3
    changes, moments = (rng.normal(size=(count, size)).astype(np.float32) for size in (700, 150))
    moments, weights = np.abs(moments), np.array([2.0, 1.0, 4.0], np.float32)
    sizes = [part_size(700, count), part_size(150, count)]
    before = np.abs(rng.normal(size=(count, sum(sizes)))).astype(np.float32) * np.float32(0.01)

    def body(change, moment, part):
        found, part = exchange_means([[change[:256], change[256:]], [moment]], weights, part, "r", wire)
        return joined(found), part

    found, part = replicas(body, changes, moments, before)
    for mean, x, size, own, k in zip(found.means, (changes, moments), sizes, found.sent, range(2), strict=True):
        np.testing.assert_array_equal(mean, np.broadcast_to(mean[0], mean.shape))
        padded = np.pad(x, ((0, 0), (0, count * size - x.shape[1])))
        coded = np.stack([twin(row, wire, cut=k == 1) for row in padded])
        np.testing.assert_array_equal(own[1], coded[1][: x.shape[1]])
        parts = slice(0, sizes[0]) if k == 0 else slice(sizes[0], None)
        wanted = (weights @ coded / weights.sum() + before[:, parts].ravel())[: x.shape[1]]
        left = np.asarray(part)[:, parts].ravel()[: x.shape[1]]
        np.testing.assert_allclose(mean[0] + left, wanted, rtol=1e-5, atol=1e-6)
        assert np.abs(left).max() > 0
    assert (np.asarray(found.means[1]) >= 0).all()
    assert (np.asarray(part)[:, sizes[0] :] >= 0).all()


def test_a_number_just_below_a_code_does_not_grow():
    """Its quotient by the scale is rounded up to the code."""
    scales = np.arange(129, 256, dtype=np.float32) / 128
    x = np.zeros((scales.size, BLOCK), np.float32)
    x[:, 0], x[:, 1] = -127 * scales, np.nextafter(3 * scales, 0)
    assert (sent(x.ravel(), "int8", cut=True).reshape(x.shape)[:, 1] <= x[:, 1]).all()


def test_rows_of_weight_zero_add_nothing():
    rows = jnp.stack([encoded(np.full(5, x, np.float32), "int8", False) for x in (1.0, np.nan)])
    found = jax.jit(partial(mean_of_rows, size=5, wire="int8"))(rows, jnp.array([2.0, 0.0]))
    np.testing.assert_allclose(found, 1, rtol=2**-7)


def test_the_way_with_fewer_bytes_is_taken():
    """Codes received of one vector: n - 1 of each replica, or 2 (n - 1) / n in two exchanges."""
    for count in range(2, 9):
        assert is_gathered(count) == (count - 1 <= 2 * (count - 1) / count)
