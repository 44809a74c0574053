"""One replica's clock and its compiled steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxche.cadence import Piece
from jaxche.data import Feed, ReadyFeed, SequenceReader
from jaxche.distributed import Group
from jaxche.replicas import _replica
from jaxche.replicas._placement import DevicePlacement, add_replica_axis, drop_replica_axis
from jaxche.replicas._programs import Carry, FrozenArrays, LocalPrograms, LocalState
from jaxche.replicas._replica import LocalRound, Replica
from jaxche.replicas._results import EarlyResult
from jaxche.replicas._table import Columns
from jaxche.training import PaceError


@pytest.fixture
def make(devices):
    def build(average="parameters", pace_ms=None, loss=lambda w, b: jnp.mean((w - b) ** 2)):
        tx = optax.sgd(0.1)
        placement = DevicePlacement(devices[3])
        programs = LocalPrograms(placement, FrozenArrays(loss), tx, average, 0, Columns(), None, False, {})
        local = jax.device_put(
            add_replica_axis(LocalState(jnp.zeros(()), tx.init(jnp.zeros(())), None, None)), devices[3]
        )
        return Replica(Group(), 3, placement, programs, pace_ms, 4), local

    return build


def test_lift_and_first_undo_each_other():
    tree = {"a": jnp.arange(3), "k": jax.random.key(1)}
    assert jax.tree.map(jnp.shape, add_replica_axis(tree)) == {"a": (1, 3), "k": (1,)}
    assert jax.tree.map(jnp.shape, drop_replica_axis(add_replica_axis(tree))) == {"a": (3,), "k": ()}


@pytest.mark.parametrize("average", ["parameters", "gradients"])
def test_steps_stay_on_their_device_and_leave_the_start_alone(make, devices, average):
    replica, local = make(average)
    result = replica.run(local, ReadyFeed([np.ones(4, np.float32)] * 3))
    assert result.error is None
    assert result.steps == 3
    assert {x.device for x in jax.tree.leaves(result.carry)} == {devices[3]}
    assert float(local.params[0]) == 0.0
    if average == "parameters":
        assert float(result.carry.params[0]) == pytest.approx(1 - 0.8**3)
    else:
        assert float(result.carry.grads[0]) == pytest.approx(3 * 4 * -2.0)  # weighted by examples
    assert result.carry.sums[0, 0] == 12


def test_a_loss_with_a_sharding_over_other_devices_is_told_what_to_leave_out(make, devices):
    mesh = jax.make_mesh((2,), ("data",), devices=devices[:2], axis_types=(jax.sharding.AxisType.Auto,))
    over_both = jax.sharding.NamedSharding(mesh, jax.P("data"))
    replica, local = make(loss=lambda w, b: jnp.mean((w - jax.lax.with_sharding_constraint(b, over_both)) ** 2))
    with pytest.raises(ValueError, match="incompatible devices") as caught:
        replica.lower(local, np.ones(4, np.float32))
    assert any("of rank 3: leave shardings over other devices" in note for note in caught.value.__notes__)


def test_the_clock_waits_for_the_last_step(make, monkeypatch):
    """On a clock that stands still, but for a second in the wait for what all steps have made."""
    now, wait, waited = [100.0], jax.block_until_ready, []

    def slow(tree):
        now[0] += 1.0
        waited.append(tree)
        return wait(tree)

    replica, local = make()
    batch = np.ones(4, np.float32)
    replica.warm_up(local, batch)
    monkeypatch.setattr(_replica.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(jax, "block_until_ready", slow)
    result = replica.run(local, ReadyFeed([batch] * 4))
    assert [type(one) for one in waited] == [Carry]
    assert np.array_equal(waited[0].params, result.carry.params)
    assert (result.steps, result.wall_ms) == (4, 1000.0)


def test_the_wait_for_a_merge_is_no_time_of_steps(make, monkeypatch):
    """A clock that stands still, but for the wait and for a later step."""
    now = [100.0]
    monkeypatch.setattr(_replica.time, "perf_counter", lambda: now[0])

    class Wait:
        after = 1

        def apply(self, local, carry, steps):
            now[0] += 5.0
            return carry, 5.0

    def batches():
        for ms in (0.0, 0.0, 0.25):
            now[0] += ms
            yield np.ones(4, np.float32)

    replica, local = make()
    result = replica.run(local, ReadyFeed(batches()), LocalRound(pauses=[Wait()]))
    assert result.error is None
    assert (result.steps, result.wall_ms) == (3, 250.0)


def test_a_late_replica_does_not_send_the_steps_that_it_leaves(make):
    replica, local = make()
    batches = [np.ones(4, np.float32)] * 4
    for limit_ms, steps in ((1e-9, 1), (None, 4)):
        feed, early = Feed(SequenceReader(batches), [(Piece((0, i)),) for i in range(4)]), EarlyResult(1)
        result = replica.run(local, feed, LocalRound(time_limit_ms=limit_ms, early=early))
        assert (result.error, result.steps, early.is_sent) == (None, steps, steps == 4)


def test_few_steps_are_in_flight_at_once():
    class Loss:
        waited = False

        def block_until_ready(self):
            self.waited = True

    losses, in_flight = [Loss() for _ in range(9)], _replica._InFlight(4)
    for loss in losses:
        in_flight.add(loss)
    # Each wait is for the older half.
    assert [i for i, loss in enumerate(losses) if loss.waited] == [1, 3, 5]


def test_an_error_becomes_part_of_the_outcome(make):
    def batches():
        yield np.ones(2, np.float32)
        raise OSError("gone")

    replica, local = make()
    result = replica.run(local, ReadyFeed(batches()))
    assert isinstance(result.error, OSError)
    assert float(result.carry.params[0]) == 0.0  # as if no step had been taken


def test_what_stops_a_round_from_beginning_is_part_of_the_outcome_too(make, monkeypatch):
    replica, local = make()
    begun, failures = replica.begin, [MemoryError("full")]

    def full_once(*args, **options):
        if failures:
            raise failures.pop()
        return begun(*args, **options)

    monkeypatch.setattr(replica, "begin", full_once)
    result = replica.run(local, ReadyFeed([np.ones(2, np.float32)]))
    assert isinstance(result.error, MemoryError)
    assert result.steps == 0


@pytest.mark.parametrize("broken", [{2}, {2, 3}, {0, 1, 2, 3}])
def test_other_batches_have_the_shapes_of_those_that_one_process_cannot_read(make, monkeypatch, broken):
    """Two epochs of 4, 4, 4 and 2 rows: the last batch of the first was read before the round."""

    class Data(list):
        def __getitem__(self, i):
            if reads and i in broken:
                raise OSError("gone")
            return super().__getitem__(i)

    monkeypatch.setattr(_replica, "spans_processes", lambda placement: True)
    batches, reads = [np.full(n, i, np.float32) for i, n in enumerate((4, 4, 4, 2))], []
    keys = [(epoch, i) for epoch in range(2) for i in range(4)]
    reader = SequenceReader(Data(batches))
    feed = Feed(reader, [(Piece(key),) for key in keys])
    replica, local = make()
    replica.lower(local, batches[3])
    feed.peek(3)
    feed.peek(7)
    reads.append(True)
    seen = list(replica._padded(feed))
    assert [len(batch) for batch in seen] == [4, 4, 4, 2] * 2
    for (_, i), batch in zip(keys, seen, strict=True):
        if i not in broken:
            np.testing.assert_array_equal(batch, batches[i])
    assert str(replica._read_error) == "gone"


def test_compiling_again_copies_nothing(make, monkeypatch):
    replica, local = make()
    replica.lower(local, np.ones(2, np.float32))()
    monkeypatch.setattr(replica, "begin", lambda *_: pytest.fail("a copy of the state"))
    assert replica.lower(local, np.ones(2, np.float32)) is None


def test_a_step_slower_than_its_pace_is_refused(make):
    replica, local = make(pace_ms=1e-4)
    with pytest.raises(PaceError, match=r"pace of rank 3 is 0\.0001 ms"):
        replica.warm_up(local, np.ones(4, np.float32))
    assert issubclass(PaceError, ValueError)


def test_a_new_shape_compiles_once(make):
    replica, local = make()
    for size in (2, 3, 2, 3, 3):
        replica.run(local, ReadyFeed([np.ones(size, np.float32)]))
    assert replica.compilations == 2
