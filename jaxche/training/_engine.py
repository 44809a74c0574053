"""The engine: runs and merges the replicas of this process, once they are prepared."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxche.cadence import AUTO_WIRES, RoundPlan
from jaxche.data import Feed, Reader, Threads
from jaxche.messages import brief
from jaxche.replicas import (
    Begin,
    Columns,
    Correction,
    DevicePlacement,
    EarlyResult,
    Exchanged,
    GroupPause,
    LocalResult,
    LocalRound,
    LocalState,
    Merged,
    MergeInFlight,
    MergeRules,
    Placement,
    Replica,
    ReplicaMesh,
    ToMerge,
    Unsent,
    are_accumulators,
    are_coded,
    are_hyperparams,
    are_plateaus,
    drop_replica_axis,
    fitted,
    free_rates,
    group_pauses,
    is_local,
    is_merged,
    spans_processes,
    stepped_params,
    unsent_of,
    without_replica_axis,
    without_sums,
)
from jaxche.sharding import batch_size, nbytes
from jaxche.training._non_finite import non_finite_error
from jaxche.training._plan import PlannedRound
from jaxche.training._settings import Settings
from jaxche.training._start_checks import check_trees, check_tx
from jaxche.training._state import TrainerState
from jaxche.training._state_dict import StateDict

# No limit; unlike infinity it is valid JSON.
MOST_ROWS = 2.0**40


class Ran(NamedTuple):
    """What the local steps of a round have left."""

    results: list[LocalResult]  # of each local replica
    unsent: Unsent | None = None  # what the table lacks, if it is exchanged beside the last steps
    exchanged: Callable[[], Exchanged] | None = None  # waits for that


class Engine:
    """Runs and merges the replicas of this process by the plans of the trainer, once they are prepared."""

    def __init__(self, settings: Settings):
        self._settings, scaling = settings, settings.scaling
        self._group = settings.group
        self.average = settings.average
        self._tx = settings.tx if scaling is None else scaling.transform(settings.tx)
        self._set_order(range(len(settings.placements)))
        self.columns = Columns()
        # Examples in a whole batch, once data is seen, and the reader of that data.
        self.batch_size, self._sized_by = 0, None
        self._code: dict[str, str] = {}
        self.fingerprint: dict[str, str] = {}
        self._rules: MergeRules | None = None
        # By the number of ranks, and by what is coded; JAX compiles each of these functions once.
        self._starts: dict[tuple[int, tuple[bool, ...]], Begin] = {}
        self._shapes: Any = None
        self._coded: Sequence[bool] = ()  # whether a merge sends each array of the optimizer's state as codes
        self._replica_mesh: Any = None
        self._merge: Any = None  # none before :meth:`prepare`
        # The wire of merges of parameters; under "auto" the trainer changes it, and the merges of both stay compiled.
        is_exact = settings.wire == "auto" or self.average == "gradients"
        self.wire = AUTO_WIRES[0] if is_exact else settings.wire
        self._merges: dict[str, Any] = {}
        self._replicas: list[Replica] = []
        self._memory: dict[int, dict[str, int]] = {}
        self._row_limits: dict[int, float] = {}
        self._form: Any = None  # of the state that was last checked
        self._opt_states_differ: bool | None = None
        self._keeps_opt_state: bool | None = None
        self._cut: Any = ()  # how the batches of the last round were joined and divided
        self.compile_ms = 0.0  # the longest compilation before a round
        self._pool = Threads(len(self.ranks), thread_name_prefix="jaxche-replica")

    def _set_order(self, order: Sequence[int]) -> None:
        """The ranks of the start of the run that are present, in their present order."""
        self.order, self.world_size = list(order), len(order)
        self._placements = [self._settings.placements[rank] for rank in order]
        self.ranks = [rank for rank, placement in enumerate(self._placements) if is_local(placement)]
        # The groups of present ranks, and the local replicas of each by their place in this process.
        self.groups = self._settings.groups.present(self.order)
        local = [[self.ranks.index(rank) for rank in group if rank in self.ranks] for group in self.groups.ranks]
        self._local_groups = [group for group in local if group]
        self._spanning = [rank for rank, placement in enumerate(self._placements) if spans_processes(placement)]
        # Whether a merge runs while the next round begins.
        self.overlaps = self._settings.overlap > 0 and self.world_size > 1

    def _set_layout(self, params: Any) -> None:
        """Lay out parameters of these shapes on each replica, and make the mesh of all replicas."""
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x)), params)
        if self._shapes != shapes:
            self._shapes, self._replicas = shapes, []
            # The wire "auto" may take codes later.
            if self._settings.wire != "float32" and self._settings.opt_state == "average":
                self._coded = are_coded(self._tx, shapes)
            self._replica_mesh = self._make_mesh(shapes)

    def _make_mesh(self, shapes: Any) -> Any:
        """The mesh of all replicas, for parameters of these shapes."""
        self._placements = [placement.with_layout(shapes) for placement in self._placements]
        idle = self._settings.overlap > 0 and self._settings.fleet is None  # whose merges run beside steps
        return ReplicaMesh(self._group, self._placements, self._settings.host, idle)

    def start(self, planned: PlannedRound) -> list[Feed]:
        """Start to read a round, one feed for each local replica, and compile its programs before any clock starts."""
        plan, given = planned.plan, planned.given
        # A step on a part of a batch may have no rows, and any step may be such a one: a replay runs all planned steps.
        counts = plan.counts if plan.shares else given.done or plan.counts
        ahead = sum(n - sent for n, sent in zip(plan.counts, planned.sent_after, strict=False))
        feeds = planned.reader.begin(plan, planned.state, self.ranks, counts, given.keeps, ahead)
        for replica, feed in zip(self._replicas, feeds, strict=True):
            # On one device a step whose pieces have unlike shapes runs them one after the other: their gradients add up
            # to that of the joined batch, and a local step makes an update for each shape.
            feed.divides = isinstance(replica.placement, DevicePlacement)
        self._compile_other_sizes(planned, feeds)
        return feeds

    def _compile_other_sizes(self, planned: PlannedRound, feeds: Sequence[Feed]) -> None:
        """Compile for the last batch of an epoch, which may be smaller, for new shares of rows, and after them.

        An error here occurs again in the run, and becomes part of the result. But if one process of a replica cannot
        read such a batch, it does not know the shapes that the others compute on, and the round is refused.
        """
        took_ms, takes = 0.0, self._takes(planned.given.donates)
        plan, local_states = planned.plan, planned.state.local_states
        cut = (plan.joined, plan.shares, plan.counts) if plan.shares else ()
        is_new, self._cut = cut != self._cut, cut
        errors: dict[int, Exception] = {}
        for position in range(max((len(feed.steps) for feed in feeds), default=0)):
            batches = []
            for replica, local, feed in zip(self._replicas, local_states, feeds, strict=True):
                step = feed.steps[position] if position < len(feed.steps) else ()
                is_first = is_new and (plan.shares or not position)
                if step and (is_first or any(piece.key[1] == plan.epoch_size - 1 for piece in step)):
                    try:
                        batches += [(replica, local, batch) for batch in feed.peek(position)]
                    except Exception as error:
                        errors.setdefault(replica.rank, error)
            if not batches:
                continue
            clock = time.perf_counter()
            compiled: list[tuple[Replica, LocalState, Any]] = []
            with contextlib.suppress(Exception):
                compiled = self.compile(batches, takes)
            for replica, local, batch in compiled:
                if not spans_processes(replica.placement):
                    with contextlib.suppress(Exception):
                        replica.warm_up(local, batch, takes)
            if compiled:
                took_ms += (time.perf_counter() - clock) * 1e3
        self.compile_ms = max(self.compile_ms, took_ms)
        if any(is_new or self._ends_epoch(planned, rank) for rank in self._spanning):
            found = [(error, rank) for rank, error in errors.items() if rank in self._spanning]
            self._group.raise_everywhere(*next(iter(found), (None, 0)), f"round {plan.round}")

    def _ends_epoch(self, planned: PlannedRound, rank: int) -> bool:
        return any(index == planned.plan.epoch_size - 1 for _, index in planned.batches(rank))

    def _takes(self, donates: bool) -> Sequence[str]:
        """The trees of a local state of which the steps take the large arrays, in a round that does not keep it."""
        return self._merge.takes if donates else ()

    def compile(
        self, batches: Sequence[tuple[Replica, LocalState, Any]], takes: Sequence[str] = ()
    ) -> list[tuple[Replica, LocalState, Any]]:
        """Compile steps for these batches of different replicas, all at once; returns those that were not compiled yet.

        They are traced in this thread, whose settings of JAX hold, e.g. those of a ``with`` statement around ``fit``.
        """
        lowered = [(one, compile) for one in batches if (compile := one[0].lower(*one[1:], takes)) is not None]
        list(self._pool.map(lambda found: found[1](), lowered))
        return [one for one, _ in lowered]

    def run(
        self,
        planned: PlannedRound,
        feeds: Sequence[Feed],
        rows: Callable[[Sequence[LocalResult]], np.ndarray],
        meanwhile: Callable[[], None],
    ) -> Ran:
        """Run the local steps of a round on all local replicas at once; results hold the errors of failed replicas.

        ``meanwhile`` is called while they run. If results are sent before the last steps, the exchange of the table is
        begun beside them, with the ``rows`` of these results. The error of a merge in flight is raised: it ends the
        round.
        """
        local_states = planned.state.local_states
        early = [EarlyResult(planned.sent_after[rank]) for rank in self.ranks if planned.sent_after]
        rounds = self._local_rounds(planned, early)

        def without_steps(index: int) -> LocalResult:
            return self._replicas[index].idle(local_states[index], rounds[index])

        def run_one(index: int, feed: Feed) -> LocalResult:
            groups = [pause for pause in rounds[index].pauses if isinstance(pause, GroupPause)]
            if not (feed.steps or groups):
                return without_steps(index)
            is_done = False
            try:
                result = self._replicas[index].run(local_states[index], feed, rounds[index])
                is_done = result.error is None
            finally:
                if groups and not is_done:
                    groups[0].merge.leave()
            if result.error is not None:
                feed.stop()
            return result

        def ready() -> ToMerge:
            sent = [one.result() for one in early]
            return ToMerge(planned.starts, [result.carry for result in sent], rows(sent))

        running: list[Future[LocalResult]] = []
        try:
            for index, feed in enumerate(feeds):
                running.append(self._pool.submit(run_one, index, feed))
            for one, future in zip(early, running, strict=False):
                future.add_done_callback(one.ends)
            exchanged = self._merge.exchange(ready) if early else None
            meanwhile()
            results = [one.result() for one in running]
        except BaseException:
            # Of a keyboard interrupt, too: what still runs would take batches and threads of the next round.
            for feed in feeds:
                feed.stop()
            if self._group.num_processes == 1:  # else the others may wait, and the interrupt ends this process
                wait(running)
            raise
        if planned.state.in_flight is not None:
            planned.state.in_flight.result()
        if not early:
            return Ran(results)
        last = tuple(planned.batches(rank)[n:] for rank, n in enumerate(planned.sent_after))

        def not_finite(index: int, steps: int) -> Exception:
            rank = self.ranks[index]
            what = f"the loss, a gradient, a parameter or a state of rank {rank} became NaN or infinite"
            return non_finite_error(planned, {rank: steps}, what, rank)

        return Ran(*unsent_of(early, results, last, self.columns, without_steps, not_finite), exchanged)

    def _local_rounds(self, planned: PlannedRound, early: Sequence[EarlyResult]) -> list[LocalRound]:
        """What each local replica is given for the round."""
        plan, scaling, unsent = planned.plan, self._settings.scaling, planned.state.unsent
        measured = plan.counts if scaling is None else scaling.measured_steps(plan)
        return [
            LocalRound(
                index=plan.number(rank),
                merge_scale=planned.scale._replace(stride=plan.total / max(plan.counts[rank], 1)),
                measured=measured[rank],
                time_limit_ms=planned.time_limit_ms,
                pauses=pauses,
                takes=self._takes(planned.given.donates),
                early=early[place] if early else None,
                unsent=unsent and unsent.sums[place],
            )
            for place, (rank, pauses) in enumerate(zip(self.ranks, self._pauses(planned), strict=True))
        ]

    def _pauses(self, planned: PlannedRound) -> list[list[Correction | GroupPause]]:
        """Where each local replica pauses in a round: for the merge in flight, and to merge with its group."""
        corrections: list[Correction | None] = [None] * len(self.ranks)
        if planned.state.in_flight is not None:
            corrections = [
                Correction(planned.overlapped[rank], planned.state.in_flight, i) for i, rank in enumerate(self.ranks)
            ]
        if planned.group_merges == 1:
            return [[one] if one else [] for one in corrections]
        counts = [planned.plan.counts[rank] for rank in self.ranks]
        averages = self._settings.opt_state == "average"
        return group_pauses(self._local_groups, counts, planned.group_merges, averages, corrections)

    def merge(
        self,
        planned: PlannedRound,
        ran: Ran,
        rows: Callable[[Sequence[LocalResult]], np.ndarray],
    ) -> Merged:
        """Merge the local replicas with those of all processes; ``rows`` makes the rows of the table.

        With ``overlap=`` only their table is exchanged, with the numbers of the merge that was in flight;
        :meth:`start_merge` begins the merge itself.
        """
        carries, in_flight = [result.carry for result in ran.results], planned.state.in_flight
        if not self.overlaps:
            given = ToMerge(self.fitted(planned.starts), carries, rows(ran.results))
            return self._merge(given, planned.given.donates)
        exchanged = ran.exchanged
        if exchanged is None:
            exchanged = self._merge.exchange(lambda: ToMerge(planned.starts, carries, rows(ran.results)))
        ended = self._merge.ended(planned.starts, carries, exchanged())
        return ended if in_flight is None else in_flight.seen_by(ended)

    def start_merge(
        self,
        planned: PlannedRound,
        results: Sequence[LocalResult],
        rows: np.ndarray,
        wall_ms: float,
        cost_ms: float | None,
        then: Callable[[Sequence[LocalState]], tuple[LocalState, ...]] | None,
    ) -> MergeInFlight:
        """Begin to merge the local replicas with those of all processes; see :meth:`OverlappedMerge.start`."""
        carries = [result.carry for result in results]
        if planned.state.unsent is not None:  # sums of the round before, which are no weights of this one
            sums = zip(carries, planned.state.unsent.sums, strict=True)
            carries = [without_sums(carry, before) for carry, before in sums]
        given = ToMerge(self.fitted(planned.starts), carries, rows)
        return self._merge.start(given, wall_ms, cost_ms, then)

    def settle(self) -> None:
        """Wait for a merge in flight, also for one of a state that was dropped."""
        for merge in self._merges.values() if self.overlaps else ():
            merge.wait()

    def free_run(self, local_states: Sequence[LocalState], batches: Sequence[Any], seconds: float) -> list[float]:
        """Batches per second of each replica, all running at once without merges."""
        rates = free_rates(self._group, self._replicas, local_states, batches, seconds, self._pool)
        return [rates[rank] for rank in range(self.world_size)]

    def measure_batches(self, reader: Reader, plan: RoundPlan) -> None:
        """Take the size of a whole batch from this data, if it is not that of the round before.

        Each process reads other batches of a sharded stream; the size that all planned with stays.
        """
        if reader is not self._sized_by and not reader.is_sharded:
            self._sized_by = reader
            # A batch that one process cannot read is refused in the round, by all processes together.
            with contextlib.suppress(Exception):
                self._measured(reader, plan)

    def _measured(self, reader: Reader, plan: RoundPlan) -> Any:
        """The first batch of the plan; measures a whole one."""
        batch, whole = reader.samples(plan)
        self._sized_by, self.batch_size = reader, batch_size(whole)
        for replica in self._replicas:
            replica.batch_rows = self.batch_size
        return batch

    def check_state(self, local_states: Sequence[LocalState], any_tx: bool = False) -> None:
        """Refuse the state of another trainer; with ``any_tx`` its optimizer may be another one."""
        if len(local_states) != len(self.ranks):
            raise ValueError(
                f"state has {len(local_states)} replicas in this process, and the trainer {len(self.ranks)}; write "
                "state = trainer.init(other.params(state), other.model_state(state)), with the trainer it is of as "
                "other"
            )
        if (views := local_states[0].views) and views.replica_mesh is self._replica_mesh:
            return  # from a merge of this engine
        for rank, placement, local in self.here(local_states):
            own, other = set(placement.devices.flat), jax.tree.leaves(local.params)[0].sharding.device_set
            if not other <= own:
                raise ValueError(
                    f"state is of a trainer whose replica {rank} is on {brief(sorted(other, key=str))}, and here it is "
                    f"on {brief(sorted(own, key=str))}; write state = trainer.init(other.params(state), "
                    "other.model_state(state)), with the trainer it is of as other"
                )
        form = jax.tree.structure(local_states[0])
        if self._form is None or form != self._form:
            check_trees(self._settings, local_states[0])
            if not any_tx:
                check_tx(self._settings, self._tx, local_states[0])
                self._form = form

    def adopted(self, state: TrainerState) -> TrainerState:
        """The state as this engine continues it, also if its last round was one of another engine or trainer."""
        if state.in_flight is not None and not self.overlaps:
            state = state.merged()
        # Each replica would update its own parameters with states that differ, or keep its own counts.
        if state.opt_states_differ and not self.opt_states_differ(state.local_states[0]):
            local_states = self._with_mean_opt_state(state.local_states)
            state = replace(state, local_states=local_states, opt_states_differ=False)
        if state.che is not None and state.che.overlap != self.overlap:
            state = replace(state, che=replace(state.che, overlap=self.overlap))
        return state

    def _with_mean_opt_state(self, local_states: Sequence[LocalState]) -> tuple[LocalState, ...]:
        """The local states with the mean of the optimizer states of all replicas."""
        self._set_layout(without_replica_axis(local_states[0].params))
        state_dict = StateDict(self._replica_mesh, ("opt_state",), self.world_size, local_states)
        with self._group.collective():
            mean = state_dict.pooled()["opt_state"]
            return jax.block_until_ready(state_dict.load({"opt_state": mean}, {}))

    def opt_states_differ(self, local: LocalState) -> bool:
        """Whether merges leave each replica an optimizer state of its own, or a part of one."""
        if self._opt_states_differ is None:
            opt_state = self._settings.opt_state
            # The rounding errors of coded moments stay with their replica, and so does what it has accumulated.
            differ = opt_state == "local" or (self._settings.wire != "float32" and opt_state == "average")
            differ = differ or any(are_accumulators(local.opt_state))
            # A reset leaves the rate of a plateau to its replica, and an injected one, which is that of its last step.
            rates = *are_plateaus(local.opt_state), *are_hyperparams(local.opt_state)
            differ = differ or (opt_state == "reset" and any(rates))
            # The key of a replica that takes more steps is split more often, and numbers of its steps have no mean.
            differ = differ or not all(map(is_merged, jax.tree.leaves(local.opt_state)))
            is_empty = not jax.tree.leaves(local.opt_state)  # as of plain SGD
            self._opt_states_differ = differ and not is_empty and self.average != "gradients"
        return self._opt_states_differ

    def keeps_opt_state(self, local: LocalState) -> bool:
        """Whether each replica may keep its own optimizer state: no plateau, and no parameters that make steps."""
        if self._keeps_opt_state is None:
            has_params = stepped_params(self._settings.tx, without_replica_axis(local.params))
            self._keeps_opt_state = not (has_params or any(are_plateaus(local.opt_state)))
        return self._keeps_opt_state

    def fitted(self, local_states: Sequence[LocalState]) -> tuple[LocalState, ...]:
        """The local states with residuals for this number of replicas."""
        if self._settings.wire == "float32":
            return tuple(local_states)
        moments = self._coded_moments
        return tuple(
            local._replace(residual=fitted(local.residual, moments(local), self.world_size, self._placements[rank]))
            for rank, local in zip(self.ranks, local_states, strict=True)
        )

    def _coded_moments(self, local: LocalState) -> list[Any]:
        """The arrays of the optimizer's state that a merge sends as codes."""
        return list(itertools.compress(jax.tree.leaves(local.opt_state), self._coded))

    def state_dict(self, local_states: Sequence[LocalState], differ: bool | None = None) -> StateDict:
        """The state of these replicas, to save or to send to an admitted process.

        ``differ`` is whether they have optimizer states of their own, which another engine may have left them. By
        default it is whether those of a checkpoint may be, also of merges beside steps.
        """
        self._set_layout(without_replica_axis(local_states[0].params))
        if differ is None:
            differ = self.opt_states_differ(local_states[0]) or any(self._settings.overlaps)
        own = ("model_state", "opt_state", "residual") if differ else ("model_state", "residual")
        return StateDict(self._replica_mesh, own, self.world_size, self.fitted(local_states))

    def lay_out(self, local_states: Sequence[LocalState]) -> None:
        """Lay out these states, to read and evaluate them."""
        self._set_layout(without_replica_axis(local_states[0].params))

    def here(self, local_states: Sequence[LocalState]) -> list[tuple[int, Placement, LocalState]]:
        """Rank, placement and state of each local replica."""
        return [(rank, self._placements[rank], local) for rank, local in zip(self.ranks, local_states, strict=True)]

    def map(self, function: Callable[[int, Placement, LocalState], Any], local_states: Sequence[LocalState]) -> Any:
        """The results of a function of rank, placement and state, for all local replicas at once."""
        return self._pool.map(lambda one: function(*one), self.here(local_states))

    # The tree of one replica without its leading axis.
    unreplicate = staticmethod(jax.jit(drop_replica_axis))

    def view(self, name: str, trees: Sequence[Any]) -> Any:
        """The ``[R, ...]`` view over all replicas of one named tree per local replica."""
        return self._replica_mesh.stack([{name: tree} for tree in trees])[name]

    @property
    def overlap(self) -> float:
        """The part of a round that runs beside the merge of the round before it."""
        return self._settings.overlap if self.overlaps else 0.0

    @property
    def processes_of_present_ranks(self) -> list[tuple[int, ...]]:
        """The processes of each rank that takes part now."""
        return [self._settings.processes_of_ranks[one] for one in self.order]

    @property
    def merged_bytes(self) -> int:
        """The bytes of the arrays that each replica adds to a merge."""
        return 0 if self.world_size == 1 else nbytes(self._shapes)

    @property
    def can_exchange_early(self) -> bool:
        """Whether the table of a round may be exchanged beside its last steps."""
        return self.overlaps and self._merge.can_exchange_early

    @property
    def sent_bytes(self) -> int:
        """The bytes that each replica sends in a merge, once it is compiled."""
        return (self._merge.nbytes or 0) if self.world_size > 1 and self._merge is not None else 0

    @property
    def max_rows(self) -> Sequence[float]:
        """The largest step of each rank in rows: as given, or as the memory of its devices allows."""
        if self._settings.max_rows is not None:
            return [self._settings.max_rows[one] for one in self.order]
        return [self._row_limits.get(one, MOST_ROWS) for one in self.order]

    @property
    def mesh(self) -> Mesh | None:
        """The mesh of the first replica; None if it has no mesh."""
        return getattr(self._placements[0], "mesh", None)

    @property
    def devices(self) -> list[np.ndarray]:
        """The devices of each replica that takes part."""
        return [placement.devices for placement in self._placements]

    @property
    def memory(self) -> list[dict[str, int]]:
        """Bytes that a round needs on a device of each replica; empty before the first round."""
        known = {rank: self._memory[one] for rank, one in enumerate(self.order) if one in self._memory}
        return [{"rank": rank} | row for rank, row in known.items()]

    @property
    def is_prepared(self) -> bool:
        """Whether the programs of these replicas are compiled."""
        return bool(self._replicas)

    @property
    def replicas(self) -> Sequence[Replica]:
        """The replicas of this process; none before they are compiled."""
        return self._replicas
