"""The engine: places, compiles, runs and merges the replicas of this process."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxche.averaging import outer_init
from jaxche.cadence import AUTO_WIRES, RoundPlan
from jaxche.data import Feed, Key, Reader, StreamReader, as_stream, is_same, is_stream, non_finite_leaves
from jaxche.distributed import Group
from jaxche.replicas import (
    HOST_COLUMNS,
    Columns,
    Correction,
    GroupPause,
    LocalPrograms,
    LocalResult,
    LocalState,
    Merge,
    Merged,
    MergeInFlight,
    MergeRules,
    MergeScale,
    OverlappedMerge,
    Placement,
    Replica,
    ReplicaMesh,
    Scaling,
    SingleReplica,
    add_replica_axis,
    check_rows,
    drop_replica_axis,
    fitted,
    free_rates,
    group_pauses,
    is_local,
    merge_carries,
    row_limit,
    spans_processes,
    with_previous_gradient,
    without_replica_axis,
    zero_residual,
)
from jaxche.sharding import batch_size, is_maker, nbytes
from jaxche.training._checks import check_state_of_tx
from jaxche.training._fingerprint import (
    check_streams,
    data_digest,
    digest,
    refuse_differences,
    refuse_other_values,
    update_digest,
)
from jaxche.training._groups import Groups
from jaxche.training._state import TrainerState
from jaxche.training._state_dict import StateDict


class Readers:
    """The readers of the present sequence and of the present stream, for all engines of a trainer.

    ``check`` refuses data that the trainer cannot read.
    """

    def __init__(self, group: Group, check: Callable[[Any], Any]):
        self._group, self._check = group, check
        self._readers: dict[bool, Reader | StreamReader] = {}

    def of(self, data: Any, processes_of_ranks: list[tuple[int, ...]]) -> Reader | StreamReader:
        """The reader of this data."""
        for reader in self._readers.values():
            if reader.data is data:
                return reader
        self._check(data)
        kind = is_stream(data)
        reader = self._readers.get(kind)
        if reader is None or not is_same(reader.data, data):
            if reader is not None:
                reader.close()
            reader = StreamReader(data, as_stream(data), self._group, processes_of_ranks) if kind else Reader(data)
            self._readers[kind] = reader
        return reader

    def wait(self) -> None:
        """Wait until the batches of a sequence that were requested are read."""
        if isinstance(reader := self._readers.get(False), Reader):
            reader.wait()


@dataclass(frozen=True)
class Settings:
    """The checked settings of a trainer."""

    group: Group
    loss: Any  # FrozenArrays(loss_fn), or a model in stages
    tx: optax.GradientTransformation
    average: str
    merge: str
    opt_state: str
    outer: optax.GradientTransformation | None
    placements: Sequence[Placement]  # of the replicas of all processes
    seed: int
    paces: Sequence[float | None]  # ms a step, for each replica
    scaling: Scaling | None
    host: bool  # merge on CPU devices
    readers: Readers
    joins_rows: bool = False  # steps may join rows of several batches
    wire: str = "float32"

    def coded_moments(self, local: LocalState) -> Any:
        """The optimizer's state if a merge averages it."""
        return local.opt_state if self.opt_state == "average" else ()

    overlaps: bool = False  # a merge runs while the next round begins
    virtual: bool = False  # on the clock of a virtual fleet
    groups: Groups = field(default_factory=Groups)  # that merge within a round

    def rules(self, tx: optax.GradientTransformation, scaling: Scaling | None) -> MergeRules:
        """The rules of the merge, with the optimizer and the scaling after the first batch has been read."""
        return MergeRules(self.average, self.merge, self.opt_state, tx, self.outer, scaling)


# For the messages of errors in Engine.prepare.
_LOOKED_AT = 200  # batches, after a number that is not finite
_PLACE = "the compilation before the first step"
# In JSON, unlike infinity.
_MOST_ROWS = 2.0**40


