"""Scaled learning rates in the trainer, against twins that use the same rules by hand."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxche
from jaxche.averaging import merge_weights
from jaxche.scaling import effective_replicas, local_estimates, noise_scale, scale_learning_rate, update_from_estimates

ROUNDS = [(3, 5), (1, 3), (4, 0), (2, 4)]
RULES = [jaxche.AdaScale(), jaxche.AdamScale(), jaxche.LinearScale(), jaxche.SqrtScale(), jaxche.LEGWScale(1, 96, 8)]
IDS = [type(rule).__name__ for rule in RULES]


def share(problem, cursor, n):
    size = len(problem.data)
    return [problem.data.epoch(i // size)[i % size] for i in range(cursor, cursor + n)]


# Compiled: a twin takes many steps.
GRADIENT = jax.jit(jax.grad(lambda params, batch, loss: loss(params, batch)[0]), static_argnames="loss")


def gradient(problem, params, batch):
    return GRADIENT(params, batch, loss=problem.loss)


def run(problem, trainer, rounds=ROUNDS):
    state, infos = trainer.init(problem.params), []
    for counts in rounds:
        state, info = trainer.round(state, problem.data, counts=counts)
        infos.append(info)
    return state, infos


def averaged_gradients(problem, tx, rule, totals, base=8):
    """One update a round on all of its batches, noise from the same batches."""
    params = jax.tree.map(jnp.asarray, problem.params)
    tx = scale_learning_rate(tx, rule)
    opt_state, noise = tx.init(params), noise_scale.init(params, base_batch_size=base)
    update = jax.jit(tx.update)
    cursor, told = 0, []
    for total in totals:
        batches = share(problem, cursor, total)
        sizes = [len(batch["x"]) for batch in batches]
        stacked = jax.tree.map(lambda *g: jnp.stack(g), *(gradient(problem, params, batch) for batch in batches))
        seen = opt_state if isinstance(rule, jaxche.AdamScale) else None
        if total > 1:
            noise = noise_scale.update(noise, stacked, sizes, opt_state=seen)
        mean = jax.tree.map(lambda g, b=sizes: jnp.tensordot(jnp.array(b, jnp.float32) / sum(b), g, 1), stacked)
        updates, opt_state = update(mean, opt_state, params, scale=sum(sizes) / base, noise=noise)
        params, cursor = optax.apply_updates(params, updates), cursor + total
        told.append((noise.critical_batch_size, noise.gain(sum(sizes) / base), opt_state.factor, opt_state.progress))
    return params, told


def averaged_parameters(problem, tx, rule, rounds, merge, base=8):
    """Replicas in a Python loop; noise and progress are common and change at merges."""
    x0 = jax.tree.map(jnp.asarray, problem.params)
    tx = scale_learning_rate(tx, rule)
    states, update = [tx.init(x0) for _ in rounds[0]], jax.jit(tx.update)
    noise, progress, cursor, told = noise_scale.init(x0, base_batch_size=base), jnp.float32(0), 0, []
    for counts in rounds:
        weights, alpha = merge_weights(merge, counts)
        m_eff, ends, parts, gains, factors = effective_replicas(weights, counts, alpha), [], [], [], []
        for rank, n in enumerate(counts):
            params, grads, own = x0, [], []
            seen = states[rank] if isinstance(rule, jaxche.AdamScale) else None
            for k, batch in enumerate(share(problem, cursor, n)):
                b = len(batch["x"])
                grads.append(gradient(problem, params, batch))
                own.append(noise_scale.local_sums(noise, grads[-1], b, opt_state=seen))
                gain = noise.gain(m_eff * b / base)
                updates, states[rank] = update(
                    grads[-1],
                    states[rank],
                    params,
                    scale=m_eff * b / base,
                    noise=noise,
                    progress=progress + k * alpha * gain,
                )
                params = optax.apply_updates(params, updates)
                gains.append(gain)
                factors.append(states[rank].factor)
            if n > 1:
                total = jax.tree.map(lambda *x: sum(x), *own)
                mean = jax.tree.map(lambda *g: sum(g) / len(g), *grads)
                parts.append(local_estimates(noise, total, mean, opt_state=seen))
            cursor += n
            ends.append(params)
        merged = jax.tree.map(lambda *x, w=weights: sum(a * b for a, b in zip(w, x, strict=True)), *ends)
        x0 = jax.tree.map(lambda a, b, alpha=alpha: a - alpha * (a - b), x0, merged)
        progress += gains[0] * alpha * sum(w * n for w, n in zip(weights, counts, strict=True))
        if parts:
            noise = update_from_estimates(noise, jax.tree.map(lambda *x: sum(x), *parts))
        told.append((noise.critical_batch_size, np.mean(gains), np.mean(factors), progress))
    return x0, told


def scaled(info):
    return info.noise, info.gain, info.lr_factor, info.progress


def check_told(infos, wanted):
    np.testing.assert_allclose([scaled(info) for info in infos], np.array(wanted, np.float64), rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES, ids=IDS)
def test_averaged_gradients_equal_the_slow_twin(problem, devices, close, rule, monkeypatch):
    monkeypatch.setattr("jaxche.replicas._scaling._FIRST_ROUNDS", 100)  # the twin measures in every round
    rounds = ROUNDS + [(1, 1)] * 6 if isinstance(rule, jaxche.AdamScale) else ROUNDS
    tx = optax.adam(0.05) if isinstance(rule, jaxche.AdamScale) else optax.sgd(0.05, momentum=0.9)
    trainer = jaxche.Trainer(problem.loss, tx, average="gradients", replicas=devices[:2], scaling=rule)
    state, infos = run(problem, trainer, rounds)
    wanted, told = averaged_gradients(problem, tx, rule, [info.examples // 8 for info in infos])
    close(trainer.params(state), wanted, rtol=1e-3, atol=1e-5)
    check_told(infos, told)
    assert bool(trainer.noise(state).preconditioned) == isinstance(rule, jaxche.AdamScale)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "merge"),
    [*((rule, "steps") for rule in RULES), (jaxche.AdaScale(), "batch"), (jaxche.LEGWScale(1, 96, 8), "fednova")],
)
def test_averaged_parameters_equal_the_slow_twin(problem, devices, close, rule, merge):
    rounds = [(3, 5), (1, 3), (4, 8), (4, 0), (1, 1)]
    tx = optax.adam(0.01) if isinstance(rule, jaxche.AdamScale) else optax.sgd(0.02)
    trainer = jaxche.Trainer(problem.loss, tx, merge=merge, replicas=devices[:2], scaling=rule, opt_state="local")
    state, infos = run(problem, trainer, rounds)
    assert [info.counts for info in infos] == [(3, 5), (1, 3), (4, 8), (4, 0), (1, 1)]
    wanted, told = averaged_parameters(problem, tx, rule, rounds, merge)
    close(trainer.params(state), wanted, rtol=1e-3, atol=1e-5)
    check_told(infos, told)


def test_sync_scales_by_the_replicas(problem, devices, close):
    tx, rule = optax.sgd(0.05), jaxche.AdaScale()
    trainer = jaxche.Trainer(problem.loss, tx, policy="sync", rows="equal", replicas=devices[:4], scaling=rule)
    state, history = trainer.fit(trainer.init(problem.params), problem.data, epochs=2, progress=False)
    wanted, told = averaged_gradients(problem, tx, rule, [4] * 6)
    close(trainer.params(state), wanted, rtol=1e-4, atol=1e-5)
    check_told(history, told)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [jaxche.AdaScale(), jaxche.AdamScale()], ids=["AdaScale", "AdamScale"])
@pytest.mark.parametrize("base", [None, 2])
def test_one_replica_compares_successive_gradients(problem, devices, close, rule, base):
    tx = optax.adam(0.05)
    arguments = {"replicas": devices[:1], "scaling": rule, "base_batch_size": base}
    trainer = jaxche.Trainer(problem.loss, tx, **arguments)
    state, history = trainer.fit(trainer.init(problem.params), problem.data, epochs=2, progress=False)

    params, tx, base = jax.tree.map(jnp.asarray, problem.params), scale_learning_rate(tx, rule), base or 8
    opt_state, noise = tx.init(params), noise_scale.init(params, base_batch_size=base, differenced=True)
    update = jax.jit(tx.update)
    measure = jax.jit(lambda noise, grads, seen: noise_scale.update(noise, grads, [8], opt_state=seen))
    for k, batch in enumerate(share(problem, 0, 24)):
        grads = gradient(problem, params, batch)
        if k % 12 == 0:  # a round looks through the second moments of its start
            seen = opt_state if isinstance(rule, jaxche.AdamScale) else None
        noise = measure(noise, jax.tree.map(lambda g: g[None], grads), seen)
        updates, opt_state = update(grads, opt_state, params, scale=8 / base, noise=noise)
        params = optax.apply_updates(params, updates)
    close(trainer.params(state), params, rtol=1e-3, atol=1e-5)
    assert history[-1].progress == pytest.approx(float(opt_state.progress), rel=1e-4)
    assert history[-1].noise == pytest.approx(float(noise.critical_batch_size), rel=1e-3)
    assert [info.gain == pytest.approx(1) for info in history] == [base == 8] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "power"), [(jaxche.LinearScale(), 1), (jaxche.SqrtScale(), 0.5)])
def test_factors_of_rules_without_noise(problem, devices, rule, power):
    gradients = {"average": "gradients", "replicas": devices[:2], "scaling": rule}
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.01), **gradients)
    assert [info.lr_factor for info in run(problem, trainer)[1]] == pytest.approx([n**power for n in (8, 4, 4, 6)])
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.01), base_batch_size=16, **gradients)
    assert run(problem, trainer)[1][0].lr_factor == pytest.approx(4**power)
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.01), replicas=devices[:2], scaling=rule)
    assert run(problem, trainer, [(1, 3)])[1][0].lr_factor == pytest.approx((1 / 0.7) ** power)


def test_the_split_of_a_round_over_replicas_changes_nothing(problem, devices, close):
    arguments = {"average": "gradients", "replicas": devices[:2], "scaling": jaxche.AdaScale()}
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), **arguments)

    def train(rounds):
        state, infos = run(problem, trainer, rounds)
        return trainer.params(state), [scaled(info) for info in infos]

    wanted, told = train([(4, 4), (2, 2)])
    for rounds in ([(1, 7), (4, 0)], [(8, 0), (1, 3)], [(0, 8), (3, 1)]):
        params, numbers = train(rounds)
        close(params, wanted, rtol=1e-4)
        np.testing.assert_allclose(numbers, told, rtol=1e-4)


def test_a_smaller_last_batch_counts_by_its_examples(make_problem, devices):
    problem = make_problem(examples=44, batch_size=8)  # five batches of 8 and one of 4
    arguments = {"average": "gradients", "replicas": devices[:2], "scaling": jaxche.LinearScale()}
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.01), **arguments)
    _, infos = run(problem, trainer, [(2, 2), (1, 1)])
    assert [info.lr_factor for info in infos] == pytest.approx([4, 1.5])


def test_going_on_from_a_small_last_batch_keeps_the_base(make_problem, devices):
    problem = make_problem(examples=20, batch_size=8)
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.01), replicas=devices[:1])
    state, _ = trainer.round(trainer.init(problem.params), problem.data, counts=(2,))
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.01), replicas=devices[:1], scaling=jaxche.LinearScale())
    placement = {name: getattr(state, name) for name in ("epoch", "cursor", "round")}
    fresh = trainer.init(problem.params)
    fresh = type(fresh)(fresh.local_states, fresh.che, fresh.correction, **placement)
    state, info = trainer.round(fresh, problem.data, counts=(1,))
    assert info.lr_factor == pytest.approx(0.5)
    assert float(trainer.noise(state).base_batch_size) == 8


@pytest.mark.parametrize("average", ["parameters", "gradients"])
def test_changing_counts_never_recompiles(problem, devices, average):
    arguments = {"average": average, "replicas": devices[:2], "scaling": jaxche.AdaScale()}
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), **arguments)
    state, _ = run(problem, trainer, [(1, 1)])
    compiled, engine = trainer.compilations, trainer._engine
    programs = (engine._merge._program, engine._replicas[0]._programs._begin_program)
    before = [program._cache_size() for program in programs]
    for counts in [(1, 4), (5, 1), (0, 3), (2, 2)]:
        state, _ = trainer.round(state, problem.data, counts=counts)
    assert trainer.compilations == compiled == 2
    assert [program._cache_size() for program in programs] == before


@pytest.mark.parametrize("average", ["parameters", "gradients"])
def test_a_round_leaves_its_state_valid_and_repeats_bit_for_bit(problem, devices, same, average):
    arguments = {"average": average, "replicas": devices[:2], "scaling": jaxche.AdaScale()}
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), **arguments)
    start, _ = run(problem, trainer, [(2, 2)])
    ends = [trainer.round(start, problem.data, counts=(2, 4)) for _ in range(2)]
    same(ends[0][0].params, ends[1][0].params)
    assert scaled(ends[0][1]) == scaled(ends[1][1])


@pytest.mark.parametrize("mode", ["local", "average", "reset"])
def test_progress_outlives_what_a_merge_does_to_optimizer_states(problem, devices, mode):
    arguments = {"opt_state": mode, "replicas": devices[:2], "scaling": jaxche.LEGWScale(1, 96, 8)}
    trainer = jaxche.Trainer(problem.loss, optax.adam(0.01), **arguments)
    _, infos = run(problem, trainer, [(2, 2)] * 4)
    assert np.all(np.diff([info.progress for info in infos]) > 0)
    assert np.all(np.diff([info.lr_factor for info in infos]) > 0)


def test_low_precision_parameters_keep_their_dtype(devices):
    data = [np.eye(4, dtype=np.float32) * (i + 1) for i in range(6)]
    for average, replicas in (("parameters", 2), ("gradients", 2), (None, 1)):
        trainer = jaxche.Trainer(
            lambda w, b: jnp.mean((b @ w.astype(jnp.float32) - 1.0) ** 2),
            optax.sgd(0.01),
            average=average,
            replicas=devices[:replicas],
            scaling=jaxche.AdaScale(),
        )
        state, info = trainer.round(trainer.init(jnp.zeros(4, jnp.bfloat16)), data, counts=(3,) * replicas)
        assert trainer.params(state).dtype == jnp.bfloat16
        assert info.noise > 0


def test_the_record_reads_back_and_shows_scaling(problem, devices, told):
    arguments = {"average": "gradients", "replicas": devices[:2], "scaling": jaxche.AdaScale()}
    rounds = [(3, 5), (1, 3), (2, 4)]
    history = jaxche.History(run(problem, jaxche.Trainer(problem.loss, optax.sgd(0.1), **arguments), rounds)[1])
    assert told(jaxche.History.from_json(history.to_json())) == told(history)
    assert history.rows()[0]["gain"] == history[0].gain
    panel = next(axes for axes in history.plot().axes if axes.get_label() == "gain")
    assert [text.get_text() for text in panel.get_legend().get_texts()] == [
        "progress of a step (gain)",
        "learning rate",
    ]

    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2])
    plain = jaxche.History(run(problem, trainer, [(1, 1)])[1])
    assert trainer.noise(trainer.init(problem.params)) is None
    assert math.isnan(plain[0].noise)
    assert (plain[0].gain, plain[0].lr_factor) == (1.0, 1.0)
    assert math.isnan(jaxche.History.from_json(plain.to_json())[0].progress)
    assert "gain" not in plain.rows()[0]
    assert "gain" not in [axes.get_label() for axes in plain.plot().axes]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"scaling": "adascale"}, r"scaling='adascale'.*scaling=jaxche.AdaScale\(\)"),
        ({"scaling": jaxche.AdaScale}, r"scaling=jaxche.AdaScale\(\)"),
        ({"base_batch_size": 32}, r"scaling=jaxche.AdaScale\(\), base_batch_size=32"),
        ({"scaling": jaxche.AdaScale(), "base_batch_size": 0}, "base_batch_size=0"),
        ({"scaling": jaxche.AdaScale(), "base_batch_size": math.nan}, "base_batch_size=nan"),
        ({"scaling": jaxche.AdaScale(), "base_batch_size": True}, "base_batch_size=True"),
        ({"scaling": jaxche.AdaScale(), "base_batch_size": "8"}, "base_batch_size='8'"),
        ({"scaling": jaxche.AdamScale(), "opt_state": "reset"}, "opt_state='local'"),
    ],
)
def test_bad_arguments_are_named(problem, devices, arguments, named):
    good = {"loss_fn": problem.loss, "tx": optax.adam(0.1), "replicas": devices[:2]}
    with pytest.raises(ValueError, match=named):
        jaxche.Trainer(**(good | arguments))


@pytest.mark.parametrize("average", ["parameters", "gradients"])
def test_preconditioning_needs_second_moments(problem, devices, average):
    arguments = {"average": average, "replicas": devices[:2], "scaling": jaxche.AdamScale()}
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), **arguments)
    with pytest.raises(ValueError, match=r"optax.adam\(1e-3\)"):
        trainer.round(trainer.init(problem.params), problem.data)


@pytest.mark.parametrize("rule", [None, jaxche.AdaScale()], ids=["alone", "twice"])
@pytest.mark.parametrize("around", [lambda tx: tx, lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx)])
def test_a_scaled_optimizer_is_refused_with_the_line_to_write(problem, devices, around, rule):
    tx = around(scale_learning_rate(optax.sgd(0.1), jaxche.AdaScale()))
    trainer = jaxche.Trainer(problem.loss, tx, replicas=devices[:2], scaling=rule)
    with pytest.raises(ValueError, match=r"jaxche.Trainer\(loss_fn, optax.sgd\(0.1\), scaling=jaxche.AdaScale\(\)\)"):
        trainer.init(problem.params)


@pytest.mark.parametrize(
    ("rules", "named"), [((None, RULES[0]), "without scaling="), ((RULES[0], None), "with scaling=")]
)
def test_a_state_of_the_other_kind_is_refused(problem, devices, rules, named):
    first, second = (jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2], scaling=r) for r in rules)
    with pytest.raises(ValueError, match=named):
        second.round(first.init(problem.params), problem.data)


def test_processes_compare_rules_not_addresses(problem, devices):
    class Half:
        def lr_factor(self, scale, noise=None, progress=None):
            return jnp.float32(0.5)

    for rule, text in ((Half(), "Half"), (jaxche.SqrtScale(), "SqrtScale()"), (None, "None")):
        trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2], scaling=rule)
        assert trainer._settings.fingerprint["scaling"].endswith(text)
