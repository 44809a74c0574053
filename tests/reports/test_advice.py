"""Advice on the batch size, by hand and by brute force on a virtual fleet."""

import math
from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxche
from jaxche.averaging import merge_weights
from jaxche.cadence import VirtualFleet
from jaxche.reports import advise
from jaxche.scaling import effective_replicas


def given_noise(noise, **changes):
    wanted = {
        "noise": noise,
        "base_batch_size": 32,
        "batch_size": 32,
        "ms_per_batch": [10.0, 20.0],
        "sync_ms": 20.0,
        "average": "gradients",
    }
    return advise(**(wanted | changes))


def choice(advice, counts):
    return next(c for c in (*advice.choices, advice.now) if c.counts == counts)


def test_averaged_gradients_by_hand():
    """b0 = b = 32 and B = 96: an update on 96 examples is worth gain(3) = (3 + 1) / (3 / 3 + 1) = 2 base steps."""
    advice = given_noise(96, now=(2, 1))
    assert advice.now.batch == 96
    assert advice.now.ms == 20 + 20
    assert advice.now.examples_per_second == pytest.approx(2400)
    assert advice.now.efficiency == pytest.approx(2 / 3)
    assert advice.now.goodput == pytest.approx(1600)
    # 4:2 is 192 examples in 60 ms: gain(6) = 4 / 1.5, efficiency 4/9, goodput 3200 * 4/9; rank 0 alone: 3200.
    assert choice(advice, (4, 2)).goodput == pytest.approx(3200 * 4 / 9)
    assert advice.best.counts == (1, 0)
    assert advice.best.goodput == pytest.approx(3200)
    assert advice.speedup == pytest.approx(2)


def test_averaged_parameters_by_hand():
    """Steps-weighted (2, 1): m_eff = (4/3 + 1/3) / (8/9 + 1/9) = 5/3; 5/3 local updates a round of this worth."""
    advice = given_noise(96, average="parameters", merge="steps", now=(2, 1))
    gain = 4 / (3 / (5 / 3) + 1)
    assert advice.now.batch == pytest.approx(32 * 5 / 3)
    assert advice.now.efficiency == pytest.approx(5 / 3 * gain / 3)
    assert advice.now.goodput == pytest.approx(5 / 3 * gain * 32 / 0.040)


def test_efficiency_is_the_gain_of_the_noise_scale_itself():
    noise = jaxche.noise_scale.init(jax.numpy.zeros(2), base_batch_size=8)
    noise = jaxche.noise_scale.update(noise, jax.numpy.array([[1.0, 0.0], [2.0, 1.0]]), [8, 32])
    advice = given_noise(float(noise.critical_batch_size), base_batch_size=8, now=(3, 1))
    scale = 4 * 32 / 8
    assert advice.now.efficiency == pytest.approx(float(noise.gain(scale)) / scale, rel=1e-5)


MODES = [("gradients", ""), *(("parameters", rule) for rule in ("steps", "batch", "fednova"))]
fleets = st.lists(st.floats(2, 100), min_size=2, max_size=4)
noises = st.floats(0, 1e5)


def brute_force(fleet, counts, average, merge, noise, base, size):
    """Base steps a second of some counts on the virtual fleet."""
    wall, sync = fleet.timings(counts, round=1)
    v_over_s = noise / base

    def gain(scale):
        return (v_over_s + 1) / (v_over_s / scale + 1)

    if sum(n > 0 for n in counts) == 1:
        worth, sync = gain(size / base), 0.0
    elif average == "gradients":
        worth = gain(sum(counts) * size / base)
    else:
        weights, alpha = merge_weights(merge, counts)
        worth = alpha * np.dot(weights, counts) * gain(effective_replicas(weights, counts, alpha) * size / base)
    return worth / (wall.max() + sync) * 1e3