class Engine:
    """Runs the plans of rounds; policies and cadences are the trainer's."""

    _merge_type: Any = Merge  # of several replicas

    def __init__(self, settings: Settings):
        self._settings, scaling = settings, settings.scaling
        self._group = settings.group
        self._tx = settings.tx if scaling is None else scaling.transform(settings.tx)
        # All ranks at the start of the run, and the order of those that are present.
        self._all_placements, self._all_paces = list(settings.placements), list(settings.paces)
        self.order = list(range(len(self._all_placements)))
        self._placements, self._paces = list(self._all_placements), list(self._all_paces)
        self.world_size = len(self._placements)
        self.ranks = [rank for rank, placement in enumerate(self._placements) if is_local(placement)]
        self.columns = Columns()
        self.batch_size = 0  # examples in a whole batch, once the data is seen
        self._code: dict[str, str] = {}
        self.fingerprint: dict[str, str] = {}
        self._rules: MergeRules | None = None
        self._shapes: Any = None
        self._replica_mesh: Any = None
        self._merge: Any = None
        # The wire of merges; under "auto" the trainer changes it, and the merges of both wires stay compiled.
        self.wire = AUTO_WIRES[0] if settings.wire == "auto" else settings.wire
        self._merges: dict[str, Any] = {}
        self._replicas: list[Replica] = []
        self._memory: dict[int, dict[str, int]] = {}
        self._row_limits: dict[int, float] = {}
        self._form: Any = None  # of the state that was last checked
        self._cut: Any = None  # of the last round whose batches were joined
        self._digest: tuple[Any, str] | None = None
        self._pool = ThreadPoolExecutor(len(self.ranks), thread_name_prefix="jaxche-replica")

    def placement(self, params: Any, model_state: Any, opt_state: Any = None) -> tuple[LocalState, ...]:
        """Put the same parameters and states on every local replica."""

        def start(params: Any, model_state: Any, opt_state: Any) -> dict[str, Any]:
            tx = self._tx
            if opt_state is not None:
                tx = optax.GradientTransformation(lambda params: opt_state, self._settings.tx.update)
                tx = tx if self._settings.scaling is None else self._settings.scaling.transform(tx)
            outer_state = outer_init(self._settings.outer, params) if self._settings.outer else None
            scaled = self._settings.scaling.start(params) if self._settings.scaling else {}
            local = LocalState(params, tx.init(params), model_state, outer_state, **scaled)
            if self._settings.wire != "float32":  # "auto" may take codes later
                is_sharded = self._placements[0].makes_pieces
                residual = zero_residual(params, self._settings.coded_moments(local), self.world_size, is_sharded)
                local = local._replace(residual=residual)
            return add_replica_axis(local)._asdict()

        if is_maker(params) and not self._placements[0].makes_pieces:
            params = params()  # once, so that all replicas get the same numbers
        self._set_layout(jax.eval_shape(params) if is_maker(params) else params)
        return tuple(
            LocalState(**self._placements[rank].start(start, params, model_state, opt_state)) for rank in self.ranks
        )

    def _set_layout(self, params: Any) -> None:
        """Lay out parameters of these shapes on each replica, and make the mesh of all replicas."""
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x)), params)
        if self._shapes != shapes:
            self._shapes, self._replicas = shapes, []
            self._placements = [placement.with_layout(shapes) for placement in self._placements]
            self._replica_mesh = ReplicaMesh(self._group, self._placements, self._settings.host)

    @property
    def groups(self) -> list[list[int]]:
        """The present ranks of each group."""
        return self._settings.groups.present(self.order)

    @property
    def _local_groups(self) -> list[list[int]]:
        """The replicas of each group of this process, by their place in it."""
        places = {rank: place for place, rank in enumerate(self.ranks)}
        groups = [[places[rank] for rank in group if rank in places] for group in self.groups]
        return [group for group in groups if group]

    @property
    def overlaps(self) -> bool:
        """Whether a merge runs while the next round begins."""
        return self._settings.overlaps and self.world_size > 1

    @property
    def processes_of_ranks(self) -> list[tuple[int, ...]]:
        """The processes of each rank at the start of the run."""
        return [
            tuple(sorted({device.process_index for device in placement.devices.flat}))
            for placement in self._all_placements
        ]

    @property
    def processes_of_present_ranks(self) -> list[tuple[int, ...]]:
        """The processes of each rank that takes part now."""
        processes = self.processes_of_ranks
        return [processes[one] for one in self.order]

    def arrange(self, order: Sequence[int], local_states: Sequence[LocalState]) -> None:
        """Continue with these ranks of the start, renumbered in this order; compiled steps are kept."""
        replicas = dict(zip((self.order[rank] for rank in self.ranks), self._replicas, strict=False))
        self.order, self.world_size = list(order), len(order)
        self._placements = [self._all_placements[rank] for rank in order]
        self._paces = [self._all_paces[rank] for rank in order]
        self.ranks = [rank for rank, placement in enumerate(self._placements) if is_local(placement)]
        self._shapes = None
        self._set_layout(without_replica_axis(local_states[0].params))
        self._replicas = [replicas[order[rank]] for rank in self.ranks] if replicas else []
        for rank, replica in zip(self.ranks, self._replicas, strict=False):
            replica.rank = rank
        if replicas:
            self._set_merge(self._make_merge(local_states[0]))
            self._warm_up_merge(local_states)

    def view(self, name: str, trees: Sequence[Any]) -> Any:
        """The ``[R, ...]`` view over all replicas of one named tree per local replica."""
        return self._replica_mesh.stack([{name: tree} for tree in trees])[name]

    @property
    def merged_bytes(self) -> int:
        """The bytes of the arrays that each replica adds to a merge."""
        return 0 if self.world_size == 1 else nbytes(self._shapes)

    @property
    def sent_bytes(self) -> int:
        """The bytes that each replica sends in a merge, once it is compiled."""
        return (self._merge.nbytes or 0) if self.world_size > 1 and self._merge is not None else 0

    def state_dict(self, local_states: Sequence[LocalState]) -> StateDict:
        """The state of these replicas, to save or to send to an admitted process."""
        self._set_layout(without_replica_axis(local_states[0].params))
        # What the rounding of moments leaves stays with their replica.
        coded = self._settings.wire != "float32" and self._settings.opt_state == "average"
        alike = self._settings.average == "gradients" or (self._settings.opt_state != "local" and not coded)
        own = ("model_state", "residual") if alike else ("model_state", "opt_state", "residual")
        return StateDict(self._replica_mesh, own, self.world_size, self._fitted(local_states))

    def _fitted(self, local_states: Sequence[LocalState]) -> tuple[LocalState, ...]:
        """The local states with residuals for this number of replicas."""
        if self._settings.wire == "float32":
            return tuple(local_states)
        moments = self._settings.coded_moments
        return tuple(
            local._replace(residual=fitted(local.residual, moments(local), self.world_size, self._placements[rank]))
            for rank, local in zip(self.ranks, local_states, strict=True)
        )

    def with_previous_gradient(
        self, local_states: Sequence[LocalState], compares: bool | None = None
    ) -> tuple[LocalState, ...]:
        """The local states with or without a previous gradient in their noise scale.

        The default is what the steps need: a single replica compares successive gradients.
        """
        if self._settings.scaling is None or local_states[0].noise is None:
            return tuple(local_states)
        self._set_layout(without_replica_axis(local_states[0].params))
        compares = self._settings.scaling.solo if compares is None else compares
        noises = [{"noise": with_previous_gradient(local.noise, local.params, compares)} for local in local_states]
        placements = [self._placements[rank] for rank in self.ranks]
        return tuple(
            local._replace(**placement.move(noise))
            for local, placement, noise in zip(local_states, placements, noises, strict=True)
        )

    def check_state(self, local_states: Sequence[LocalState]) -> None:
        """Refuse the state of another trainer."""
        if len(local_states) != len(self.ranks):
            raise ValueError(
                f"state has {len(local_states)} replicas in this process, and the trainer {len(self.ranks)}; write "
                "state = trainer.init(params), with the parameters of the other trainer: other.params(state)"
            )
        form = jax.tree.structure(local_states[0])
        if self._form is None or form != self._form:
            self._check_opt_state(local_states[0])
            self._form = form

    def _check_opt_state(self, local: LocalState) -> None:
        if (local.noise is None) != (self._settings.scaling is None):
            raise ValueError(
                f"state is of a trainer {'without' if local.noise is None else 'with'} scaling=; start from this "
                "trainer's own: state = trainer.init(params)"
            )
        if (local.residual is None) != (self._settings.wire == "float32"):
            other = "one of few bytes" if self._settings.wire == "float32" else "'float32'"
            raise ValueError(
                f"state is of a trainer whose wire is {other}, and here wire={self._settings.wire!r}; start from "
                "its own: state = trainer.init(other.params(state))"
            )
        params, opt_state = without_replica_axis((local.params, local.opt_state))
        check_state_of_tx(self._tx, params, opt_state)

    def prepare(
        self, local_states: Sequence[LocalState], data: Any, plan: RoundPlan, fingerprint: dict[str, str]
    ) -> None:
        """Compile and warm up the programs of a round, and check that all processes agree; once.

        Raises:
          ValueError: a loss, batch or pace that cannot work, or processes that differ.
          RankError: another process raised such an error.
        """
        if self._replicas:
            return
        error, constants, data_seen = None, [], ""
        try:
            self._set_layout(without_replica_axis(local_states[0].params))
            if self._group.num_processes > 1:
                data_seen = self.data_digest(data)
            batch, whole = self.reader(data).samples(plan)
            self.batch_size = batch_size(whole)
            constants = self._build(local_states[0], batch, self.batch_size)
            for replica, local in zip(self._replicas, local_states, strict=True):
                replica.batch_rows = self.batch_size
                replica.compile(local, batch)
        except Exception as e:
            error = e
        try:
            # Nothing runs before all have compiled: if several processes drive a replica, each step waits for all.
            self._group.raise_everywhere(error, self.ranks[0], _PLACE)
            try:
                for replica, local in zip(self._replicas, local_states, strict=True):
                    replica.warm_up(local, batch)
            except Exception as e:
                error = e
            self._group.raise_everywhere(error, self.ranks[0], _PLACE)
            seen = {"metrics": ", ".join(self.columns.metrics), "data": data_seen}
            self.fingerprint = fingerprint | seen | self._code
            refuse_differences(self._group, self.fingerprint)
            refuse_other_values(self._group, {"params": local_states[0].params, "constants of loss_fn": constants})
            if is_stream(data) and self._group.num_processes > 1:
                check_streams(self._group, batch, self.reader(data).is_sharded)
        except Exception:
            self._replicas = []  # so that a corrected call prepares again
            raise
        here = zip([self.order[rank] for rank in self.ranks], self._memory_here(local_states), strict=False)
        self._memory = dict(itertools.chain.from_iterable(self._group.all_gather(list(here))))
        here = zip([self.order[rank] for rank in self.ranks], self._row_limits_here(local_states), strict=False)
        self._row_limits = dict(itertools.chain.from_iterable(self._group.all_gather(list(here))))
        if self.world_size > 1:
            self._warm_up_merge(local_states)
        for group in self._local_groups:  # compile before any clock starts
            carries = [self._replicas[place].idle(local_states[place]).carry for place in group]
            merge_carries(carries, [1.0] * len(group), self._settings.opt_state == "average")

    def _warm_up_merge(self, local_states: Sequence[LocalState]) -> None:
        carries = [r.idle(local).carry for r, local in zip(self._replicas, local_states, strict=True)]
        self._merge(self._fitted(local_states), carries, np.ones((len(self.ranks), len(HOST_COLUMNS))))

    def _build(self, local: LocalState, batch: Any, examples: int) -> Sequence[Any]:
        """Make the local replicas and the merge; returns the constants of the loss."""
        one = without_replica_axis((local.params, local.model_state))
        code, shapes = jax.make_jaxpr(self._settings.loss, return_shape=True)(*one, batch, jax.random.key(0))
        if self._settings.joins_rows:
            check_rows(shapes[1][2:], batch_size(batch))
        self._code = {"code of loss_fn": digest(code), "code of tx": update_digest(self._settings.tx, one[0])}
        self.columns = Columns.of(shapes[0], shapes[1][0])
        before, after = (jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (one[1], shapes[1][1]))
        if before != after:
            raise ValueError(
                f"the loss returned a model_state unlike the one it got: {after} instead of {before}; "
                "return every entry of model_state, updated or not, with its shape and dtype"
            )
        loss_weight = self.columns.weight_of(0)
        if loss_weight and self._settings.scaling is not None:
            raise ValueError(
                "loss_fn returns a jaxche.Weighted, and scaling= measures the noise of gradients by examples; return "
                "the mean over the batch, loss.total / loss.weight, or leave scaling= out"
            )
        scaling = self._settings.scaling and self._settings.scaling.with_base_batch_size(examples)

        def programs(placement: Placement) -> LocalPrograms:
            return LocalPrograms(
                placement,
                self._settings.loss,
                self._tx,
                average=self._settings.average,
                seed=self._settings.seed,
                columns=self.columns,
                scaling=scaling,
                solo=len(self._all_placements) == 1,
            )

        self._replicas = [
            Replica(self._group, rank, self._placements[rank], programs(self._placements[rank]), self._paces[rank])
            for rank in self.ranks
        ]
        self._rules = self._settings.rules(self._tx, scaling)._replace(loss_weight=loss_weight)
        self._set_merge(self._make_merge(local))
        return code.consts

    def _set_merge(self, merge: Any) -> None:
        self._merge, self._merges = merge, {self.wire: merge}

    def use_wire(self, wire: str, local_states: Sequence[LocalState]) -> None:
        """Merge with this wire from now on, in all processes."""
        if wire == self.wire:
            return
        self.wire = wire
        if self._merge is None:  # :meth:`prepare` makes it
            return
        if isinstance(self._merge, OverlappedMerge):
            self._merge.wait()
        is_new = wire not in self._merges
        if is_new:
            self._merges[wire] = self._make_merge(local_states[0])
        self._merge = self._merges[wire]
        if is_new:
            self._warm_up_merge(local_states)

    def merge_ms(self, local_states: Sequence[LocalState]) -> float:
        """The time of a merge that changes nothing, the longest of all processes."""
        clock = time.perf_counter()
        self._warm_up_merge(local_states)
        return max(self._group.all_gather(1e3 * (time.perf_counter() - clock)))

    def _make_merge(self, local: LocalState) -> Any:
        assert self._rules is not None, "_build comes first"
        if len(self._all_placements) == 1:
            return SingleReplica(self._group, self._placements[0], self._rules.scaling)
        # Also when one of several replicas is left: its steps were compiled for this merge.
        rules = self._rules._replace(wire=self.wire)
        if self.overlaps:
            return OverlappedMerge(self._replica_mesh, rules, local, in_background=not self._settings.virtual)
        return self._merge_type(self._replica_mesh, rules, local)

    def data_digest(self, data: Any) -> str:
        """A short hash of some batches, or ``NONDETERMINISTIC``; for a stream, whether it is sharded."""
        reader = self.reader(data)
        if isinstance(reader, StreamReader):
            return f"stream, shards={reader.is_sharded}"
        if self._digest is None or self._digest[0] is not reader:
            self._digest = (reader, data_digest(reader, len(data)))
        return self._digest[1]

    def reader(self, data: Any) -> Reader | StreamReader:
        """The reader of this data."""
        return self._settings.readers.of(data, self.processes_of_ranks)

    def non_finite(self, data: Any, keys: Sequence[Key]) -> str | None:
        """The batches and leaves with values that are NaN or infinite, as text; empty if there are none.

        None for a stream, whose batches cannot be read again.
        """
        found, reader = [], self.reader(data)
        if isinstance(reader, StreamReader):
            return None
        for key in keys[:_LOOKED_AT]:
            with contextlib.suppress(Exception):  # the data may not be read again
                found += non_finite_leaves(key, reader.take(key))
        return ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")

    def start(
        self, state: TrainerState, data: Any, plan: RoundPlan, done: Sequence[int] | None = None, keeps: bool = False
    ) -> list[Feed]:
        """Start to read a round, and compile what it needs before any clock starts; one feed per local replica.

        In a replay ``done`` is the recorded number of steps of each rank. With ``keeps`` the batches of a stream stay
        ready, to be trained on again.
        """
        local_states = state.local_states
        feeds = self.reader(data).begin(plan, state, self.ranks, done or plan.counts, keeps)
        cut = (plan.joined, plan.shares, plan.counts)
        new_cut, self._cut = bool(plan.shares) and cut != self._cut, cut
        # The last batch of an epoch may be smaller, and new shares have other sizes. An error here occurs again in the
        # run, and becomes part of the result.
        for replica, local, feed in zip(self._replicas, local_states, feeds, strict=True):
            for position, step in enumerate(feed.steps):
                if new_cut or any(piece.key[1] == plan.epoch_size - 1 for piece in step):
                    with contextlib.suppress(Exception):
                        batch = feed.peek(position)
                        if replica.compile(local, batch) and not spans_processes(replica.placement):
                            replica.warm_up(local, batch)
        return feeds

    def run(
        self,
        local_states: Sequence[LocalState],
        feeds: Sequence[Feed],
        plan: RoundPlan,
        merge_scale: MergeScale,
        time_limit_ms: float | None = None,
        corrections: Sequence[Correction | None] | None = None,
        group_merges: int = 1,
    ) -> list[LocalResult]:
        """Run the local steps of a plan on all local replicas at once; results hold the errors of failed replicas.

        After ``time_limit_ms`` a replica begins no further step. With a merge in flight there is a correction for each.
        Of ``group_merges`` merges all but the last are within the groups.
        """
        measured = self._settings.scaling.measured_steps(plan) if self._settings.scaling is not None else plan.counts
        corrections = corrections or [None] * len(self._replicas)
        counts = [plan.counts[rank] for rank in self.ranks]
        averages = self._settings.opt_state == "average"
        pauses = group_pauses(self._local_groups, counts, group_merges, averages, corrections)

        def run_one(
            replica: Replica,
            local: LocalState,
            feed: Feed,
            pauses: list[Correction | GroupPause],
        ) -> LocalResult:
            groups, is_done = [pause for pause in pauses if isinstance(pause, GroupPause)], False
            if not (feed.steps or groups):
                result = replica.idle(local)
                for pause in pauses:
                    result = result._replace(carry=pause.apply(local, result.carry, 0)[0])
                return result
            own = merge_scale._replace(stride=plan.total / plan.counts[replica.rank])
            number = plan.number(replica.rank)
            try:
                result = replica.run(local, feed, number, own, time_limit_ms, measured[replica.rank], pauses)
                is_done = result.error is None
            finally:
                if groups and not is_done:
                    groups[0].merge.leave()
            if result.error is not None:
                feed.stop()
            if groups:
                result = result._replace(group_ms=1e3 * groups[0].merge.waited_s[groups[0].member])
            return result

        return list(self._pool.map(run_one, self._replicas, local_states, feeds, pauses))

    def prefetch(self, data: Any, plan: RoundPlan) -> None:
        """Start to read the batches of the next round."""
        self.reader(data).prefetch([plan.share(rank) for rank in self.ranks])

    def merge(self, local_states: Sequence[LocalState], results: Sequence[LocalResult], rows: np.ndarray) -> Merged:
        """Merge the local replicas with those of all processes."""
        return self._merge(self._fitted(local_states), [result.carry for result in results], rows)

    def exchange(self, starts: Sequence[LocalState], results: Sequence[LocalResult], rows: np.ndarray) -> Merged:
        """The table of a round whose merge begins with :meth:`start_merge`; ``starts`` are those of the last merge."""
        return self._merge.exchange(starts, [result.carry for result in results], rows)

    def start_merge(
        self,
        starts: Sequence[LocalState],
        results: Sequence[LocalResult],
        rows: np.ndarray,
        wall_ms: float,
        cost_ms: float,
    ) -> MergeInFlight:
        """Begin to merge the local replicas with those of all processes."""
        return self._merge.start(self._fitted(starts), [result.carry for result in results], rows, wall_ms, cost_ms)

    def free_run(self, local_states: Sequence[LocalState], data: Any, seconds: float) -> list[float]:
        """Batches per second of each replica, all running at once without merges."""
        batches = self.reader(data).some(4)
        rates = free_rates(self._group, self._replicas, local_states, batches, seconds, self._pool)
        return [rates[rank] for rank in range(self.world_size)]

    def pause(self, local_states: Sequence[LocalState]) -> None:
        """Wait for batches that are being read, so that other code may read, and lay out these states."""
        self._set_layout(without_replica_axis(local_states[0].params))
        self._settings.readers.wait()

    def here(self, local_states: Sequence[LocalState]) -> list[tuple[int, Placement, LocalState]]:
        """Rank, placement and state of each local replica."""
        return [(rank, self._placements[rank], local) for rank, local in zip(self.ranks, local_states, strict=True)]

    def map(self, function: Callable[[int, Placement, LocalState], Any], local_states: Sequence[LocalState]) -> Any:
        """The results of a function of rank, placement and state, for all local replicas at once."""
        return self._pool.map(lambda one: function(*one), self.here(local_states))

    def unreplicate(self, tree: Any) -> Any:
        """The tree of one replica without its leading axis."""
        return _unreplicate(tree)

    def max_rows(self, given: Sequence[float] | None) -> Sequence[float]:
        """The largest step of each rank in rows: as given, or what its devices have memory for."""
        if given is not None:
            return [given[one] for one in self.order]
        return [self._row_limits.get(one, _MOST_ROWS) for one in self.order]

    @property
    def devices(self) -> list[np.ndarray]:
        """The devices of each replica that takes part."""
        return [placement.devices for placement in self._placements]

    @property
    def memory(self) -> list[dict[str, int]]:
        """Bytes that a round needs on a device of each replica; empty before the first round."""
        known = {rank: self._memory[one] for rank, one in enumerate(self.order) if one in self._memory}
        return [{"rank": rank} | row for rank, row in known.items()]

    def _memory_here(self, local_states: Sequence[LocalState]) -> list[dict[str, int]]:
        return [replica.memory(local) for replica, local in zip(self._replicas, local_states, strict=True)]

    def _row_limits_here(self, local_states: Sequence[LocalState]) -> list[float]:
        return [
            min(row_limit(self.batch_size, replica.memory(local), replica.placement), _MOST_ROWS)
            for replica, local in zip(self._replicas, local_states, strict=True)
        ]

    @property
    def compilations(self) -> int:
        """The number of batch shapes that steps were compiled for, over all local replicas."""
        return sum(replica.compilations for replica in self._replicas)


_unreplicate = jax.jit(drop_replica_axis)
