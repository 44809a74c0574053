"""The virtual fleet: its arithmetic against plain sums, and its picture."""

import builtins
import math

import numpy as np
import pytest

from jaxche.cadence import ElChe, Slowdown, VirtualFleet


def test_a_round_by_hand():
    run = VirtualFleet([10, 20], sync_ms=5).run(ElChe(2, 10), 1)
    assert run.counts.tolist() == [[10, 10]]
    assert run.wall_ms.tolist() == [[100, 200]]
    assert run.wait_ms.tolist() == [[100, 0]]
    assert run.round_ms.tolist() == [205]
    assert run.efficiency == pytest.approx(20 / (205 * 0.15))
    assert run.equal_batch_efficiency == pytest.approx(2 / (25 * 0.15))
    assert run.equal_batch_limit == pytest.approx(2 / (20 * 0.15))


def test_published_share_of_equal_batches():
    # 2.5 : 1 wastes 43 % on the fast device.
    assert VirtualFleet([20, 50]).run(ElChe(2), 3).equal_batch_limit == pytest.approx(0.571, abs=1e-3)


def test_efficiency_is_the_slow_sum_over_rounds():
    fleet = VirtualFleet([20, 30, 50], jitter=0.1, sync_ms=4, slowdown=Slowdown(1, 5, 2.0), seed=3)
    run = fleet.run(ElChe(3, tuner="steady"), 12)
    done = could = equal = limit = 0.0
    for k in range(12):
        speeds = [20, 60 if k >= 5 else 30, 50]
        took = max(run.wall_ms[k]) + run.sync_ms[k]
        done += sum(run.counts[k])
        could += took * sum(1 / t for t in speeds)
        equal += 3 * took / (max(speeds) + run.sync_ms[k])
        limit += 3 * took / max(speeds)
    assert run.efficiency == pytest.approx(done / could)
    assert run.equal_batch_efficiency == pytest.approx(equal / could)
    assert run.equal_batch_limit == pytest.approx(limit / could)
    assert np.all(run.round_efficiency > 0)


def test_an_exchange_takes_a_trip_over_the_link_or_what_is_given():
    assert VirtualFleet([20, 50], sync_ms=5.0).exchange_cost_ms == 0.0
    assert VirtualFleet([20, 50], sync_ms=5.0, link_mbit=100.0).exchange_cost_ms == 5.0
    assert VirtualFleet([20, 50], sync_ms=5.0, link_mbit=100.0, exchange_ms=0).exchange_cost_ms == 0.0
    assert repr(VirtualFleet([20, 50], exchange_ms=2.0)).endswith("exchange_ms=2.0)")


def test_the_same_seed_gives_the_same_run_whatever_is_tuned():
    fleet = VirtualFleet([20, 50], jitter=0.15, seed=1)
    one, two = fleet.run(ElChe(2), 9), fleet.run(ElChe(2, tuner="steady"), 9)
    np.testing.assert_allclose(one.wall_ms / one.counts, two.wall_ms / two.counts)
    assert fleet == VirtualFleet(np.array([20, 50]), jitter=0.15, seed=1)
    assert fleet.timings((1, 1), 4)[1] != VirtualFleet([20, 50], jitter=0.15, seed=2).timings((1, 1), 4)[1]


def test_jitter_is_of_each_rank_and_of_the_merge_and_leaves_a_tenth():
    fleet = VirtualFleet([10.0] * 60, jitter=1.0, sync_ms=5.0)
    times = [(*(wall / 10), sync / 5) for wall, sync in (fleet.timings((1,) * 60, k) for k in range(20))]
    assert np.min(times) == 0.1
    assert len(set(np.ravel(times).round(9)) - {0.1}) == np.count_nonzero(np.ravel(times) > 0.1)


def test_compilation_is_in_the_first_round_only():
    fleet = VirtualFleet([10, 23], sync_ms=45, first_report_ms=[2500, 2500], first_sync_ms=770)
    wall, sync = fleet.timings((10, 10), 0)
    assert (wall.tolist(), sync) == ([2600, 2730], 815)
    wall, sync = fleet.timings((10, 10), 1)
    assert (wall.tolist(), sync) == ([100, 230], 45)
    assert fleet.run(ElChe(2), 100).counts[-1].tolist() == [65, 30]
    assert fleet.run(ElChe(2, tuner="steady"), 100).counts[-1].tolist() == [46, 20]


def test_rounds_are_planned_under_the_lead_limit():
    run = VirtualFleet([10, 50]).run(ElChe(2, max_batch_diff=4), 20)
    assert np.all(run.counts[:, 0] <= run.counts[:, 1] + 4)


@pytest.mark.parametrize("target", [0.02, 0.05, 0.1])
@pytest.mark.parametrize("speeds", [[20, 50], [20, 20, 40, 80], np.linspace(20, 80, 64)])
def test_steady_keeps_its_promise(speeds, target):
    run = VirtualFleet(speeds, sync_ms=2).run(ElChe(len(speeds), tuner="steady", overhead_target=target), 5)
    assert run.round_efficiency[2:].min() >= 1 / (1 + target) - 1e-9


def test_ten_thousand_ranks():
    run = VirtualFleet(np.linspace(20, 80, 10_000), jitter=0.02).run(ElChe(10_000, tuner="steady"), 5)
    assert run.counts.shape == (5, 10_000)
    assert run.efficiency > run.equal_batch_limit
    assert len(run.table()) < 1500