@settings(max_examples=40)
@given(fleets, noises, st.floats(0.1, 200), st.sampled_from([8, 32, 100]), st.sampled_from(MODES))
def test_best_counts_on_a_virtual_fleet(times, noise, sync_ms, base, mode):
    average, merge = mode
    fleet = VirtualFleet(times, sync_ms=sync_ms)
    advice = advise(
        noise=noise,
        base_batch_size=base,
        batch_size=32,
        ms_per_batch=times,
        sync_ms=sync_ms,
        average=average,
        merge=merge or "steps",
        max_anchor=12,
    )
    rates = {c.counts: brute_force(fleet, c.counts, average, merge, noise, base, 32) for c in advice.choices}
    for c in advice.choices:
        assert c.goodput / base == pytest.approx(rates[c.counts], rel=1e-6)
    most = max(rates.values())
    assert rates[advice.best.counts] >= 0.99 * most * (1 - 1e-9)
    assert not [n for n, rate in rates.items() if rate > 0.99 * most * (1 + 1e-9) and sum(n) < sum(advice.best.counts)]
    # Every anchor of the whole fleet was tried, and rounds of one step each.
    assert {min(n) for n in rates if min(n)} == set(range(1, 13))
    assert (1,) * len(times) in rates


@settings(max_examples=40)
@given(noises, noises, fleets)
def test_monotonicity(one, other, times):
    low, high = sorted((one, other))
    quiet, loud = (given_noise(n, ms_per_batch=times, max_anchor=20) for n in (low, high))
    for a, b in zip(quiet.choices, loud.choices, strict=True):
        # The noisier, the more a large batch is worth against a small one; never more than each example in full.
        assert a.efficiency <= b.efficiency * (1 + 1e-9)
        assert b.efficiency <= 1 + 1e-9
    assert quiet.best.batch <= loud.best.batch
    whole = [c for c in quiet.choices if min(c.counts)]
    by_batch = sorted(whole, key=lambda c: c.batch)
    assert np.all(np.diff([c.efficiency for c in by_batch]) <= 1e-12)
    cheap, dear = (given_noise(high, ms_per_batch=times, sync_ms=ms, max_anchor=20) for ms in (1.0, 50.0))
    for a, b in zip(cheap.choices, dear.choices, strict=True):
        assert a.goodput >= b.goodput


def test_advice_for_one_replica():
    advice = given_noise(96, ms_per_batch=[10.0], sync_ms=0.0)
    assert advice.best == advice.now == choice(advice, (1,))
    assert choice(advice, (4,)).efficiency == pytest.approx((96 + 32) / (96 + 128))
    assert advice.line == ""
    assert "no multiple of the batch of 32 is better" in advice.summary


def test_advice_for_what_is_best_already():
    best = given_noise(2000).best
    advice = given_noise(2000, now=best.counts)
    assert (advice.line, advice.speedup) == ("", 1.0)
    counts = ":".join(map(str, best.counts))
    assert advice.summary.endswith(f"{counts} steps between merges (as now) reach a target as soon as any")
    assert repr(advice.best).startswith(f"Choice({counts} steps in {best.ms:.4g} ms, batch {best.batch:.4g}: ")


def test_table_of_advice():
    advice = given_noise(2000, now=(1, 1))
    lines = advice.table().splitlines()
    assert advice.best.counts != advice.now.counts
    assert lines[0].endswith(f"{advice.speedup:.2f} times as soon as 1:1")
    assert sum("soonest" in line for line in lines) == 1
    assert next(line for line in lines if line.endswith("now")).split()[0] == "1:1"
    assert next(line for line in lines if line.endswith("soonest")).split()[0] == ":".join(map(str, advice.best.counts))
    anchor = min(advice.best.counts)
    che = eval(advice.line.split("che=")[1], {"jaxche": jaxche})
    assert (che.world_size, che.anchor) == (2, anchor)
    # The cadence to write keeps its anchor, whatever merges cost.
    for sync in (0.1, 500.0):
        che = che.report_timing([10.0 * n for n in che.batch_counts], che.batch_counts, sync)
        assert che.anchor == anchor
    html = advice._repr_html_()
    assert html.count("<tr>") == len(advice.rows()) + 1
    assert "drift" not in html
    assert "drift" in given_noise(2000, average="parameters")._repr_html_()
    assert repr(advice) == advice.table()


