"""A local replica: its compiled steps, the timing of its rounds, its memory, and its rate without merges."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxche.data import Feed, Key, ReadyFeed
from jaxche.distributed import Group
from jaxche.replicas._group_merge import GroupPause, Pause
from jaxche.replicas._packing import revived
from jaxche.replicas._placement import BatchPlacement, spans_processes
from jaxche.replicas._programs import Carry, Constants, LocalState, Programs, Steps
from jaxche.replicas._results import BatchOutputs, EarlyResult, LocalResult, of_step, with_sums
from jaxche.replicas._scaling import MergeScale
from jaxche.replicas._table import MetricsError
from jaxche.sharding import batch_size, check_numbers, nbytes_per_device

# Steps in flight per replica: enough that the device never waits for Python, few enough that the device does not hold
# hundreds of batches. With a time limit at most an eighth of the round, because steps in flight cannot be cancelled.
_IN_FLIGHT = 8

# The share of a device's memory that larger steps may fill: the merge needs some, and memory breaks into pieces.
_MEMORY_SHARE = 0.8

_NO_BATCH = object()


class _Clock:
    """The time of the steps of a round, without waits and compilations."""

    def __init__(self) -> None:
        self._start = self._due = time.perf_counter()
        self.compiled_s = 0.0

    @property
    def seconds(self) -> float:
        """The seconds of the steps so far."""
        return time.perf_counter() - self._start

    def skip(self, seconds: float) -> None:
        """Leave out a wait that has just ended."""
        self._start, self._due = self._start + seconds, self._due + seconds

    def skip_compilation(self, began: float) -> None:
        """Leave out a compilation that has just ended."""
        took_s = time.perf_counter() - began
        self.compiled_s += took_s
        self.skip(took_s)

    def pad(self, ms: float) -> None:
        """Wait until a step that has ended has taken this long."""
        self._due = max(self._due + ms / 1e3, time.perf_counter())
        time.sleep(max(0.0, self._due - time.perf_counter()))


class _InFlight:
    """The steps of a round that devices have not finished: a limited number of losses, and their outputs."""

    def __init__(self, limit: int):
        self._limit = limit
        self._losses: list[Any] = []
        self._pending: list[tuple[Any, int, Any]] = []  # on the device
        self._outputs: list[BatchOutputs] = []

    def add(self, loss: Any) -> None:
        """Add a step; wait for earlier ones if there are too many."""
        self._losses.append(loss)
        if len(self._losses) == self._limit:
            # Waiting wakes this thread up: wait for half of the steps at once, not for each.
            self._losses[self._limit // 2 - 1].block_until_ready()
            del self._losses[: self._limit // 2]

    def keep(self, outputs: tuple[Any, int, Any]) -> None:
        """Keep the outputs of a step, as arguments of ``of_step``, and move those of an earlier one to the host."""
        self._pending.append(outputs)
        if len(self._pending) > self._limit // 2:
            self._outputs += of_step(*self._pending.pop(0))

    def outputs(self) -> list[BatchOutputs]:
        """The outputs of all steps, on the host."""
        return self._outputs + [one for pending in self._pending for one in of_step(*pending)]


class PaceError(ValueError):
    """A step takes longer than the pace.

    Example:
      >>> issubclass(PaceError, ValueError)
      True
    """


class RoundMemory(NamedTuple):
    """Peak bytes on a device in the local steps of a round, without the merge."""

    rows: int  # of a step
    fixed: int
    of_rows: int  # in proportion to the rows
    by_purpose: dict[str, int]  # all of them, and "in all"


class LocalRound(NamedTuple):
    """What a replica is given for a round, beside its state and its batches."""

    index: int = 0  # the number of its first batch, for random keys
    merge_scale: MergeScale = MergeScale()
    measured: int = 0  # with scaled learning rates the first steps, which measure their gradients
    time_limit_ms: float | None = None  # after it no further step begins, unless the early result was sent
    pauses: Sequence[Pause] = ()  # in order, each after its steps, or after the last one; waits in them are not timed
    takes: Sequence[str] = ()  # the trees of which the steps delete the large arrays
    early: EarlyResult | None = None  # sent before the last steps
    unsent: Any = None  # sums of the round before


NO_ROUND = LocalRound()


class Replica:
    """A replica of this process."""

    def __init__(
        self,
        group: Group,
        rank: int,
        placement: BatchPlacement,
        programs: Programs,
        pace_ms: float | None,
        batch_rows: int,
    ):
        self._group = group
        self.rank, self.placement, self._programs, self._pace_ms = rank, placement, programs, pace_ms
        # Rows of a whole batch: a step on a part of it is padded to that part of the pace.
        self.batch_rows = batch_rows
        self._executables: dict[Any, tuple[Steps, int]] = {}  # with the rows of a batch
        self._padding: Any = None
        self._read_error: Exception | None = None
        self._taken: Sequence[tuple[Key, slice]] = ()  # the batches of the present step
        self.compilations = 0

    def begin(
        self, local: LocalState, index: int, merge_scale: MergeScale = NO_ROUND.merge_scale, takes: Sequence[str] = ()
    ) -> tuple[Constants, Carry]:
        """The constants and the carry of a round before its first step."""
        return self._programs.begin(local, np.uint32(index % 2**32), merge_scale, takes)

    def _executable(self, batch: Any, begun: tuple[Constants, Carry]) -> tuple[Steps, int, Any]:
        """The steps compiled for the shapes of this batch, its rows, and the batch on the devices."""
        try:
            batch = self.placement.put(batch)
        except TypeError:
            check_numbers(batch)  # the first batch was checked, and this is a later one
            raise
        if (key := _shapes_of(batch)) not in self._executables:
            self._lower(batch, begun)()
        return *self._executables[key], batch

    def lower(self, local: LocalState, batch: Any, takes: Sequence[str] = ()) -> Callable[[], None] | None:
        """Trace the steps for this batch; returns a function that compiles them in any thread, None if they are."""
        self._padding, placed = batch, self.placement.put(batch)
        if _shapes_of(placed) in self._executables:
            return None
        return self._lower(placed, self.begin(local, 0, takes=takes))

    def _lower(self, batch: Any, begun: tuple[Constants, Carry]) -> Callable[[], None]:
        rows, key = batch_size(batch), _shapes_of(batch)  # refuses ragged batches by name before XLA sees them
        start, carry = begun
        with self._named(batch):
            compiled = self._programs.lower(start, carry, batch)

        def compile() -> None:
            with self._named(batch):
                self._executables[key] = compiled(), rows
            self.compilations += 1

        return compile

    @contextlib.contextmanager
    def _named(self, batch: Any) -> Iterator[None]:
        """Errors in steps on this batch name it, or what it has unlike the first."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, MetricsError) and (unlike := self._unlike_the_first(batch)):
                raise ValueError(unlike) from error
            if self._taken:
                error.add_note(f"the step was on {self._where}")
            if "incompatible devices" in str(error):
                error.add_note(
                    f"a step runs on the devices of one replica, here of rank {self.rank}: leave shardings over other "
                    "devices, as of jax.lax.with_sharding_constraint and jax.shard_map, out of loss_fn and its arrays; "
                    "to shard the model, write strategy=jaxche.FullShard()"
                )
            if (rows := batch_size(batch)) != self.batch_rows:
                error.add_note(
                    f"it has {rows} rows, a whole batch {self.batch_rows}; if loss_fn needs whole batches, write "
                    "policy='sync', rows='equal' where rows are divided, and leave out a smaller last batch"
                )
            raise

    @property
    def _where(self) -> str:
        """The batches of the step that is being taken."""
        return ", ".join(f"batch {index} of epoch {epoch}" for (epoch, index), _ in self._taken) or "a batch"

    def _unlike_the_first(self, batch: Any) -> str | None:
        """The difference between a batch that cannot be compiled and the first, if it has other entries."""
        if not self._executables:
            return None
        structure = next(iter(self._executables))[0]
        first = jax.tree.unflatten(structure, [0] * structure.num_leaves)
        names = [[jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)] for tree in (first, batch)]
        if set(names[0]) == set(names[1]):
            return None
        lacks = ", ".join(name for name in names[0] if name not in names[1])
        return (
            f"{self._where} has {', '.join(names[1])}, and the first batch has {', '.join(names[0])}; every batch of "
            f"the data needs what loss_fn reads: {f'add {lacks}' if lacks else 'give all of them the same entries'}"
        )

    def warm_up(self, local: LocalState, batch: Any, takes: Sequence[str] = ()) -> None:
        """Run steps on a copy of the state until caches are warm; raises PaceError if a step exceeds the pace.

        If rounds take arrays of the state, there is no memory for a copy: then without steps, unless there is a pace.
        """
        if takes:
            _, carry = self.begin(local, 0, takes=takes)
            self._programs.finish(self._programs.marked(local, takes), carry)
            if not self._pace_ms:
                return
        start, carry = self.begin(local, 0)
        steps, _, batch = self._executable(batch, (start, carry))
        fastest, pace_ms = float("inf"), self._pace(batch)
        if steps.plain is not steps.measuring:
            carry, loss, *_ = steps.plain(start, carry, batch)
            loss.block_until_ready()
        for _ in range(3 if self._pace_ms else 1):
            clock = time.perf_counter()
            carry, loss, *_ = steps.measuring(start, carry, batch)
            loss.block_until_ready()
            fastest = min(fastest, (time.perf_counter() - clock) * 1e3)
        self._programs.finish(local, carry)
        if pace_ms and fastest > pace_ms and batch_size(batch) >= self.batch_rows:
            enough = np.ceil(1.3 * fastest)
            raise PaceError(
                f"pace of rank {self.rank} is {self._pace_ms:g} ms, but a step takes {fastest:.1f} ms; "
                f"give it at least {enough:g} ms, e.g. pace_ms={enough:g}, or make the model or the batch smaller"
            )

    def run(self, local: LocalState, feed: Feed, given: LocalRound = NO_ROUND) -> LocalResult:
        """Take one step on each batch of ``feed``, or as many as start within the time limit, but at least one.

        If several processes drive the replica, the first of them checks the time limit, and all take the same steps. A
        failed replica still takes part in the merge: its error is part of the result. It raises only if there is no
        memory for the copy of the state that the merge needs.
        """
        self._read_error, limit = None, _IN_FLIGHT
        if given.time_limit_ms is not None:
            limit = min(_IN_FLIGHT, max(2, len(feed.steps) // 8))
        is_late, takes, early = self._time_limit(given.time_limit_ms, limit), given.takes, given.early
        steps, rows, group_s, in_flight, pauses = 0, 0, 0.0, _InFlight(limit), list(given.pauses)
        try:
            constants, carry = self.begin(local, given.index, given.merge_scale, takes)
            if given.unsent is not None:
                carry = with_sums(carry, given.unsent)
            known = self._programs.marked(local, takes) if takes else local
            clock = _Clock()
            batches = iter(self._padded(feed))

            def so_far(carry: Carry, wall_ms: float) -> LocalResult:
                group_ms, compile_ms = 1e3 * group_s, 1e3 * clock.compiled_s
                return LocalResult(carry, steps, wall_ms, None, (), group_ms, compile_ms, feed.divided, rows)

            while True:
                is_due = early is not None and steps == early.after and not early.is_sent
                if is_due:
                    jax.block_until_ready(carry.sums)
                is_sent = early is not None and early.is_sent
                # A late replica leaves the next batch to later rounds, so it does not take it, nor does it send it.
                is_over = steps and not is_sent and is_late(clock, steps)
                if early is not None and is_due and not is_over:
                    carry = early.send(carry, feed, so_far(carry, 1e3 * clock.seconds))
                batch = _NO_BATCH if is_over else next(batches, _NO_BATCH)
                while pauses and (batch is _NO_BATCH or steps >= pauses[0].after):
                    pause = pauses.pop(0)
                    carry, waited_s = pause.apply(local, carry, steps)
                    clock.skip(waited_s)
                    group_s += waited_s if isinstance(pause, GroupPause) else 0.0
                if batch is _NO_BATCH:
                    break
                self._taken = feed.taken
                before, began = self.compilations, time.perf_counter()
                programs, taken, batch = self._executable(batch, (constants, carry))
                if self.compilations != before:
                    clock.skip_compilation(began)
                step = programs.measuring if steps < given.measured else programs.plain
                carry, loss, *kept = step(constants, carry, batch)
                steps += feed.ends_step
                rows += taken
                if kept and self._taken:
                    in_flight.keep((self._taken, taken, *kept))
                in_flight.add(loss)
                if self._pace_ms:
                    loss.block_until_ready()
                    clock.pad(self._pace(batch))
            jax.block_until_ready(carry)
            outputs = in_flight.outputs()
            wall_ms = 1e3 * clock.seconds if steps else 0.0
            # Before an error is raised: the other processes of the replica take part in this.
            carry = self._programs.finish(known, carry)
            if self._read_error is not None:
                raise self._read_error
            return so_far(carry, wall_ms)._replace(outputs=outputs)
        except Exception as error:
            carry = None  # frees what the steps have left
            alive = local._replace(params=revived(local.params), opt_state=revived(local.opt_state)) if takes else local
            return self.idle(alive, LocalRound(takes=takes))._replace(error=error)

    def _time_limit(self, limit_ms: float | None, in_flight: int) -> Callable[[_Clock, int], bool]:
        """Whether a round, by its clock and steps, is over its time limit; all processes of the replica agree."""
        if limit_ms is None:
            return lambda clock, steps: False
        limit_s = limit_ms / 1e3
        if not spans_processes(self.placement):
            return lambda clock, steps: clock.seconds > limit_s
        processes = sorted({device.process_index for device in self.placement.devices.flat})
        together = self._group.flag_broadcast(processes, f"rank {self.rank}")
        # Not before every step: the broadcast takes a millisecond.
        return lambda clock, steps: steps % in_flight == 0 and together(clock.seconds > limit_s)

    def _pace(self, batch: Any) -> float:
        """The milliseconds to which a step on this batch is padded."""
        if not self._pace_ms:
            return 0.0
        return self._pace_ms * batch_size(batch) / self.batch_rows

    def memory(self, local: LocalState, takes: Sequence[str]) -> RoundMemory:
        """Bytes that a round needs on a device, for the largest compiled batch."""
        compiled = self._executables.values()
        found = (_round_memory(local, steps.measuring, rows, _IN_FLIGHT, takes) for steps, rows in compiled)
        return max(found, key=lambda one: one.fixed + one.of_rows)

    def idle(self, local: LocalState, given: LocalRound = NO_ROUND) -> LocalResult:
        """The result of a round without steps."""
        _, carry = self.begin(local, 0, takes=given.takes)
        carry = self._programs.idle(local, carry)
        for pause in given.pauses:
            carry, _ = pause.apply(local, carry, 0)
        return LocalResult(with_sums(carry, given.unsent), 0, 0.0)

    def _padded(self, feed: Feed) -> Iterator[Any]:
        """The batches of a feed, padded after a failed read if several processes drive the replica.

        They wait for each other in each step, so this process takes other batches of the same shapes, those that can
        be read or else rows of the last one, and raises the error at the end.
        """
        if not spans_processes(self.placement):
            yield from feed
            return
        done = 0
        try:
            for batch in feed:
                self._padding = batch
                yield batch
                done += 1
        except Exception as error:
            self._read_error = error
            for position in range(done, len(feed.steps)):
                try:
                    batches = feed.peek(position)
                except Exception:
                    parts = [piece.rows(self.batch_rows) for piece in feed.steps[position]]
                    rows = sum(part.stop - part.start for part in parts)
                    batches = [jax.tree.map(lambda x, rows=rows: x[np.arange(rows) % len(x)], self._padding)]
                yield from batches


def _shapes_of(batch: Any) -> tuple[Any, ...]:
    """The structure of a batch, the shapes and dtypes of its arrays, and the settings of JAX for which it compiles."""
    leaves, treedef = jax.tree.flatten(batch)
    return (treedef, *((x.shape, x.dtype) for x in leaves), *numeric_settings())


def numeric_settings() -> tuple[Any, ...]:
    """The settings of JAX in this thread for which ``jit`` compiles again, as far as they change numbers."""
    config: Any = jax.config
    return config.jax_enable_x64, config.jax_default_matmul_precision


def _round_memory(local: LocalState, executable: Any, rows: int, in_flight: int, takes: Sequence[str]) -> RoundMemory:
    """The memory of a round on a copy of the state, but for the trees that it takes, with ``in_flight`` batches."""
    start, carry, batch = executable.args_info[0]
    _, carry_shardings, batch_shardings = executable.input_shardings[0]
    carry, carry_shardings = (one._replace(**dict.fromkeys(takes)) for one in (carry, carry_shardings))
    # Whole on each device. The other constants are arrays of the local state.
    frozen = sum(math.prod(x.shape) * x.dtype.itemsize for x in start.frozen)
    fixed = {
        "parameters": nbytes_per_device(local.params),
        "optimizer state": nbytes_per_device(local.opt_state),
        "model state": nbytes_per_device(local._replace(params=None, opt_state=None, residual=None, ema=None)),
        **({"moving average": nbytes_per_device(local.ema)} if local.ema is not None else {}),
        **({"unsent changes": nbytes_per_device(local.residual)} if local.residual is not None else {}),
        **({"frozen arrays": frozen} if frozen else {}),
        "working copy": nbytes_per_device(carry, carry_shardings),
    }
    of_rows = {
        # In a tuple: for a batch of one array that the loss does not read, the sharding is None.
        f"{in_flight} batches ahead": in_flight * nbytes_per_device((batch,), (batch_shardings,)),
        "activations, gradients": executable.memory_analysis().temp_size_in_bytes,
    }
    sizes = sum(fixed.values()), sum(of_rows.values())
    return RoundMemory(rows, *sizes, fixed | of_rows | {"in all": sum(sizes)})


def row_limit(memory: RoundMemory, placement: BatchPlacement) -> float:
    """The most rows of a step for which devices have memory; infinite if theirs is not known."""
    here = [device for device in placement.devices.flat if device.process_index == jax.process_index()]
    limits = [(device.memory_stats() or {}).get("bytes_limit", math.inf) for device in here]
    return max(float(memory.rows), memory.rows * (_MEMORY_SHARE * min(limits) - memory.fixed) / max(memory.of_rows, 1))


def free_rates(
    group: Group,
    replicas: Sequence[Replica],
    local_states: Sequence[LocalState],
    batches: Sequence[Any],
    seconds: float,
    pool: Executor,
) -> dict[int, float]:
    """Batches per second of each rank of all processes, all running at once; the local states are not changed."""
    # The processes of one replica must stop after the same step, so these count steps instead of seconds.
    spanning = {
        replica.rank: (replica, local)
        for replica, local in zip(replicas, local_states, strict=True)
        if spans_processes(replica.placement)
    }
    tried = {rank: replica.run(local, ReadyFeed(batches)) for rank, (replica, local) in spanning.items()}
    error = next((result.error for result in tried.values() if result.error), None)
    group.raise_everywhere(error, replicas[0].rank, "the measurement of rates")
    times = {rank: result.wall_ms / len(batches) for rank, result in tried.items()}
    together = group.all_gather(times)  # and all start together
    agreed = {
        rank: math.ceil(seconds * 1e3 / max(part[str(rank)] for part in together if str(rank) in part))
        for rank in spanning
    }

    def run_one(replica: Replica, local: LocalState) -> float:
        until = time.perf_counter() + seconds
        ready = itertools.cycle(batches)
        if replica.rank in agreed:
            ready = itertools.islice(ready, agreed[replica.rank])
        else:  # at least one, however short the time
            rest = itertools.takewhile(lambda _: time.perf_counter() < until, ready)
            ready = itertools.chain(itertools.islice(ready, 1), rest)
        result = replica.run(local, ReadyFeed(ready))
        if result.error:
            raise result.error
        return result.steps / result.wall_ms * 1e3

    with group.errors_everywhere(replicas[0].rank, "the measurement of rates"):
        ran = list(pool.map(run_one, replicas, local_states))
    rates = {replica.rank: rate for replica, rate in zip(replicas, ran, strict=True)}
    return {int(rank): rate for part in group.all_gather(rates) for rank, rate in part.items()}
