"""Who goes on, how often, with which cadence; tests/multiprocess does it with real processes."""

import time
from dataclasses import replace
from types import SimpleNamespace

import optax
import pytest

import jaxche
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


def test_local_steps_end_after_the_round_in_which_a_newcomer_got_its_state():
    one = Membership(None, None)
    choice = Choice(ApplyPolicy.CADENCE, reason="local steps while a process that joins gets its state", since=9)
    given = TrainerState((), ElChe(2, 4), DivergenceCorrection(), round=10, choice=choice)
    assert one.after_round(given) is given
    one.newcomers = (1,)
    after = one.after_round(given)
    assert (after.choice.policy, after.choice.since, one.newcomers) == (ApplyPolicy.SYNC, 10, ())
    one.newcomers = (1,)
    without = replace(given, choice=None)  # of another policy
    assert one.after_round(without) is without
    one.newcomers = (1,)
    one.reset()
    assert one.newcomers == ()


def test_the_wait_for_the_state_of_a_newcomer_is_no_time_of_a_merge(problem, devices):
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), che=ElChe(2, 2), replicas=devices[:2])
    trainer._membership = SimpleNamespace(poll=lambda: time.sleep(0.2), newcomers=(1,), reset=lambda: None)
    state, info = trainer.round(trainer.init(problem.params), problem.data)
    assert info.counts == (2, 0)
    assert state.sync_ms == 0
    trainer._membership.newcomers = ()
    state, info = trainer.round(state, problem.data)
    assert min(info.counts) > 0
    assert state.sync_ms >= 200


def test_a_process_that_waits_for_admission_admits_nobody():
    one = Membership(None, SimpleNamespace(standby=True))
    one.poll()
    assert one._pending is None


@pytest.mark.parametrize("leads", [True, False])
def test_who_asks_is_admitted_or_told_why_not(leads):
    refused = {}
    requests = {
        2: {"incarnation": 5, "fingerprint": {"code": "a"}},
        3: {"incarnation": 2, "fingerprint": {"code": "b", "data": "c"}},
        4: {"incarnation": 3, "fingerprint": {"code": "a"}},
    }
    group = SimpleNamespace(standby=False, is_first=leads, members=(0, 1), candidates=lambda: requests)
    group.refuse = lambda process, incarnation, reason: refused.update({(process, incarnation): reason})
    group.broadcast = lambda value: value if leads else [{"2": 5}, [0, 1, 2]]  # as JSON
    settings = SimpleNamespace(processes_of_ranks=[(0,), (1,), (2,), (3,), (4, 5)])
    engine = SimpleNamespace(fingerprint={"code": "a"})
    one = Membership(SimpleNamespace(_settings=settings, _engine=engine), group)
    one.poll()
    assert one._pending == ({2: 5}, [0, 1, 2])
    reasons = {
        (3, 2): "it differs in code, data; run the same script and data everywhere",
        (4, 3): "its replica needs other processes too",
    }
    assert refused == (reasons if leads else {})


@pytest.mark.parametrize(("of_iterator", "is_sent"), [(7, True), (object(), False)])
def test_the_state_of_an_iterator_is_sent_if_it_is_exact_in_json(problem, devices, of_iterator, is_sent):
    class Iterator:
        def __init__(self):
            self._batches = iter([problem.data[i] for i in range(12)])

        def __iter__(self):
            return self

        def __next__(self):
            return next(self._batches)

        def get_state(self):
            return of_iterator

        def set_state(self, state):
            raise AssertionError

    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:1])
    data = jaxche.Stream(lambda epoch: Iterator())
    state, _ = trainer.round(trainer.init(problem.params), data, counts=(2,))
    given = Membership(trainer, None)._with_iterator(state, data)
    assert given.stream.states == ((7,) if is_sent else ())


class Members:
    """A group whose processes die, one when the others shrink, each time."""

    def __init__(self, *reached, members=(0,)):
        self._reached, self.members, self.shrunk = iter(reached), members, 0

    def shrink(self):
        self.shrunk += 1
        return [self.shrunk]

    def all_gather(self, value):
        found = next(self._reached)
        if isinstance(found, Exception):
            raise found
        return found

    def broadcast(self, value):
        return value


def remaining(group, processes_of_ranks, che=None):
    """The membership of a trainer, and the orders of its ranks."""
    orders = []
    engine = SimpleNamespace(order=[0, 1], connect=lambda local_states: None)
    engine.arrange = lambda order, local_states: orders.append(order)
    settings = SimpleNamespace(che=che, groups=Groups(), processes_of_ranks=processes_of_ranks)
    trainer = SimpleNamespace(_settings=settings, _engine=engine, _engines=[engine], policy=ApplyPolicy.CADENCE)
    return Membership(trainer, group), orders


def run_of_five(*hooks):
    """A run after five rounds, with the state before the last."""
    before, state = (TrainerState((), None, DivergenceCorrection(), round=round) for round in (4, 5))
    return SimpleNamespace(state=state, previous=before, history=jaxche.History(), hooks=hooks)


@pytest.mark.parametrize(("reached", "goes_on"), [([5, 4], 4), ([5, 5], 5)])
def test_a_round_is_merged_by_all_or_by_none(reached, goes_on):
    one, orders = remaining(Members(reached), [(0,), (1,)])
    run = run_of_five()
    one.recover(run, PeerLostError("failed"))
    assert (run.state.round, orders) == (goes_on, [[0]])


def test_a_death_while_others_agree_costs_another_try():
    group = Members(PeerLostError("another"), [5])
    one, orders = remaining(group, [(0,), (1,)])
    run = run_of_five()
    one.recover(run, PeerLostError("failed"))
    assert (run.state.round, group.shrunk, orders) == (5, 2, [[0]])


def test_processes_whose_replicas_are_not_whole_end_with_the_error():
    one, orders = remaining(Members([5], members=(0, 2)), [(0, 1), (2, 3)])
    error = PeerLostError("failed")
    with pytest.raises(PeerLostError, match="failed") as raised:
        one.recover(run_of_five(), error)
    assert raised.value is error
    assert error.__notes__ == ["process 1 died, and the remaining processes cannot continue"]
    assert orders == []


def test_a_death_while_hooks_are_told_of_one_costs_another_try():
    group, told = Members([5, 5], [5]), []

    class Told:
        def on_membership(self, run, shrunk):
            told.append(shrunk)
            if len(told) == 1:
                raise PeerLostError("another")

    one, orders = remaining(group, [(0,), (1,)])
    run = run_of_five(Told())
    one.recover(run, PeerLostError("failed"))
    assert (run.state.round, run.previous, told) == (5, None, [True, True])
    assert (group.shrunk, orders) == (2, [[0], [0]])
