"""Rounds of which scaling measures the first steps or none: against twins that skip the same ones."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxche
from jaxche.cadence import RoundPlan
from jaxche.data import ReadyFeed
from jaxche.replicas._replica import LocalRound
from jaxche.replicas._scaling import Scaling
from jaxche.scaling import effective_replicas, local_estimates, noise_scale, scale_learning_rate, update_from_estimates

RULES = [jaxche.AdaScale(), jaxche.AdamScale()]
IDS = ["AdaScale", "AdamScale"]
ALONE, TOGETHER = 12, 8  # steps of a round that are measured
ROUNDS = [(13, 7), (1, 19), (8, 12), (10, 10), (18, 2)]
# Of these; and where only the first of them is one of the first rounds. Four of (18, 2) are 72 steps and 8, of which an
# eighth is 9 and 1: one gradient tells nothing, but where gradients are averaged it stands for its replica.
MEASURED = {
    "parameters": ([(8, 7), (1, 8), (8, 8), (8, 8), (8, 2)], [(8, 7), (0, 0), (0, 0), (0, 0), (8, 0)]),
    "gradients": ([(8, 7), (1, 8), (8, 8), (8, 8), (8, 2)], [(8, 7), (0, 0), (0, 0), (0, 0), (8, 1)]),
}


@pytest.fixture(params=[False, True], ids=["first rounds", "later rounds"])
def later(request, monkeypatch):
    """Whether rounds after the first one are measured as they are late in a run; then not all arrays are small ones."""
    if request.param:
        monkeypatch.setattr("jaxche.replicas._scaling._FIRST_ROUNDS", 1)
        monkeypatch.setattr("jaxche.replicas._scaling._SMALL", 2)
    return request.param


@pytest.fixture
def long(make_problem):
    """Twenty batches an epoch."""
    return make_problem(examples=160)


def batches(problem, cursor, n):
    size = len(problem.data)
    return [problem.data.epoch(i // size)[i % size] for i in range(cursor, cursor + n)]


# Compiled: a twin takes hundreds of steps.
GRADIENT = jax.jit(jax.grad(lambda params, batch, loss: loss(params, batch)[0]), static_argnames="loss")


def gradient(problem, params, batch):
    return GRADIENT(params, batch, loss=problem.loss)


def preconditioner(rule, opt_state):
    return opt_state if isinstance(rule, jaxche.AdamScale) else None


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES, ids=IDS)
def test_one_replica_equals_the_twin(long, devices, close, rule, later):
    measured = [ALONE, 0, 0, 0, 0, ALONE] if later else [ALONE] * 6  # an eighth of five rounds is enough for one
    trainer = jaxche.Trainer(long.loss, optax.adam(0.05), replicas=devices[:1], scaling=rule, base_batch_size=2)
    state, history = trainer.fit(trainer.init(long.params), long.data, epochs=6, progress=False)
    assert [info.counts for info in history] == [(20,)] * 6

    params, tx = jax.tree.map(jnp.asarray, long.params), scale_learning_rate(optax.adam(0.05), rule)
    opt_state, noise = tx.init(params), noise_scale.init(params, base_batch_size=2, differenced=True)
    update = jax.jit(tx.update)
    measure = jax.jit(lambda noise, grads, seen: noise_scale.update(noise, grads, [8], opt_state=seen))
    for k, batch in enumerate(batches(long, 0, 120)):
        grads = gradient(long, params, batch)
        if k % 20 == 0:
            seen = preconditioner(rule, opt_state)
        if k % 20 < measured[k // 20]:
            noise = measure(noise, jax.tree.map(lambda g: g[None], grads), seen)
        else:
            noise = noise_scale.skip(noise, 8)
        updates, opt_state = update(grads, opt_state, params, scale=4, noise=noise)
        params = optax.apply_updates(params, updates)
    close(trainer.params(state), params, rtol=1e-3, atol=1e-5)
    assert history[-1].progress == pytest.approx(float(opt_state.progress), rel=1e-4)
    assert history[-1].noise == pytest.approx(float(noise.critical_batch_size), rel=1e-3)
    assert float(trainer.noise(state).unbias) == pytest.approx(float(noise.unbias), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES, ids=IDS)
def test_averaged_parameters_equal_the_twin(long, devices, close, rule, later):
    rounds, tx = ROUNDS, optax.adam(0.01)
    trainer = jaxche.Trainer(long.loss, tx, replicas=devices[:2], scaling=rule, opt_state="local")
    state, infos = trainer.init(long.params), []
    for counts in rounds:
        state, info = trainer.round(state, long.data, counts=counts)
        infos.append(info)

    x0, tx = jax.tree.map(jnp.asarray, long.params), scale_learning_rate(tx, rule)
    states, update = [tx.init(x0) for _ in rounds[0]], jax.jit(tx.update)
    noise, progress = noise_scale.init(x0, base_batch_size=8), jnp.float32(0)
    for number, counts in enumerate(rounds):
        weights = [n / sum(counts) for n in counts]
        scale, ends, parts, skipped, cursor = effective_replicas(weights, counts), [], [], 0, 20 * number
        gain = noise.gain(scale)
        for rank, n in enumerate(counts):
            params, grads, seen = x0, [], preconditioner(rule, states[rank])
            for k, batch in enumerate(batches(long, cursor, n)):
                grads.append(gradient(long, params, batch))
                told = {"scale": scale, "noise": noise, "progress": progress + k * gain}
                updates, states[rank] = update(grads[-1], states[rank], params, **told)
                params = optax.apply_updates(params, updates)
            measured = grads[: MEASURED["parameters"][later][number][rank]]
            skipped += 8 * (n - len(measured))
            if len(measured) > 1:
                own = [noise_scale.local_sums(noise, g, 8, opt_state=seen) for g in measured]
                mean = jax.tree.map(lambda *g: sum(g) / len(g), *measured)
                total = jax.tree.map(lambda *x: sum(x), *own)
                parts.append(local_estimates(noise, total, mean, opt_state=seen))
            ends.append(params)
            cursor += n
        x0 = jax.tree.map(lambda *x, w=weights: sum(a * b for a, b in zip(w, x, strict=True)), *ends)
        progress += gain * sum(w * n for w, n in zip(weights, counts, strict=True))
        noise = noise_scale.skip(noise, skipped)
        if parts:
            noise = update_from_estimates(noise, jax.tree.map(lambda *x: sum(x), *parts))
        assert infos[number].noise == pytest.approx(float(noise.critical_batch_size), rel=1e-3)
        assert infos[number].progress == pytest.approx(float(progress), rel=1e-4)
    close(trainer.params(state), x0, rtol=1e-3, atol=1e-5)
    assert float(trainer.noise(state).unbias) == pytest.approx(float(noise.unbias), rel=1e-5)


def loss(w, batch):
    return jnp.mean(jnp.sum((w - batch) ** 2, axis=(1, 2)))


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "average"), [(1, None), (2, "parameters"), (2, "gradients")])
def test_a_step_that_is_not_measured_does_the_work_of_a_plain_one(devices, replicas, average):
    """By the compiler's own count, on parameters so large that numbers of the rule's own do not show."""
    w, data = np.zeros((64, 64), np.float32), [np.ones((2, 64, 64), np.float32)] * 20
    work = {}
    for scaling in (None, *RULES):
        arguments = {"average": average, "replicas": devices[:replicas], "scaling": scaling}
        trainer = jaxche.Trainer(loss, optax.adam(1e-3), **arguments)
        state, _ = trainer.round(trainer.init(w), data, counts=(20, 0)[:replicas])
        ((steps, _),) = trainer._engine._replicas[0]._executables.values()
        costs = [step.cost_analysis() for step in (steps.measuring, getattr(steps.plain, "args", [steps.plain])[0])]
        work[scaling] = [(cost["flops"], cost["bytes accessed"]) for cost in costs]
        if scaling is not None and replicas == 2:
            carry = (
                trainer._engine._replicas[0].run(state.local_states[0], ReadyFeed(data), LocalRound(measured=5)).carry
            )
            sums = carry.tracked if average == "gradients" else carry.tracked["sums"]
            assert float(sums.contributors[0]) == 5
    for rule in RULES:
        (plain, _), (measured, later) = work[None], work[rule]
        # A factor on each update, and a few dozen numbers more; measuring takes a product and a sum of each at least.
        assert later[0] - plain[0] < w.size + 500
        assert later[1] - plain[1] < w.size
        assert measured[0] - plain[0] >= 2 * w.size
        assert measured[1] - plain[1] >= w.nbytes


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("rule", RULES, ids=IDS)
def test_a_run_goes_on_and_is_replayed_bit_for_bit(long, devices, same, tmp_path, replicas, rule):
    """The run resumes between rounds that are longer than what is measured of them."""

    def make():
        che = None if replicas == 1 else jaxche.ElChe(world_size=2, anchor=10, max_anchor=10, max_batch_diff=0)
        return jaxche.Trainer(long.loss, optax.adam(0.05), che=che, replicas=devices[:replicas], scaling=rule)

    first, second = make(), make()
    start = first.init(long.params)
    whole, history = first.fit(start, long.data, epochs=3, progress=False)
    assert [sum(info.counts) for info in history] == [20] * 3
    first.fit(start, long.data, epochs=1, progress=False, checkpoints=tmp_path)
    resumed, _ = second.fit(second.init(long.params), long.data, epochs=3, progress=False, checkpoints=tmp_path)
    again, _ = second.replay(start, long.data, history)
    for other in (resumed, again):
        assert other.round == whole.round
        same((other.params, other.opt_state), (whole.params, whole.opt_state))
        same([local.noise for local in other.local_states], [local.noise for local in whole.local_states])


@pytest.mark.slow
def test_one_device_goes_on_as_an_island_and_an_island_as_one_device(long, devices, close, tmp_path):
    trainers, ends = [], []
    for replica, strategy in ((devices[0], None), (jaxche.FullShard().mesh(devices[:2]), jaxche.FullShard())):
        arguments = {"replicas": [replica], "strategy": strategy, "scaling": jaxche.AdaScale(), "base_batch_size": 2}
        trainers.append(jaxche.Trainer(long.loss, optax.adam(0.05), **arguments))
    for number, order in enumerate((trainers[:1], trainers, trainers[::-1])):
        for epochs, trainer in zip((3,) if len(order) == 1 else (1, 3), order, strict=True):
            start, folder = trainer.init(long.params), tmp_path / str(number)
            state, history = trainer.fit(start, long.data, epochs=epochs, progress=False, checkpoints=folder)
        # What a state keeps is of the parameters' own arrays, however they were measured.
        assert jax.tree.structure(trainer.noise(state).previous) == jax.tree.structure(long.params)
        ends.append((trainer.params(state), history[-1].noise, history[-1].progress))
    close(ends[0], ends[1], rtol=1e-3, atol=1e-5)
    close(ends[0], ends[2], rtol=1e-3, atol=1e-5)


def test_an_island_measures_the_same_steps(long, devices, close):
    ends = []
    for replica, strategy in ((devices[0], None), (jaxche.FullShard().mesh(devices[:2]), jaxche.FullShard())):
        arguments = {"replicas": [replica], "strategy": strategy, "scaling": jaxche.AdamScale(), "base_batch_size": 2}
        trainer = jaxche.Trainer(long.loss, optax.adam(0.05), **arguments)
        state, history = trainer.fit(trainer.init(long.params), long.data, epochs=2, progress=False)
        ends.append((trainer.params(state), history[-1].noise, history[-1].progress))
    close(ends[0], ends[1], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES, ids=IDS)
def test_averaged_gradients_equal_the_twin(long, devices, close, rule, later):
    """Norms of the batches that are measured, the mean of all, and two equations for two unknowns."""
    adam = optax.adam(0.01)
    trainer = jaxche.Trainer(long.loss, adam, average="gradients", replicas=devices[:2], scaling=rule)
    params, tx = jax.tree.map(jnp.asarray, long.params), scale_learning_rate(adam, rule)
    opt_state, wanted = tx.init(params), []
    state, averages = trainer.init(long.params), np.zeros(3)
    for number, counts in enumerate(ROUNDS):
        state, info = trainer.round(state, long.data, counts=counts)
        measured = MEASURED["gradients"][later][number]
        grads = [gradient(long, params, batch) for batch in batches(long, 20 * number, 20)]
        flat = np.array([np.concatenate([np.ravel(x) for x in jax.tree.leaves(g)]) for g in grads], np.float64)
        shares = np.split(flat, [counts[0]])
        theta = 0.999**20
        averages = theta * averages
        if any(measured):
            pairs = zip(shares, measured, strict=True)
            local = sum(len(own) / 20 * np.mean(np.sum(own[:n] ** 2, 1)) for own, n in pairs)
            mean = np.sum(np.mean(flat, 0) ** 2)
            trace = (local - mean) / (1 / 8 - 1 / 160)
            averages += (1 - theta) * np.array([mean - trace / 160, trace / 8, 1.0])
        wanted.append(averages[1] * 8 / averages[0])
        # Adam's moments are not trusted before its fifth update, so both rules measure plain gradients here.
        assert info.noise == pytest.approx(max(averages[1], 1e-6) * 8 / max(averages[0], 0.0), rel=2e-3)
        mean = jax.tree.map(lambda *g: sum(g) / 20, *grads)
        updates, opt_state = tx.update(mean, opt_state, params, scale=20, noise=trainer.noise(state))
        params = optax.apply_updates(params, updates)
        close(trainer.params(state), params, rtol=1e-3, atol=1e-5)
        assert float(trainer.noise(state).unbias) == pytest.approx(averages[2], rel=1e-5)
    # A round without a measurement keeps what is known, to rounding.
    assert len({round(noise, 6) for noise in wanted}) == (2 if later else 5)


@given(counts=st.lists(st.integers(0, 200), min_size=1, max_size=5).filter(any), average=st.booleans())
def test_an_eighth_of_the_steps_at_most_and_nobody_is_left_out_alone(counts, average):
    """In the long run; gradients of a replica that takes few steps are measured more often, as all of one round are."""
    mode = "gradients" if average and len(counts) > 1 else "parameters"
    scaling = Scaling(jaxche.AdaScale(), 8.0, mode, len(counts) == 1, False)
    plans = [RoundPlan(round=n, epoch=0, start=0, counts=tuple(counts), epoch_size=1) for n in range(8, 8 + 8 * 96)]
    measured = np.array([scaling.measured_steps(plan) for plan in plans])
    assert np.all(measured <= np.minimum(counts, ALONE if len(counts) == 1 else TOGETHER))
    least = 2 if mode == "parameters" else 1
    assert np.all((measured == 0) | (measured >= least))
    often, alike = np.array(counts) / 8, measured.any(axis=1)
    if mode == "gradients":
        assert np.all((measured > 0) == (alike[:, None] & (np.array(counts) > 0)))
        often = np.maximum(often, alike.mean())
    assert np.all(measured.mean(axis=0) <= often + 1e-9)
    if max(counts) >= least:
        # And not much less of the one that takes most steps, up to as many as are enough.
        longest = np.argmax(counts)
        enough = min(counts[longest] / 8, ALONE if len(counts) == 1 else TOGETHER)
        assert measured.mean(axis=0)[longest] >= 0.5 * enough


@pytest.mark.parametrize("solo", [True, False])
def test_small_arrays_looked_at_as_one_tell_the_same(solo, close, monkeypatch):
    """The arrays have several dtypes, and some have no second moments."""
    monkeypatch.setattr("jaxche.replicas._scaling._SMALL", 6)
    params = {"a": jnp.ones((2, 3)), "b": jnp.ones(2), "c": jnp.ones((), jnp.bfloat16), "d": jnp.ones(5)}
    tx, told = optax.masked(optax.adam(0.1), {"a": True, "b": True, "c": True, "d": False}), []
    rng, opt_state = np.random.default_rng(0), tx.init(params)
    batches = [jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), params) for _ in range(9)]
    for grads in batches[:6]:
        _, opt_state = tx.update(grads, opt_state, params)
    for joined in (False, True):
        scaling = Scaling(jaxche.AdamScale(), 8.0, "parameters", solo, False, joined)
        noise = scaling.start(params)["noise"]
        seen, begun = scaling.begin(noise, params, opt_state)
        tracked, noise = begun["tracked"], begun.get("noise", noise)
        for grads in batches[6:]:
            if solo:
                noise, tracked = scaling.update_from_step(noise, tracked, grads, 8, seen)
            else:
                tracked = scaling.accumulate(tracked, noise, grads, jnp.float32(8), seen)
        if not solo:
            sent = scaling.payload(tracked, noise, opt_state, params, jnp.float32(32))
            noise = jax.jit(scaling.update_from_estimates)(noise, sent)
        assert bool(noise.preconditioned)
        assert len(jax.tree.leaves(tracked["previous" if solo else "grads"])) == (2 if joined else 4)
        told.append([noise.sqr_sum, noise.var_sum, noise.unbias])
    close(told[0], told[1], rtol=1e-5, atol=1e-7)
    assert float(told[0][1][0]) > 0


@pytest.mark.slow
def test_batches_that_stand_for_others_leave_the_estimate_unbiased():
    """The replicas have 20 and 3 batches and measure at most 8 of them. The true gradient is known."""
    scaling, dim, counts = Scaling(jaxche.AdaScale(), 8.0, "gradients", False, False), 16, (20, 3)
    truth, noise = jnp.full(dim, 0.3), noise_scale.init(jnp.zeros(dim), base_batch_size=8)

    def once(key, stands):
        grads = truth + jax.random.normal(key, (sum(counts), dim))  # of batches of 8: a trace of 8 dim
        total, start = [], 0
        for n in counts:
            own = [noise_scale.local_sums(noise, g, 8) for g in grads[start : start + min(n, TOGETHER)]]
            tracked = jax.tree.map(lambda *x: sum(x), *own)
            total.append(scaling.payload(tracked, None, None, None, jnp.float32(8 * n)) if stands else tracked)
            start += n
        after = noise_scale.update_from_sums(noise, jax.tree.map(lambda *x: sum(x), *total), grads.mean(0))
        return jnp.stack([after.sqr_sum[0], after.var_sum[0]]) / after.unbias

    keys, wanted = jax.random.split(jax.random.key(0), 20_000), np.array([dim * 0.09, dim])
    for stands in (True, False):
        samples = jax.jit(jax.vmap(lambda key, stands=stands: once(key, stands)))(keys)
        error = np.std(samples, axis=0) / np.sqrt(len(keys))
        off = np.abs(np.mean(samples, axis=0) - wanted)
        assert np.all(error < 0.01 * wanted)
        # Sums of the measured ones alone take the mean for one of fewer batches, and so see too little signal.
        assert np.all(off < 4 * error) == stands


@pytest.mark.parametrize("replicas", [1, 2])
def test_parameters_of_three_dtypes_where_promotion_is_forbidden(devices, replicas):
    params = {"a": jnp.ones(3, jnp.bfloat16), "b": jnp.ones(3), "z": jnp.ones(3, jnp.complex64)}

    def loss(params, batch):
        distance = batch * params["a"].astype(jnp.float32) - params["b"]
        return jnp.mean(distance**2) + jnp.mean(jnp.abs(params["z"]) ** 2)

    with jax.numpy_dtype_promotion("strict"):
        trainer = jaxche.Trainer(loss, optax.sgd(0.1), replicas=devices[:replicas], scaling=jaxche.AdaScale())
        data = [np.full((4, 3), i, np.float32) for i in range(8)]
        state, info = trainer.round(trainer.init(params), data, counts=(4,) * replicas)
    assert np.isfinite(info.loss)
    if replicas == 1:
        assert jax.tree.map(lambda x: x.dtype, trainer.noise(state).previous) == jax.tree.map(lambda x: x.dtype, params)
