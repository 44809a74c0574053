"""The noise scale: unbiased by simulation, equal results on every axis, skipped steps, bad input."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxche.averaging import weighted_mean
from jaxche.scaling import AdaScale, noise_scale, update_from_one

pytestmark = pytest.mark.usefixtures("strict_promotion")

DIM = 20


under_jit = jax.jit(noise_scale.update)


class Twin:
    """The same in plain NumPy, float64, one group, one loop."""

    def __init__(self, base):
        self.base, self.sqr_sum, self.var_sum, self.unbias = base, 0.0, 0.0, 0.0
        self.biased, self.previous = False, None

    def update(self, grads, sizes):
        grads, sizes = np.asarray(grads, np.float64), np.asarray(sizes, np.float64)
        if not np.all(np.isfinite(grads)):
            self.previous = None  # what comes next has no gradient before it
            return
        total, r = sizes.sum(), len(sizes)
        if r == 1:
            previous, self.previous, self.biased = self.previous, grads[0], True
            if previous is None:
                return
            grads, sizes, total, r = np.stack([previous, grads[0]]), np.repeat(sizes, 2), 2 * total, 2
        else:
            if self.biased:
                self.sqr_sum = self.var_sum = self.unbias = 0.0
            self.biased, self.previous = False, None
        mean = sizes @ grads / total
        trace = sum(b * np.sum((g - mean) ** 2) for b, g in zip(sizes, grads, strict=True)) / (r - 1)
        theta = 0.999 ** (total / self.base)
        self.sqr_sum = theta * self.sqr_sum + (1 - theta) * (mean @ mean - trace / total)
        self.var_sum = theta * self.var_sum + (1 - theta) * trace / self.base
        self.unbias = theta * self.unbias + (1 - theta)

    @property
    def sqr(self):
        return max(self.sqr_sum / self.unbias, 0.0) if self.unbias else 1.0

    @property
    def var(self):
        return max(self.var_sum / self.unbias, 1e-6) if self.unbias else 1e-6


@settings(max_examples=20)
@given(st.lists(st.lists(st.integers(1, 64), min_size=1, max_size=4), min_size=1, max_size=6), st.integers(0, 10_000))
def test_matches_the_twin_through_any_history(history, seed):
    """Numbers of contributors come and go; now and then a gradient is not finite."""
    rng = np.random.default_rng(seed)
    noise, twin = noise_scale.init(jnp.zeros(5), base_batch_size=16, differenced=True), Twin(16)
    for sizes in history:
        grads = rng.normal(size=(len(sizes), 5)).astype(np.float32) + 0.5
        if rng.random() < 0.15:
            grads[0, 2] = rng.choice([np.nan, np.inf])
        noise = under_jit(noise, jnp.asarray(grads), jnp.array(sizes))
        twin.update(grads, sizes)
        assert float(noise.sqr) == pytest.approx(twin.sqr, rel=2e-4, abs=2e-5)
        assert float(noise.var) == pytest.approx(twin.var, rel=2e-4, abs=2e-5)
        assert float(noise.unbias) == pytest.approx(twin.unbias, rel=1e-4)
        assert bool(noise.biased) == twin.biased


def draws(sizes, seed=0, n=20_000, dim=16):
    """Gradients around a known truth: ``[n, R, dim]``, the squared norm and the trace per example."""
    rng = np.random.default_rng(seed)
    mean, sigma = rng.normal(size=dim) * 0.3, rng.uniform(0.5, 3.0, dim)
    spread = sigma / np.sqrt(np.array(sizes))[:, None]
    grads = mean + rng.normal(size=(n, len(sizes), dim)) * spread
    return jnp.asarray(grads, jnp.float32), mean @ mean, np.sum(sigma**2)


def raw(noise):
    """Estimates before clipping, which would bias their mean."""
    return noise.sqr_sum[..., 0] / noise.unbias, noise.var_sum[..., 0] / noise.unbias * noise.base_batch_size


@pytest.mark.parametrize(("sizes", "adaptdl_off"), [((8, 32), 0.56), ((4, 8, 32), 0.99), ((16, 16, 16, 16), 0.0)])
def test_unbiased_for_unequal_batches(sizes, adaptdl_off):
    grads, true_sqr, true_trace = draws(sizes)
    noise = noise_scale.init(jnp.zeros(grads.shape[-1]))
    sqr, trace = raw(jax.jit(jax.vmap(lambda g: noise_scale.update(noise, g, sizes)))(grads))
    assert float(jnp.mean(trace)) == pytest.approx(true_trace, rel=0.01)
    assert float(jnp.mean(sqr)) == pytest.approx(true_sqr, rel=0.02)

    # What AdaptDL computes from the same gradients when told their mean batch.
    count = len(sizes)
    local = jnp.mean(jnp.sum(grads**2, -1), -1)
    total = jnp.sum(jnp.mean(grads, 1) ** 2, -1)
    adaptdl = jnp.mean((local - total) / (count - 1)) * sum(sizes)
    assert float(adaptdl) / true_trace - 1 == pytest.approx(adaptdl_off, abs=0.02)


def test_unbiased_for_any_weights_of_the_mean():
    """The merge of local SGD weighs replicas by steps, not by examples: no second mean is needed."""
    sizes, weights = jnp.float32([4, 8, 32]), jnp.float32([5, 1, 2])
    grads, true_sqr, true_trace = draws((4, 8, 32), seed=1)
    noise = noise_scale.init(jnp.zeros(grads.shape[-1]))

    def one(g):
        parts = jax.vmap(lambda *x: noise_scale.local_sums(noise, *x))(g, sizes, weights)
        sums = jax.tree.map(lambda x: x.sum(0), parts)
        return noise_scale.update_from_sums(noise, sums, jnp.sum(weights[:, None] * g, 0) / weights.sum())

    sqr, trace = raw(jax.jit(jax.vmap(one))(grads))
    assert float(jnp.mean(trace)) == pytest.approx(true_trace, rel=0.01)
    assert float(jnp.mean(sqr)) == pytest.approx(true_sqr, rel=0.03)


def test_critical_batch_size_finds_the_truth():
    grads, true_sqr, true_trace = draws((4, 8, 32), n=4000)
    noise = noise_scale.init(jnp.zeros(grads.shape[-1]), base_batch_size=8)
    step = jax.jit(lambda noise, g: (noise_scale.update(noise, g, [4, 8, 32]), None))
    noise, _ = jax.lax.scan(step, noise, grads)
    assert float(noise.critical_batch_size) == pytest.approx(true_trace / true_sqr, rel=0.1)
    assert float(noise.gain(4)) == pytest.approx((true_trace / 8 + true_sqr) / (true_trace / 32 + true_sqr), rel=0.05)


def test_groups_are_measured_apart_and_read_together():
    params = {"body": {"w": jnp.zeros((2, 2)), "b": jnp.zeros(2)}, "head": jnp.zeros(3)}
    rng = np.random.default_rng(0)
    grads = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=(3, *x.shape)), jnp.float32) + 1, params)
    noise = noise_scale.init(params, groups={"body": "slow", "head": "fast"})
    noise = noise_scale.update(noise, grads, [8, 16, 24])
    assert noise.group_names == ("fast", "slow")
    alone = [noise_scale.update(noise_scale.init(params[key]), grads[key], [8, 16, 24]) for key in ("head", "body")]
    np.testing.assert_allclose(noise.var, [n.var for n in alone], rtol=1e-5)
    np.testing.assert_allclose(noise.sqr, [n.sqr for n in alone], rtol=1e-5)
    np.testing.assert_allclose(AdaScale().lr_factor(4, noise), [AdaScale().lr_factor(4, n) for n in alone], rtol=1e-5)
    sqr, var = float(noise.sqr.sum()), float(noise.var.sum())
    assert float(noise.gain(4)) == pytest.approx((sqr + var) / (sqr + var / 4), rel=1e-5)
    assert float(noise.critical_batch_size) == pytest.approx(16 * var / sqr, rel=1e-5)
    by_function = noise_scale.init(params, groups=lambda p: {"body": "slow", "head": "fast"})
    assert by_function.groups == noise.groups


def axis_update(noise, grads, size, opt_state):
    mean = weighted_mean(grads, size, "r")
    return noise_scale.update(noise, grads, size, axis_name="r", mean_grads=mean, opt_state=opt_state)


def over_shard_map(replicas):
    mesh = Mesh(np.array(jax.devices()[:replicas]), ("r",), axis_types=(AxisType.Auto,))

    def body(noise, g, b, opt_state):
        return axis_update(noise, jax.tree.map(lambda x: x[0], g), b[0], opt_state)

    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(P(), P("r"), P("r"), P()), out_specs=P()))


def over_pmap(replicas):
    mapped = jax.pmap(axis_update, axis_name="r", in_axes=(None, 0, 0, None))
    return lambda *args: jax.tree.map(lambda x: x[0], mapped(*args))


def over_vmap(replicas):
    mapped = jax.vmap(axis_update, axis_name="r", in_axes=(None, 0, 0, None))
    return jax.jit(lambda *args: jax.tree.map(lambda x: x[0], mapped(*args)))


def without_a_mean(replicas):
    def update(noise, grads, size, opt_state):
        return noise_scale.update(noise, grads, size, axis_name="r", opt_state=opt_state)

    mapped = jax.vmap(update, axis_name="r", in_axes=(None, 0, 0, None))
    return jax.jit(lambda *args: jax.tree.map(lambda x: x[0], mapped(*args)))


@pytest.mark.slow
@pytest.mark.parametrize("preconditioned", [False, True])
@pytest.mark.parametrize("sizes", [(8, 32), (4, 8, 0, 32)])
@pytest.mark.parametrize("run", [over_shard_map, over_pmap, over_vmap, without_a_mean])
def test_every_axis_gives_the_same(run, sizes, preconditioned):
    params = {"a": jnp.ones((3, 2)), "b": jnp.ones(4)}
    rng = np.random.default_rng(len(sizes))
    grads = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=(len(sizes), *x.shape)), jnp.float32), params)
    nu = jax.tree.map(lambda x: jnp.asarray(rng.uniform(0.1, 2, x.shape), jnp.float32), params)
    opt_state = optax.ScaleByAdamState(jnp.int32(9), nu, nu) if preconditioned else None
    run = run(len(sizes))
    noise = noise_scale.init(params, groups={"a": "a", "b": "b"}, base_batch_size=8)
    wanted = got = noise
    for _ in range(2):
        wanted = under_jit(wanted, grads, jnp.array(sizes), opt_state=opt_state)
        got = run(got, grads, jnp.array(sizes), opt_state)
    assert float(wanted.unbias) > 0
    chex.assert_trees_all_close(got, wanted, rtol=1e-5, atol=1e-6)


def test_eager_and_jit_agree():
    grads, noise = jax.random.normal(jax.random.key(0), (2, 3)), noise_scale.init(jnp.zeros(3))
    eager = noise_scale.update(noise, grads, [8, 32])
    chex.assert_trees_all_close(eager, under_jit(noise, grads, jnp.array([8, 32])), rtol=1e-5)


def test_an_update_over_an_axis_sums_a_few_scalars_in_one_all_reduce():
    mesh = Mesh(np.array(jax.devices()[:2]), ("r",), axis_types=(AxisType.Auto,))
    params = {"a": jnp.ones((30, 20)), "b": jnp.ones(40)}
    noise = noise_scale.init(params, groups={"a": "a", "b": "b"})
    update = jax.shard_map(
        lambda n, g, m, b: noise_scale.update(n, g, b[0], axis_name="r", mean_grads=m),
        mesh=mesh,
        in_specs=(P(), P("r"), P(), P("r")),
        out_specs=P(),
    )
    grads = {"a": jnp.ones((60, 20)), "b": jnp.ones(80)}
    text = jax.jit(update).lower(noise, grads, params, jnp.array([8.0, 8.0])).as_text()
    assert text.count("stablehlo.all_reduce") == 1
    assert f"tensor<{2 + 5}xf32>" in text[text.index("stablehlo.all_reduce") :]


def test_micro_batches_are_contributors_too():
    """Sums carried through a loop equal the gradients stacked."""
    rng = np.random.default_rng(3)
    grads, sizes = jnp.asarray(rng.normal(size=(6, 4)), jnp.float32), jnp.array([8.0] * 6)
    noise = noise_scale.init(jnp.zeros(4))
    sums = noise_scale.local_sums(noise, grads[0], sizes[0])
    for g, b in zip(grads[1:], sizes[1:], strict=True):
        sums = jax.tree.map(jnp.add, sums, noise_scale.local_sums(noise, g, b))
    looped = noise_scale.update_from_sums(noise, sums, jnp.mean(grads, axis=0))
    np.testing.assert_allclose(looped.var, noise_scale.update(noise, grads, sizes).var, rtol=1e-4)


def test_sizes_and_scales_never_recompile():
    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(noise, grads, sizes, scale):
        noise = noise_scale.update(noise, grads, sizes)
        return noise, AdaScale().lr_factor(scale, noise)

    noise = noise_scale.init(jnp.zeros(3))
    for sizes in ([8, 8], [8, 32], [0, 7], [100, 1]):
        noise, _ = step(noise, jnp.ones((2, 3)), np.array(sizes), np.float32(sum(sizes)))


def test_the_first_batch_is_the_base_unless_given():
    grads = jnp.array([[1.0, 0.0], [0.0, 1.0]])
    noise = noise_scale.update(noise_scale.init(jnp.zeros(2)), grads, [24, 8])
    assert float(noise.base_batch_size) == 16
    assert float(noise_scale.update(noise, grads, [64, 64]).base_batch_size) == 16
    given_base = noise_scale.update(noise_scale.init(jnp.zeros(2), base_batch_size=4), grads, [24, 8])
    assert float(given_base.var) == pytest.approx(4 * float(noise.var), rel=1e-5)
    assert float(given_base.critical_batch_size) == pytest.approx(float(noise.critical_batch_size), rel=1e-5)


def test_an_update_that_cannot_be_used_sets_no_base():
    noise, ones = noise_scale.init(jnp.zeros(2)), jnp.ones((2, 2))
    for grads, sizes in ((ones * jnp.inf, [24, 8]), (ones, [0, 0])):
        after = under_jit(noise, grads, jnp.array(sizes))
        assert float(after.base_batch_size) == 0
        assert float(under_jit(after, ones, jnp.array([3, 5])).base_batch_size) == 4


def test_before_any_gradient():
    noise = noise_scale.init(jnp.zeros(2))
    assert float(noise.sqr) == 1.0
    assert float(noise.var) == pytest.approx(1e-6)
    assert float(noise.gain(16)) == pytest.approx(1.0, abs=1e-4)
    assert math.isnan(noise.critical_batch_size)


def test_reads_are_clipped():
    """Estimates may be negative: equal and opposite gradients leave no signal, equal ones no noise."""
    noise = noise_scale.init(jnp.zeros(1))
    opposite = noise_scale.update(noise, jnp.array([[1.0], [-1.0]]), [1, 1])
    assert float(opposite.sqr_sum[0]) < 0
    assert float(opposite.sqr) == 0.0
    assert math.isinf(opposite.critical_batch_size)
    assert float(opposite.gain(8)) == pytest.approx(8)
    assert float(noise_scale.update(noise, jnp.ones((2, 1)), [1, 1]).var) == pytest.approx(1e-6)


def test_an_idle_replica_may_hold_anything():
    noise = noise_scale.init(jnp.zeros(2), base_batch_size=8)
    grads = jnp.array([[1.0, 2.0], [jnp.nan, jnp.inf], [0.0, 1.0]])
    got = under_jit(noise, grads, jnp.array([8, 0, 16]))
    wanted = noise_scale.update(noise, grads[jnp.array([0, 2])], [8, 16])
    np.testing.assert_allclose(got.var, wanted.var, rtol=1e-6)


def test_one_contributor_left_teaches_nothing():
    noise = noise_scale.init(jnp.zeros(2))
    after = under_jit(noise, jnp.ones((2, 2)), jnp.array([8, 0]))
    assert float(after.unbias) == 0.0


def test_half_precision_is_measured_in_float32():
    grads = jnp.array([[300.0], [100.0]], jnp.float16)  # 300 squared is infinite in float16
    noise = noise_scale.update(noise_scale.init(jnp.zeros(1, jnp.float16)), grads, [1, 1])
    assert float(noise.var) == pytest.approx(2e4, rel=1e-3)


def test_the_mean_of_half_precision_gradients_is_not_rounded():
    grads, noises = jnp.array([[256.0]] + [[1.0]] * 7), []
    for dtype in (jnp.bfloat16, jnp.float32):
        noises.append(noise_scale.update(noise_scale.init(jnp.zeros(1, dtype)), grads.astype(dtype), [8] * 8))
    np.testing.assert_allclose(noises[0].sqr_sum, noises[1].sqr_sum, rtol=1e-5)
    np.testing.assert_allclose(noises[0].var_sum, noises[1].var_sum, rtol=1e-5)


@pytest.mark.parametrize("contributors", [1, 2])
def test_complex_numbers_are_measured_as_two_each(contributors):
    noises = [noise_scale.init(jnp.zeros(n, d), differenced=True) for n, d in ((2, jnp.complex64), (4, jnp.float32))]
    rng = np.random.default_rng(0)
    for _ in range(2):
        pairs = jnp.asarray(rng.normal(size=(contributors, 4)) + 0.5, jnp.float32)
        grads = jax.lax.complex(pairs[:, :2], pairs[:, 2:]), pairs
        noises = [noise_scale.update(n, g, [8] * contributors) for n, g in zip(noises, grads, strict=True)]
    assert float(noises[1].var) > 0.1
    for a, b in ((x.sqr_sum, x.var_sum) for x in noises):
        np.testing.assert_allclose([a, b], [noises[1].sqr_sum, noises[1].var_sum], rtol=1e-5)


def test_leaves_that_are_not_float_are_skipped():
    params = {"w": jnp.zeros(2), "n": jnp.zeros((), jnp.int32)}
    grads = {"w": jnp.array([[1.0, 0.0], [0.0, 1.0]]), "n": jnp.array([1, 2])}
    assert float(noise_scale.update(noise_scale.init(params), grads, [1, 1]).var) == pytest.approx(1.0)


def test_nothing_is_nan_on_the_way_of_one_contributor():
    with jax.debug_nans(True):
        noise = noise_scale.init(jnp.zeros(2), differenced=True)
        for gradient in ([[2.0, 0.0]], [[1.0, 0.0]]):
            noise = noise_scale.update(noise, jnp.array(gradient), [16])
        assert (float(noise.sqr), float(noise.var), float(noise.critical_batch_size)) == (2.0, 0.5, 4.0)


@pytest.mark.parametrize("sizes", [[8, 0], [8, -1], [8, float("nan")], ["a", "b"], np.array([0, 8])])
def test_sizes_that_cannot_be_are_refused(sizes):
    with pytest.raises(ValueError, match=r"batch_sizes=.*write e\.g\. batch_sizes="):
        noise_scale.update(noise_scale.init(jnp.zeros(2)), jnp.ones((2, 2)), sizes)


def test_a_single_contributor_is_refused_with_the_line_to_write():
    noise = noise_scale.init(jnp.zeros(2))
    with pytest.raises(ValueError, match="differenced=True"):
        noise_scale.update(noise, jnp.ones((1, 2)), [8])
    with pytest.raises(ValueError, match="differenced=True"):
        noise_scale.update_from_sums(noise, noise_scale.local_sums(noise, jnp.ones(2), 8), jnp.ones(2))
    with pytest.raises(ValueError, match="differenced=True"):
        over_vmap(1)(noise, jnp.ones((1, 2)), jnp.array([8]), None)


def test_gradients_that_shard_map_has_summed_are_refused_with_the_line_to_write():
    mesh = Mesh(np.array(jax.devices()[:2]), ("r",), axis_types=(AxisType.Auto,))
    params, x = jnp.ones(3), jnp.arange(6.0).reshape(2, 3)

    def measured(own, **options):
        def body(x):
            grads = jax.grad(lambda p: jnp.sum(p * x[0]))(own(params))
            return noise_scale.update(noise_scale.init(params), grads, 1, axis_name="r").var

        # Under jit: where shard_map runs eagerly it does not track what varies.
        return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("r"), out_specs=P(), **options))(x)

    with pytest.raises(ValueError, match=r"jax.lax.pcast\(params, 'r', to='varying'\)"):
        measured(lambda p: p)
    wanted = noise_scale.update(noise_scale.init(params), x, [1, 1]).var
    assert float(wanted) > 1
    np.testing.assert_allclose(measured(lambda p: jax.lax.pcast(p, "r", to="varying")), wanted, rtol=1e-6)
    np.testing.assert_allclose(measured(lambda p: p, check_vma=False), wanted, rtol=1e-6)


def test_shapes_that_do_not_fit_are_refused():
    noise = noise_scale.init({"a": jnp.zeros(2), "b": jnp.zeros(3)})
    with pytest.raises(ValueError, match="leading axes"):
        noise_scale.update(noise, {"a": jnp.zeros((2, 2)), "b": jnp.zeros((3, 3))}, [8, 8])
    with pytest.raises(ValueError, match="leading axes"):
        noise_scale.update(noise, {"a": jnp.zeros((2, 2)), "b": jnp.zeros((2, 3))}, 8)
    calls = [
        lambda: noise_scale.update(None, jnp.zeros((2, 3)), [8, 8]),
        lambda: noise_scale.local_sums(None, jnp.zeros(3), 8),
        lambda: noise_scale.skip(None, 8),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"noise=None is no NoiseScale; write noise = jaxche\.noise_scale\.init"):
            call()
    with pytest.raises(ValueError, match="1 leaves, but the params given to init had 2"):
        noise_scale.update(noise, jnp.zeros((2, 3)), [8, 8])
    mapped = jax.vmap(lambda g, b: noise_scale.update(noise_scale.init(g), g, b, axis_name="r"), axis_name="r")
    with pytest.raises(ValueError, match=r"batch_sizes has shape \(2,\).*in_specs=P\('r'\)"):
        mapped(jnp.zeros((2, 3)), jnp.full((2, 2), 8))
    one, same = (mapped(jnp.ones((2, 3)), sizes) for sizes in (jnp.full(2, 8), jnp.full((2, 1), 8)))
    chex.assert_trees_all_equal(one, same)


def test_init_refuses():
    with pytest.raises(ValueError, match=r"base_batch_size=0.*write e\.g\. base_batch_size=32"):
        noise_scale.init(jnp.zeros(2), base_batch_size=0)
    with pytest.raises(ValueError, match="does not label params"):
        noise_scale.init({"a": jnp.zeros(2)}, groups={"b": "x"})
    with pytest.raises(ValueError, match="no arrays"):
        noise_scale.init({})
    with pytest.raises(ValueError, match=r"scale=0\.0 must be finite"):
        noise_scale.init(jnp.zeros(2)).gain(0)


# Steps that are not measured.


def test_averages_decay_by_the_examples_of_training():
    """Each estimate weighs what it would if the steps between had been measured and had shown nothing new."""
    rng = np.random.default_rng(0)
    noise = noise_scale.init(jnp.zeros(DIM), base_batch_size=8)
    estimates, ages = [], []
    for skipped in (0, 100, 3000, 40):
        grads = jnp.asarray(rng.normal(size=(3, DIM)), jnp.float32)
        noise = noise_scale.update(noise, grads, [8] * 3)
        estimates.append(3 / 2 * float(jnp.sum(jnp.var(grads, axis=0))))
        ages = [age + 3 * 8 + skipped for age in ages] + [skipped]
        if skipped:
            read = [float(x) for x in (noise.sqr, noise.var, noise.critical_batch_size)]
            noise = noise_scale.skip(noise, skipped)
            assert [float(x) for x in (noise.sqr, noise.var, noise.critical_batch_size)] == pytest.approx(read, 1e-6)
    weights = 0.999 ** (np.array(ages) / 8)
    assert float(noise.var) == pytest.approx(np.average(estimates, weights=weights), rel=1e-4)


def test_a_single_contributor_forgets_twice_as_fast_as_in_its_updates():
    noise = noise_scale.init(jnp.zeros(DIM), base_batch_size=8, differenced=True)
    for k in range(3):
        noise = noise_scale.update(noise, jnp.full((1, DIM), float(k)), [8])
    # Two estimates, each of two batches.
    assert float(noise.unbias) == pytest.approx(1 - 0.999**4, rel=1e-4)
    assert float(noise_scale.skip(noise, 8).unbias / noise.unbias) == pytest.approx(0.999**2, rel=1e-6)


@pytest.mark.parametrize("gap", [True, False], ids=["no pair across a gap", "pairs across gaps"])
def test_unbiased_while_the_gradient_moves(gap):
    """The first 8 of every 40 steps are measured. Over the other steps the gradient drifts, which looks like noise."""
    rounds, steps, measured, drift = 600, 40, 8, 0.3
    direction = jnp.ones(DIM) / jnp.sqrt(DIM)

    def step(noise, k):
        sway = (
            jnp.sin(2 * jnp.pi * k.astype(jnp.float32) / (4 * steps)) * 4 * steps / (2 * jnp.pi) * drift
        )  # at most `drift` a step
        noisy = 2 * jnp.eye(DIM)[0] + sway * direction + jax.random.normal(jax.random.fold_in(key, k), (DIM,))
        seen = update_from_one(noise, noisy, 8)
        skipped = noise_scale.skip(noise, 8)
        if not gap:
            skipped = noise_scale.NoiseScale(**{**vars(skipped), "has_previous": noise.has_previous})
        noise = jax.tree.map(lambda a, b: jnp.where(k % steps < measured, a, b), seen, skipped)
        return noise, (noise.var_sum[0], noise.unbias)

    key, noise = jax.random.key(0), noise_scale.init(jnp.zeros(DIM), base_batch_size=8, differenced=True)
    _, (total, unbias) = jax.jit(lambda noise: jax.lax.scan(step, noise, jnp.arange(rounds * steps)))(noise)
    values = np.asarray(total / unbias)[2000 :: steps * 4]
    # The averages reach over some 500 steps, so about a dozen of these means are independent of one another.
    error = np.std(values) / np.sqrt(len(values) / 3)
    off = np.mean(values) / DIM - 1
    if gap:
        assert abs(off) < 4 * error / DIM + drift**2 / 2 / DIM
        assert error < 0.01 * DIM
    else:
        assert off > 0.08


def test_nothing_skipped_changes_nothing_under_jit():
    noise = noise_scale.init(jnp.zeros(DIM), differenced=True)
    for k in range(3):
        noise = noise_scale.update(noise, jnp.full((1, DIM), float(k)), [8])
    after = jax.jit(noise_scale.skip)(noise, jnp.float32(0))
    chex.assert_trees_all_equal(after, noise)


@pytest.mark.parametrize("examples", [0, -8, np.nan])
def test_bad_numbers_are_named(examples):
    with pytest.raises(ValueError, match=f"examples={examples}.*examples=32"):
        noise_scale.skip(noise_scale.init(jnp.zeros(2)), examples)