def test_arguments_for_fewer_replicas_and_single_steps():
    assert given_noise(1, now=(1, 1)).line == "replicas=[devices[0]]"
    one_slow = given_noise(5000, ms_per_batch=[10.0, 10.0, 10.0, 10.0, 5000.0], sync_ms=0.5, max_anchor=1)
    assert one_slow.line == 'replicas=[devices[r] for r in [0, 1, 2, 3]], policy="sync"'
    equal = given_noise(200, ms_per_batch=[10.0] * 2, sync_ms=0.1, now=(4, 4))
    assert equal.best.counts == (1, 1)
    assert equal.line == 'policy="sync"'


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"noise": math.nan}, "noise=nan"),
        ({"noise": math.inf}, "noise=inf"),
        ({"sync_ms": -1.0}, "sync_ms"),
        ({"noise": "loud"}, "noise='loud' must be a finite number of at least 0; write e.g. noise=960.0"),
        ({"base_batch_size": 0}, "base_batch_size=0 must be a number above 0; write base_batch_size=32"),
        ({"batch_size": None}, "batch_size=None must be a number above 0; write batch_size=32"),
        ({"ms_per_batch": [10.0, 0.0]}, r"ms_per_batch\[1\]=0.0"),
        ({"max_anchor": 0}, "max_anchor=0"),
        ({"ms_per_batch": []}, r"ms_per_batch=\[\] and now=.* need one entry for each replica"),
        ({"max_anchor": 1.5}, "max_anchor=1.5 must be a whole number"),
        ({"max_batches": 0}, "max_batches=0 must be"),
        ({"now": (0, 0)}, r"now=\(0, 0\) must be steps"),
        ({"now": (-1, 1)}, r"now\[0\]=-1 must be a finite number of at least 0; write e\.g\. now=\(5, 2\)"),
        ({"now": (1, math.nan)}, r"now\[1\]=nan must be"),
        ({"now": (1,)}, r"now=\(1,\) need one entry for each replica"),
        ({"now": 3}, r"now=3 need one entry for each replica"),
        ({"ms_per_batch": 10.0}, r"ms_per_batch=10.0 and now=\(\) need one entry for each replica"),
        ({"average": np.array(["gradients", "x"])}, "average=.* is unknown"),
        ({"average": "gradient"}, "average='gradient' is unknown"),
        ({"merge": "mean"}, "merge='mean' is unknown"),
    ],
)
def test_invalid_numbers(change, named):
    with pytest.raises(ValueError, match=named):
        given_noise(**({"noise": 1.0} | change))


@pytest.fixture(scope="module")
def histories():
    """Short runs of every kind, on problems with noise."""
    rng = np.random.default_rng(0)
    data = jaxche.Batches(rng.normal(size=(256, 4)).astype(np.float32) + 1, batch_size=8, seed=0)

    def train(**arguments):
        trainer = jaxche.Trainer(lambda w, x: jax.numpy.mean((x - w) ** 2), optax.sgd(0.05), **arguments)
        return trainer.fit(trainer.init(np.zeros(4, np.float32)), data, progress=False)[1]

    two, rule = jax.devices()[:2], jaxche.AdaScale()
    return {
        "sync": train(policy="sync", rows="equal", replicas=two, scaling=rule, base_batch_size=4),
        "parameters": train(replicas=two, scaling=rule, merge="fednova"),
        "one": train(replicas=two[:1], scaling=rule),
        "plain": train(replicas=two),
    }


@pytest.mark.slow
def test_advice_of_a_history(histories):
    sync = histories["sync"].advice(max_anchor=30)
    assert (sync.average, sync.base_batch_size, sync.now.counts) == ("gradients", 4.0, (1, 1))
    assert sync.now.batch == 16 == histories["sync"][0].effective_batch
    assert sync.noise == histories["sync"][-1].noise
    scale = 16 / 4
    last = histories["sync"][-1]
    assert sync.now.efficiency == pytest.approx(last.gain / scale, rel=1e-4)
    parameters = histories["parameters"].advice()
    assert parameters.average == "parameters"
    info = next(i for i in histories["parameters"] if i.counts == parameters.now.counts)
    assert (info.merge, info.average, info.base_batch_size) == ("fednova", "parameters", 8.0)
    assert parameters.now.batch == pytest.approx(info.effective_batch)
    one = histories["one"].advice()
    assert one.now.counts == (1,)
    assert one.now.batch == 8
    again = jaxche.History.from_json(histories["parameters"].to_json())
    assert again.advice() == parameters
    assert isinstance(parameters, jaxche.reports.Advice)
    assert histories["sync"].rows()[0]["effective_batch"] == 16


