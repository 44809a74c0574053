"""Reading the table that every host sees alike."""

import math

import numpy as np
import pytest

from jaxche.cadence import DivergenceCorrection, RoundPlan
from jaxche.data import SequenceReader
from jaxche.distributed import Group, RankError
from jaxche.replicas import LocalResult
from jaxche.replicas._table import Columns
from jaxche.training import NonFiniteLossError, PlanMismatchError, TrainerState, _non_finite
from jaxche.training import _round_end as module
from jaxche.training._plan import PlannedRound
from jaxche.training._round_end import RoundStatistics, host_rows

PLAN = RoundPlan(round=2, epoch=0, start=0, counts=(2, 1), epoch_size=9)


def planned(sync_ms=0.0, plan=PLAN):
    before = TrainerState((), None, DivergenceCorrection(), sync_ms=sync_ms)
    return PlannedRound(before, plan, SequenceReader([np.zeros(2)] * 9))


def table(rows=None, losses=(8.0, 12.0), plans=(PLAN, PLAN), **host):
    """Two replicas with 16 and 8 examples and one metric; other fields are ``name=(rank, value)``."""
    results = [LocalResult({}, 0, 10.0, rows=16), LocalResult({}, 0, 20.0, rows=8)]
    rows = [host_rows(planned(3.0 + r, plan), [r], [results[r]])[0] for r, plan in enumerate(plans)]
    sums = [[0.0, 16.0, losses[0], 4.0], [0.0, 8.0, losses[1], 8.0]]
    numbers = np.float32(np.concatenate([rows, sums], axis=1))
    for name, (rank, value) in host.items():
        numbers[rank, [*module.HOST_COLUMNS, "not_finite"].index(name)] = value
    return RoundStatistics(numbers, Columns(("mae",)))


def refuse(t, errors=None, merged=True, before=None):
    t.check(before or planned(), Group(), errors or {}, merged)


def test_reads():
    t = table()
    assert t.wall_ms == (10.0, 20.0)
    assert t.last_sync_ms == 3.5
    assert t.losses == (0.5, 1.5)
    assert t.loss == pytest.approx(20 / 24)
    assert t.metrics == {"mae": 0.5}
    assert not t.stop
    assert table(stop=(1, 1.0)).stop
    assert not t.is_divided
    assert table(divided=(1, 2.0)).is_divided
    refuse(t)


def test_plans_that_differ_stop_the_run():
    other = RoundPlan(round=2, epoch=0, start=0, counts=(1, 2), epoch_size=9)
    with pytest.raises(PlanMismatchError, match=r"counts=\(2, 1\).*ranks \[1\]"):
        refuse(table(plans=(PLAN, other)))


def test_rows_of_which_all_differ_within_agree_with_nobody_either():
    numbers = table()._numbers
    numbers[:, [module.HOST_COLUMNS.index(name) for name in ("plan_high", "plan_low")]] = module.DIFFERS
    with pytest.raises(PlanMismatchError, match=r"ranks \[0, 1\]"):
        refuse(RoundStatistics(numbers, Columns(("mae",))))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_names_its_rank(bad):
    before = planned()
    with pytest.raises(NonFiniteLossError, match="rank 1 became") as caught:
        refuse(table(losses=(8.0, bad)), before=before)
    assert (caught.value.rank, caught.value.round) == (1, 2)
    assert caught.value.state is before.state


def test_merges_that_are_waited_for_are_advised_where_they_run_beside_steps():
    with pytest.raises(NonFiniteLossError, match="Try a lower learning rate, overlap=0 or tx="):
        refuse(table(losses=(8.0, math.nan)), before=planned()._replace(overlapped=(1, 1)))
    with pytest.raises(NonFiniteLossError, match="Try a lower learning rate or tx="):
        refuse(table(losses=(8.0, math.nan)))


def test_a_state_that_is_not_finite_names_its_rank_and_its_batches():
    with pytest.raises(
        NonFiniteLossError, match=r"a state of rank 0 became.*batches 0 to 1 of epoch 0.*are finite"
    ) as caught:
        refuse(table(not_finite=(0, 1.0), count=(0, 2.0)))
    assert (caught.value.rank, caught.value.batches) == (0, ((0, 0), (0, 1)))


def test_a_replica_names_only_the_batches_that_it_trained_on():
    with pytest.raises(NonFiniteLossError, match="trained on batch 0 of epoch 0") as caught:
        refuse(table(not_finite=(0, 1.0), count=(0, 1.0)))
    assert caught.value.batches == ((0, 0),)


def test_a_merge_that_is_not_finite_names_all_batches():
    counts = table(count=(0, 2.0))._numbers
    counts[1, module.HOST_COLUMNS.index("count")] = 1
    with pytest.raises(NonFiniteLossError, match="the merged parameters") as caught:
        refuse(RoundStatistics(counts, Columns(("mae",))), merged=False)
    assert caught.value.rank is None
    assert caught.value.batches == ((0, 0), (0, 1), (0, 2))


def test_batches_are_listed_as_ranges():
    assert _non_finite._batch_names([(0, 7), (0, 8), (1, 0)]) == "batches 7 to 8 of epoch 0, batch 0 of epoch 1"
    assert _non_finite._batch_names([(2, 5), (2, 1), (2, 2)]) == "batches 1 to 2 and 5 of epoch 2"


def test_the_local_error_wins():
    with pytest.raises(OSError, match="disk") as caught:
        refuse(table(failed=(1, 1.0)), {1: OSError("disk")})
    assert "rank 1 in round 2" in caught.value.__notes__[0]


def test_an_error_of_another_process_is_told(monkeypatch):
    report = {"rank": 1, "kind": "OSError", "message": "disk", "trace": ""}
    monkeypatch.setattr(Group, "all_gather", lambda self, own, place="": [own, report])
    with pytest.raises(RankError, match="rank 1 failed in round 2"):
        refuse(table(failed=(1, 1.0)))
