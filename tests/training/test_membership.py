"""Who goes on, how often, with which cadence; tests/multiprocess does it with real processes."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from jaxche.cadence import ApplyPolicy, Choice, DivergenceCorrection, ElChe, RowShares
from jaxche.distributed import PeerLostError
from jaxche.training._groups import Groups
from jaxche.training._membership import Membership, ranks_of
from jaxche.training._state import TrainerState


def test_ranks_train_whose_processes_are_all_there():
    homes = [(0,), (1,), (2,), (2,)]
    assert ranks_of(homes, {0, 1, 2}) == [0, 1, 2, 3]
    assert ranks_of(homes, {0: "life", 2: "life"}) == [0, 2, 3]
    assert ranks_of([(0, 1), (2, 3)], {0, 1}) == [0]
    assert ranks_of([(0, 1), (2, 3)], {0, 1, 2}) == []  # process 2 would have nothing to do


def test_connections_that_break_again_and_again_end_the_run_unless_a_round_was_completed():
    one, error = membership(ElChe(2, 4)), PeerLostError("failed")
    for round in (4, 4, 4, 5, 5, 5):
        one._count_false_alarm(round, error)
    with pytest.raises(PeerLostError) as raised:
        one._count_false_alarm(5, error)
    assert "broke 4 times in round 5" in raised.value.__notes__[0]


def membership(che):
    order = list(range(che.world_size))
    settings = SimpleNamespace(che=che, groups=Groups())
    return Membership(SimpleNamespace(_settings=settings, _engine=SimpleNamespace(order=order)), None)


def test_what_was_learnt_of_a_rank_outlives_its_absence():
    che = ElChe(3, 4, 0.1).report_timing([40.0, 80.0, 160.0], [4, 4, 4], 1.0)
    known = membership(che)
    assert che.batch_counts[0] > che.batch_counts[2] > 0
    two = known.rearranged(che, [0, 2])
    assert (two.world_size, two.ms_per_batch) == (2, (10.0, 40.0))
    assert two.batch_counts == (che.batch_counts[0], che.batch_counts[2])
    known._trainer._engine.order = [0, 2]
    three = known.rearranged(two, [0, 2, 1])
    assert three.ms_per_batch == (10.0, 40.0, 20.0)
    # As many as fit into the time of the others.
    length = max(n * ms for n, ms in zip(two.batch_counts, two.ms_per_batch, strict=True))
    assert three.batch_counts == (*two.batch_counts, int(length / 20.0))
    assert known.rearranged(two, [0]) is None
    known._trainer._engine.order = [0]
    assert known.rearranged(None, [1, 0, 2]).ms_per_batch == (20.0, 10.0, 40.0)


def test_who_comes_back_slower_than_a_round_takes_one_step():
    known = membership(ElChe(3, 1, 0.1).report_timing([10.0, 10.0, 500.0], [1, 1, 1], 0.0))
    two = known.rearranged(known._trainer._settings.che, [0, 1])
    known._trainer._engine.order = [0, 1]
    quick = ElChe.from_dict(two.to_dict() | {"batch_counts": (3, 3)})
    assert known.rearranged(quick, [0, 1, 2]).batch_counts == (3, 3, 1)


def test_who_is_left_keeps_its_own_last_times():
    che = ElChe(3, 4, 0.1, tuner="steady")
    for wall in ([40.0, 80.0, 160.0], [44.0, 84.0, 164.0]):
        che = che.report_timing(wall, [4, 4, 4], 1.0)
    two = membership(che).rearranged(che, [2, 0])
    assert two.ms_samples == ((41.0, 11.0), (40.0, 10.0))
    assert two.ms_per_batch == tuple(che.ms_per_batch[rank] for rank in (2, 0))
    assert two.sync_samples == che.sync_samples


def test_of_whom_nothing_is_known_all_are_measured_anew_from_the_same_anchor():
    che = ElChe(3, 4)
    unknown = membership(che)
    unknown._trainer._engine.order = [0, 2]
    two = ElChe(2, 4, 0.1).report_timing([40.0, 80.0], [4, 4], 1.0)
    three = unknown.rearranged(two, [0, 2, 1])
    assert not three.is_calibrated
    assert three.batch_counts == (two.anchor,) * 3


def test_counts_that_the_limit_of_the_lead_held_back_stay_so_without_the_slowest():
    che = ElChe(3, anchor=2, max_anchor=2, max_batch_diff=0).report_timing([90.0, 30.0, 30.0], [1, 1, 1], 1.0)
    assert che.batch_counts == (2, 6, 6)  # rounds of (2, 2, 2)
    two = membership(che).rearranged(che, [1, 2])
    assert two.batch_counts == (2, 2)


def test_the_choice_between_sync_and_local_steps_is_made_again_from_exact_sync():
    che = ElChe(3, 4, 0.1).report_timing([40.0, 80.0, 160.0], [4, 4, 4], 1.0)
    one, shares = membership(che), RowShares().report([1, 1], [8, 8], [20.0, 50.0])
    one._group = SimpleNamespace(broadcast=lambda value: value)
    choice = Choice(ApplyPolicy.CADENCE, active=(True, False, True), reason="measured", since=3)
    state = TrainerState((), che, DivergenceCorrection(), round=9, row_shares=shares, choice=choice)
    two = one._of_ranks(state, [0, 2])
    assert (two.choice.policy, two.choice.active, two.choice.since) == (ApplyPolicy.SYNC, (), 9)
    assert two.choice.reason.startswith("not measured again")
    assert two.row_shares == RowShares()
    assert two.che.world_size == 2
    kept = RowShares(shapes_differ=True)
    assert one._of_ranks(replace(state, row_shares=kept), [0, 2]).row_shares == kept  # the data is the same
    one._trainer._engine.order = [0, 2]
    alone = one._of_ranks(two, [2])
    assert (alone.choice.policy, alone.che) == (ApplyPolicy.CADENCE, None)
