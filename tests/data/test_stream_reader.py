"""Which batches of a stream each replica takes, over simulated processes, and the position after a round."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxche
from jaxche.cadence import DivergenceCorrection, RoundPlan
from jaxche.data import StreamPosition, StreamReader
from jaxche.data._stream import EPOCH_SIZE
from jaxche.distributed import Group
from jaxche.training import TrainerState


class Process(Group):
    def __init__(self, index, count):
        self._place = index, count

    process_index = property(lambda self: self._place[0])
    num_processes = property(lambda self: self._place[1])


def state(**fields):
    return TrainerState((), None, DivergenceCorrection(), **fields)


def readers(lengths, shards, processes_of_ranks):
    """One reader for each process, of a stream of so many batches."""

    def source(length):
        return lambda epoch: (np.array([1000 * epoch + i]) for i in range(length))

    return [
        StreamReader(
            None, jaxche.Stream(source(length), shards=shards), Process(index, len(lengths)), processes_of_ranks
        )
        for index, length in enumerate(lengths)
    ]


def run_round(made, before, counts, processes_of_ranks, done=None, joined=0):
    """A round on all processes: the ids that each rank trained on, and the next state, equal on all."""
    found, ended, steps = [[] for _ in counts], [0] * len(counts), [0] * len(counts)
    for reader in made:
        reader.seek(before)
    shares = {"shares": counts, "joined": joined} if joined else {}
    plan = RoundPlan(before.round, before.epoch, before.cursor, tuple(counts), EPOCH_SIZE, **shares)
    plans = {reader.fitted(plan, before) for reader in made}
    assert len(plans) == 1
    (plan,) = plans
    for process, reader in enumerate(made):
        own = [rank for rank, processes in enumerate(processes_of_ranks) if process in processes]
        feeds = reader.begin(plan, before, own, done or plan.counts)
        for rank, feed in zip(own, feeds, strict=True):
            found[rank] = [int(i) for batch in feed for i in batch]
            steps[rank] = len(found[rank])
        end = reader.ended(plan, before, sum(steps[rank] for rank in own))
        for rank in own:
            ended[rank] = end
            assert not shares or steps[rank] >= 0
            shown = [before.epoch * 1000 + place for _, place in reader.share(plan, before, rank)]
            assert joined or shown[: steps[rank]] == found[rank]
    epoch, cursor = plan.end
    after = replace(before, round=plan.round + 1, epoch=epoch, cursor=cursor)
    states = [reader.advance(before, after, plan, steps, ended) for reader in made]
    assert states == [states[0]] * len(states)
    return plan, found, states[0]


TOPOLOGIES = [[(0,), (0,), (0,)], [(0,), (1,)], [(0,), (0,), (1,)], [(1,), (0,), (2,)]]


@settings(max_examples=80)
@given(st.data(), st.sampled_from(TOPOLOGIES), st.booleans())
def test_every_batch_is_taken_once_at_any_counts_on_any_processes(data, processes_of_ranks, shards):
    count = 1 + max(p for processes in processes_of_ranks for p in processes)
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=count, max_size=count))
    lengths = lengths if shards else lengths[:1] * count
    made, now, seen = readers(lengths, shards, processes_of_ranks), state(), {0: [], 1: []}
    while now.epoch < 2:
        counts = data.draw(
            st.lists(st.integers(0, 5), min_size=len(processes_of_ranks), max_size=len(processes_of_ranks))
        )
        counts = counts if any(counts) else [1] * len(counts)
        epoch = now.epoch
        _, found, now = run_round(made, now, counts, processes_of_ranks)
        assert any(found)  # no round without steps
        seen[epoch].append(found)
        if now.epoch != epoch:
            assert (now.epoch, now.cursor, now.stream) == (epoch + 1, 0, None)
    for epoch, rounds in seen.items():
        if shards and count > 1:
            for process, length in enumerate(lengths):
                ranks = [rank for rank, processes in enumerate(processes_of_ranks) if process in processes]
                own = [i for found in rounds for i in sorted(i for rank in ranks for i in found[rank])]
                assert own == [1000 * epoch + i for i in range(length)]
        else:
            own = [i for found in rounds for i in sorted(i for part in found for i in part)]
            assert own == [1000 * epoch + i for i in range(lengths[0])]
    for reader in made:
        reader.close()


def test_joined_batches_end_with_the_stream():
    made = readers([7], None, [(0,), (0,)])
    plan, found, now = run_round(made, state(), (2, 2), [(0,), (0,)], joined=4)
    assert sorted(found[0] + found[1]) == [0, 1, 2, 3]
    assert (now.cursor, now.stream) == (4, StreamPosition((4,), (False,)))
    plan, found, now = run_round(made, now, (2, 2), [(0,), (0,)], joined=4)
    assert (plan.joined, plan.counts) == (3, (2, 2))
    assert sorted(found[0] + found[1]) == [4, 5, 6]
    assert (now.epoch, now.cursor, now.stream) == (1, 0, None)


def test_ranks_without_batches_idle_until_the_others_end():
    ranks = [(0,), (1,)]
    made = readers([2, 5], True, ranks)
    _, found, now = run_round(made, state(), (3, 2), ranks)
    assert found == [[0, 1], [0, 1]]
    assert now.stream == StreamPosition((2, 2), (True, False))
    plan, found, now = run_round(made, now, (3, 2), ranks)
    assert (plan.counts, found) == ((0, 2), [[], [2, 3]])
    assert now.cursor == 7
    # The only rank of a plan has no batches: the others take one each.
    plan, found, now = run_round(made, now, (3, 0), ranks)
    assert (plan.counts, found) == ((0, 1), [[], [4]])
    assert now.epoch == 1


def test_a_rank_that_stops_early_goes_on_with_its_next_batch():
    ranks = [(0,), (1,)]
    made = readers([9, 9], True, ranks)
    assert all(reader.has_time_limit for reader in made)
    _, found, now = run_round(made, state(), (4, 4), ranks, done=(2, 4))
    assert found == [[0, 1], [0, 1, 2, 3]]
    assert now.stream.taken == (2, 4)
    assert now.pending_batches == ()
    _, found, _ = run_round(made, now, (4, 4), ranks)
    assert found == [[2, 3, 4, 5], [4, 5, 6, 7]]


def test_only_a_replica_alone_on_its_stream_has_a_time_limit():
    ranks = [(0,), (0,), (1,)]
    assert [reader.has_time_limit for reader in readers([1, 1], True, ranks)] == [False, True]
    assert not any(reader.has_time_limit for reader in readers([1, 1], False, ranks))
    assert not readers([1], None, [(0,)])[0].has_time_limit


def test_streams_of_different_lengths_are_refused_where_they_should_be_equal():
    made = readers([4, 6], False, [(0,), (1,)])
    with pytest.raises(ValueError, match=r"in epoch 0 they ended after \{0: 4\} batches, .*shards=True"):
        run_round(made, state(), (2, 2), [(0,), (1,)])


@pytest.mark.parametrize(
    ("before", "lengths", "named"),
    [
        (state(cursor=3), [9, 9], "2 streams, .*in the middle of epoch 0 of one sequence"),
        (
            state(cursor=3, stream=StreamPosition((1, 1, 1), (False,) * 3)),
            [9, 9],
            "of 3 streams; continue with the same number",
        ),
        (state(cursor=3, stream=StreamPosition((1, 2), (False,) * 2)), [9], "1 streams, .*of 2 streams"),
    ],
)
def test_a_position_of_other_streams_is_refused(before, lengths, named):
    (reader, *_) = readers(lengths, True, [(p,) for p in range(len(lengths))])
    with pytest.raises(ValueError, match=named):
        reader.seek(before)


def test_equal_streams_continue_on_any_number_of_processes():
    before = state(cursor=3, stream=StreamPosition((3,), (False,)))
    for processes_of_ranks in ([(0,)], [(0,), (1,)], [(0,), (1,), (2,)]):
        count = len(processes_of_ranks)
        made = readers([9] * count, False, processes_of_ranks)
        _, found, _ = run_round(made, before, (1,) * count, processes_of_ranks)
        assert found == [[3 + i] for i in range(count)]
    # A state in the middle of a sequence is at that batch of the stream.
    _, found, _ = run_round(readers([9], None, [(0,)]), state(cursor=5), (2,), [(0,)])
    assert found == [[5, 6]]


def test_an_empty_stream_has_no_sample():
    (reader,) = readers([0], None, [(0,)])
    reader.seek(state())
    with pytest.raises(ValueError, match="no batches in epoch 0; give each process at least one"):
        reader.samples(RoundPlan(0, 0, 0, (1,), EPOCH_SIZE))