def test_table():
    run = VirtualFleet([20, 50]).run(ElChe(2), 10)
    text = run.table()
    assert repr(run) == text
    assert len(text.splitlines()) <= 12
    assert "efficiency" in text
    assert "controller" in text


@pytest.mark.parametrize("size", [2, 20])
def test_plot(size):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure = VirtualFleet(np.linspace(20, 80, size), jitter=0.05).run(ElChe(size), 10).plot()
    assert figure.axes[-1].get_xlabel() == "round"
    assert all(axes.get_ylabel() for axes in figure.axes)
    assert "(ms)" in figure.axes[-1].get_ylabel()
    figure.canvas.draw()
    # Closed, so that a notebook shows it once.
    assert not plt.get_fignums()


@pytest.mark.parametrize(
    ("counts", "batches", "message"),
    [((1,), None, r"counts=\(1\) for a fleet of 2 ranks"), ((1, 1), [1.0], r"batches=\[1.0\] for a fleet of 2 ranks")],
)
def test_timings_of_another_number_of_ranks(counts, batches, message):
    with pytest.raises(ValueError, match=message):
        VirtualFleet([20, 50]).timings(counts, 0, batches)


def test_plot_of_one_round_has_points():
    pytest.importorskip("matplotlib")
    for rounds, marker in ((1, "o"), (2, "None")):
        figure = VirtualFleet([20, 50]).run(ElChe(2), rounds).plot()
        lines = [line for axes in figure.axes for line in axes.lines if line.get_linestyle() != "--"]
        assert {line.get_marker() for line in lines} == {marker}
    figure.canvas.draw()
    assert all("." not in tick.get_text() for tick in figure.axes[0].get_xticklabels())


def test_plot_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    run = VirtualFleet([20, 50]).run(ElChe(2), 2)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"jaxche\[plot\]"):
        run.plot()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: VirtualFleet([]), "ms_per_batch="),
        (lambda: VirtualFleet([10, 0]), "ms_per_batch="),
        (lambda: VirtualFleet([10, math.inf]), "ms_per_batch="),
        (lambda: VirtualFleet([10, 20], jitter=-0.1), "jitter=-0.1"),
        (lambda: VirtualFleet([10, 20], jitter="a"), "jitter='a' must be a finite number"),
        (lambda: VirtualFleet(20), r"ms_per_batch=20 must be a list of numbers.*write e.g. ms_per_batch=\[10.0, "),
        (lambda: VirtualFleet(["fast"]), r"ms_per_batch=\['fast'\] must be a list of numbers"),
        (lambda: VirtualFleet([10, 20], seed=1.5), "seed=1.5 must be a whole number; write e.g. seed=0"),
        (
            lambda: VirtualFleet([10, 20], slowdown=2),
            r"slowdown=2 is not a Slowdown; write .*jaxche.cadence.Slowdown\(",
        ),
        (lambda: VirtualFleet([10, 20], sync_ms=-1), "sync_ms=-1"),
        (lambda: VirtualFleet([10, 20], first_sync_ms=-1), "first_sync_ms=-1"),
        (lambda: VirtualFleet([10, 20], exchange_ms=-1), "exchange_ms=-1 must be .*write e.g. exchange_ms=1.0"),
        (lambda: VirtualFleet([10, 20], link_mbit=0), "link_mbit=0 must be above 0; write e.g. link_mbit=1000.0, or"),
        (lambda: VirtualFleet([10, 20], first_report_ms=[1]), "first_report_ms has 1"),
        (lambda: VirtualFleet([10, 20], first_report_ms=[1, math.nan]), "first_report_ms=nan"),
        (lambda: Slowdown(0, 0, -2.0), "factor=-2.0 must be above 0; write e.g. factor=2.0"),
        (lambda: Slowdown(0, 0, 0), "factor=0 must be above 0"),
        (lambda: Slowdown(0.5, 0, 2.0), "rank=0.5 must be a whole number"),
        (lambda: VirtualFleet([10, 20], slowdown=Slowdown(2, 0, 2.0)), "slowdown.rank=2"),
        (lambda: VirtualFleet([10, 20]).run(ElChe(3), 5), "che.world_size=3"),
        (lambda: VirtualFleet([10, 20]).run(ElChe(2), 0), "rounds=0"),
    ],
)
def test_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_numbers_are_kept_as_floats():
    assert VirtualFleet([10, 23], sync_ms="5.0", fixed_ms="1") == VirtualFleet([10, 23], sync_ms=5.0, fixed_ms=1.0)
    assert VirtualFleet([10, 23], slowdown=Slowdown(1, 0, "2.0")).speeds(0).tolist() == [10.0, 46.0]


def test_repr_of_a_fleet_is_one_line():
    fleet = VirtualFleet([20, 50], sync_ms=8.0, slowdown=Slowdown(0, 10, 2.0))
    assert repr(fleet) == (
        "VirtualFleet(ms_per_batch=(20, 50), sync_ms=8.0, slowdown=Slowdown(rank=0, round=10, factor=2.0))"
    )
    assert eval(repr(fleet)) == fleet
    large = VirtualFleet([20.0] * 10_000, first_report_ms=[1000.0] * 10_000)
    assert len(repr(large)) < 150