def test_histories_without_advice(histories):
    with pytest.raises(ValueError, match=r"scaling=jaxche.AdaScale\(\)"):
        histories["plain"].advice()
    with pytest.raises(ValueError, match=r"scaling=jaxche.AdaScale\(\)"):
        jaxche.History().advice()
    rounds = histories["sync"]
    silent = jaxche.History([*rounds[:-1], replace(rounds[-1], noise=math.inf)])
    with pytest.raises(ValueError, match=r"noise of round \d+ is inf"):
        jaxche.History.from_json(silent.to_json()).advice()
    idle = jaxche.History([replace(info, counts=(1, 0)) for info in rounds])
    with pytest.raises(ValueError, match="rank 1 took no step"):
        idle.advice()


def test_rows_by_speed_count_as_parts_of_batches(histories):
    """75 and 25 rows of two joined batches are 1.5 batches and 0.5."""
    last = histories["sync"][-1]
    info = replace(last, counts=(1, 1), shares=(3, 1), joined=2, rows=(75, 25), examples=100, wall_ms=(30.0, 30.0))
    by_rows = jaxche.History([replace(info, sync_ms=1.0)]).advice()
    assert by_rows.now.counts == (1.5, 0.5)
    assert by_rows.now.ms == pytest.approx(31)
    whole = jaxche.History(
        [replace(info, shares=(), joined=0, counts=(3, 1), rows=(150, 50), examples=200, wall_ms=(60, 60), sync_ms=1.0)]
    ).advice()
    assert by_rows.choices == whole.choices
    assert "1.5:0.5" in by_rows.table()


def test_no_round_is_longer_than_an_epoch():
    """At this noise and merge cost the longest round is best. Ones of 8 + 4 and of 10 + 5 batches are next to 14."""
    dear = {"average": "parameters", "sync_ms": 500.0}
    assert sum(given_noise(1e5, **dear).best.counts) > 14
    advice = given_noise(1e5, max_batches=14, **dear)
    assert max(sum(choice.counts) for choice in advice.choices) == 12
    assert advice.best.counts in {c.counts for c in advice.choices}
    assert [c.counts for c in given_noise(1e5, max_batches=1, **dear).choices] == [(1, 0)]
    single = given_noise(1e5, ms_per_batch=[10.0], max_batches=14)
    assert max(choice.counts for choice in single.choices) == (14,)


def test_batches_of_an_epoch_are_those_of_the_history():
    """Five batches in an epoch, by rounds that end with it and by rounds that run on into the next epoch."""

    def history(*rounds):
        common = {"weights": (1.0,), "wall_ms": (30.0,), "sync_ms": 0.0, "loss": 1.0, "metrics": {}}
        common |= {"drift": 0.1, "drift_dir": 0.1, "losses": (1.0,), "anchor": 1, "verdict": "calm"}
        common |= {"noise": 1e5, "base_batch_size": 8.0, "progress": 1.0}
        return jaxche.History(
            jaxche.reports.RoundInfo(i, epoch, cursor, counts=(n,), planned=(n,), examples=8 * n, **common)
            for i, (epoch, cursor, n) in enumerate(rounds)
        )

    def longest(rounds):
        return max(sum(choice.counts) for choice in rounds.advice().choices)

    ends_with_it = history((0, 0, 3), (0, 3, 2), (1, 0, 3))
    assert longest(ends_with_it) == 5
    assert longest(ends_with_it[1:]) == 5
    assert longest(ends_with_it[2:]) == 3  # all that this one has
    runs_on = history((0, 0, 4), (0, 4, 4), (1, 3, 2))
    assert longest(runs_on) == 5


@pytest.mark.parametrize("policy", ["auto", "sync", "cadence", "async"])
def test_the_line_to_write_makes_a_trainer_of_any_policy(policy):
    """The line has all arguments that set the counts, so it replaces those of the run."""
    advice = given_noise(2000, now=(1, 1))
    arguments = eval(f"dict({advice.line})", {"jaxche": jaxche})
    options = {"policy": policy, "replicas": jax.devices()[:2]} | arguments
    trainer = jaxche.Trainer(lambda w, x: jax.numpy.mean((x - w) ** 2), optax.sgd(0.05), **options)
    assert trainer.policy is jaxche.ApplyPolicy.CADENCE
    che = trainer.init(np.zeros(4, np.float32)).che
    assert che is not None
    assert che.batch_counts == (min(advice.best.counts),) * 2
