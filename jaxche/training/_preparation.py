"""The preparation of an engine: places, compiles and warms up its replicas, and checks that all processes agree."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxche.averaging import ema_init, outer_init
from jaxche.cadence import RoundPlan
from jaxche.data import Reader, SequenceReader, join_pieces, line_for_two_arrays
from jaxche.replicas import (
    HOST_COLUMNS,
    Begin,
    Columns,
    DevicePlacement,
    LocalPrograms,
    LocalRound,
    LocalState,
    Merge,
    OverlappedMerge,
    Placement,
    Programs,
    Replica,
    SingleReplica,
    ToMerge,
    add_replica_axis,
    check_rows,
    merge_carries,
    row_limit,
    without_replica_axis,
    zero_residual,
)
from jaxche.sharding import batch_size, is_maker
from jaxche.training._checks import check_model_state
from jaxche.training._engine import MOST_ROWS, Engine
from jaxche.training._fingerprint import (
    NONDETERMINISTIC,
    check_streams,
    data_digest,
    digest,
    refuse_differences,
    refuse_other_values,
    update_digest,
)

# For the messages of errors.
_PLACE = "the compilation before the first step"


class PreparedEngine(Engine):
    """An engine that places its replicas, compiles their programs once, and makes the merge again when they change."""

    _merge_type: Any = Merge  # of several replicas
    _twin: PreparedEngine | None = None  # with the same steps, and other merges
    _own_resources: Sequence[tuple[int, dict[str, int], float]] = ()  # of the local replicas, once they are compiled

    def share_steps(self, twin: PreparedEngine) -> None:
        """Use the replicas of another engine, which has the same steps; that of the two which is prepared first."""
        self._twin, twin._twin = twin, self

    def placement(self, params: Any, model_state: Any, opt_state: Any) -> tuple[LocalState, ...]:
        """Put the same parameters and states on every local replica."""
        if is_maker(params) and not self._placements[0].makes_pieces:
            params = params()  # once, so that all replicas get the same numbers
        self._set_layout(jax.eval_shape(params) if is_maker(params) else params)
        settings = self.world_size, tuple(self._coded)
        start = self._starts.setdefault(settings, self._start(*settings))
        return tuple(
            LocalState(**self._placements[rank].start(start, params, model_state, opt_state)) for rank in self.ranks
        )

    def _start(self, world_size: int, coded: Sequence[bool]) -> Begin:
        """The function that makes the trees of a local state; the engine, which it would keep alive, is not in it."""
        settings, is_sharded, own_tx = self._settings, self._placements[0].makes_pieces, self._tx

        def start(params: Any, model_state: Any, opt_state: Any) -> dict[str, Any]:
            tx = own_tx
            if (given := opt_state) is not None:
                tx = optax.GradientTransformation(lambda params: given, settings.tx.update)
                tx = tx if settings.scaling is None else settings.scaling.transform(tx)
            outer_state = outer_init(settings.outer, params) if settings.outer else None
            scaled = settings.scaling.start(params) if settings.scaling else {}
            opt_state = jax.tree.map(jnp.asarray, tx.init(params))  # it may have Python's numbers
            ema = ema_init((params, model_state)) if settings.ema else None
            local = LocalState(params, opt_state, model_state, outer_state, ema=ema, **scaled)
            if settings.wire != "float32":  # "auto" may take codes later
                moments = list(itertools.compress(jax.tree.leaves(opt_state), coded))
                residual = zero_residual(params, moments, world_size, is_sharded)
                local = local._replace(residual=residual)
            return add_replica_axis(local)._asdict()

        return start

    def arrange(self, order: Sequence[int], local_states: Sequence[LocalState]) -> None:
        """Continue with these ranks of the start, renumbered in this order; compiled steps are kept."""
        replicas = dict(zip((self.order[rank] for rank in self.ranks), self._replicas, strict=False))
        self._set_order(order)
        self._shapes = None
        self._set_layout(without_replica_axis(local_states[0].params))
        self._replicas = [replicas[order[rank]] for rank in self.ranks] if replicas else []
        for rank, replica in zip(self.ranks, self._replicas, strict=False):
            replica.rank = rank
        if replicas:
            self._set_merge(self._make_merge(local_states[0]))

    def connect(self, local_states: Sequence[LocalState]) -> None:
        """Compile the merge of the ranks of :meth:`arrange`, and connect them; all processes call it together."""
        if self._replicas:
            self._share_resources()
            self._merge.prepare(self._nothing_to_merge(local_states))

    def prepare(
        self,
        local_states: Sequence[LocalState],
        reader: Reader,
        plan: RoundPlan,
        fingerprint: dict[str, str],
        donates: bool = False,
    ) -> None:
        """Compile and warm up the programs of a round, and check that all processes agree; once.

        With ``donates`` it makes no copy of the state.
        """
        if self._replicas:
            return
        try:
            with self._group.errors_everywhere(self.ranks[0], _PLACE):
                self._set_layout(without_replica_axis(local_states[0].params))
                data_seen = self.data_digest(reader) if self._group.num_processes > 1 else ""
                batch = self._measured(reader, plan)
            # The first batches of the parts of a stream may have unlike sizes, by which a loss is traced.
            sizes, structures = zip(*self._group.all_gather((self.batch_size, _structure(batch))), strict=True)
            self.batch_size = max(sizes)
            with self._group.errors_everywhere(self.ranks[0], _PLACE):
                constants = self._build(local_states[0], batch, self.batch_size)
                first = [self._first_step(rank, plan, batch) for rank in self.ranks]
                clock = time.perf_counter()
                takes = self._takes(donates)
                self.compile(list(zip(self._replicas, local_states, first, strict=True)), takes)
                self.compile_ms = (time.perf_counter() - clock) * 1e3
            # Nothing runs before all have compiled: if several processes drive a replica, each step waits for all.
            with self._group.errors_everywhere(self.ranks[0], _PLACE):
                for replica, local, own in zip(self._replicas, local_states, first, strict=True):
                    replica.warm_up(local, own, takes)
            seen = {"metrics": ", ".join(self.columns.metrics), "data": data_seen}
            if len(set(structures)) > 1:
                self._code |= dict.fromkeys(self._code.keys() - {"code of tx", "code of outer"}, NONDETERMINISTIC)
            self.fingerprint = fingerprint | seen | self._code
            refuse_differences(self._group, self.fingerprint)
            refuse_other_values(self._group, {"params": local_states[0].params, "constants of loss_fn": constants})
            if not isinstance(reader, SequenceReader) and self._group.num_processes > 1:
                check_streams(self._group, batch, reader.is_sharded)
        except Exception as error:
            self._replicas = []  # so that a corrected call prepares again
            if line := line_for_two_arrays(reader.data):
                error.add_note(line)
            raise
        self._own_resources = self._resources(local_states, takes)
        self._share_resources()
        if self.world_size > 1 and donates:
            self._merge.prepare(self._nothing_to_merge(local_states, takes), donates=True)
        elif self.world_size > 1:
            self._warm_up_merge(local_states)
        for group in self._local_groups:  # compile before any clock starts
            carries = [self._replicas[place].begin(local_states[place], 0, takes=takes)[1] for place in group]
            merge_carries(carries, [1.0] * len(group), self._settings.opt_state == "average")

    def _first_step(self, rank: int, plan: RoundPlan, batch: Any) -> Any:
        """A batch with the rows of the first step of a rank; a whole one if it has none, or a pace is to be checked."""
        steps = plan.steps(rank) if plan.shares and not any(self._settings.paces) else ()
        joined = [found for step in steps[:1] for found, _ in join_pieces(step, lambda key: batch, divides=True)]
        return joined[0] if joined else batch

    def _warm_up_merge(self, local_states: Sequence[LocalState]) -> None:
        self._merge(self._nothing_to_merge(local_states))

    def _nothing_to_merge(self, local_states: Sequence[LocalState], takes: Sequence[str] = ()) -> ToMerge:
        """What a merge that changes nothing is given."""
        pairs, given = zip(self._replicas, local_states, strict=True), LocalRound(takes=takes)
        carries = [replica.idle(local, given).carry for replica, local in pairs]
        return ToMerge(self.fitted(local_states), carries, np.ones((len(self.ranks), len(HOST_COLUMNS))))

    def _build(self, local: LocalState, batch: Any, examples: int) -> Sequence[Any]:
        """Make the local replicas and the merge; returns the constants of the loss."""
        one = without_replica_axis((local.params, local.model_state))
        code, shapes = jax.make_jaxpr(self._settings.loss, return_shape=True)(*one, batch, jax.random.key(0))
        if self._settings.joins_rows:
            check_rows(shapes[1][2:], batch_size(batch))
        if self._group.num_processes > 1:  # to trace tx for it takes a tenth of the first round
            self._code = {"code of loss_fn": digest(code)} | self._code_of_optimizers(local)
        self.columns = Columns.of(shapes[0], shapes[1][0])
        check_model_state(one[1], shapes[1][1])
        loss_weight = self.columns.weights[0]
        if loss_weight and self._settings.scaling is not None:
            raise ValueError(
                "loss_fn returns a jaxche.Weighted, and scaling= measures the noise of gradients by examples; return "
                "the mean over the batch, loss.total / loss.weight, or leave scaling= out"
            )
        scaling = self._settings.scaling and self._settings.scaling.with_base_batch_size(examples)
        self._rules = self._settings.rules(self._tx, scaling)._replace(loss_weight=loss_weight)
        solo = len(self._settings.placements) == 1
        unpacked = solo or any(self._settings.overlaps) or self._settings.wire != "float32"
        packed = {} if unpacked else self._rules.packings(self._replica_mesh, local)
        made: list[LocalPrograms] = []

        def programs(placement: Placement) -> LocalPrograms:
            if made and isinstance(placement, DevicePlacement):
                return made[0].on(placement)
            made.append(
                LocalPrograms(
                    placement,
                    self._settings.loss,
                    self._tx,
                    average=self._settings.average,
                    seed=self._settings.seed,
                    columns=self.columns,
                    scaling=scaling,
                    solo=solo,
                    packed=packed,
                )
            )
            return made[-1]

        twin = self._twin
        if twin is not None and twin.is_prepared and (twin._shapes, twin.columns) == (self._shapes, self.columns):
            self._replicas = list(twin._replicas)
        else:
            self._set_replicas(programs)
        self._set_merge(self._make_merge(local))
        return code.consts

    def _set_replicas(self, programs: Callable[[Any], Programs]) -> None:
        self._replicas = [
            Replica(
                self._group,
                rank,
                self._placements[rank],
                programs(self._placements[rank]),
                self._settings.paces[self.order[rank]],
                self.batch_size,
            )
            for rank in self.ranks
        ]

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
        if (fleet := self._settings.fleet) is not None:
            return fleet.merge_ms(self.sent_bytes)
        clock = time.perf_counter()
        self._warm_up_merge(local_states)
        return max(self._group.all_gather(1e3 * (time.perf_counter() - clock)))

    def _make_merge(self, local: LocalState) -> Any:
        assert self._rules is not None, "_build comes first"
        if len(self._settings.placements) == 1:
            return SingleReplica(self._group, self._placements[0], self._rules.scaling)
        # Also when one of several replicas is left: its steps were compiled for this merge.
        rules = self._rules._replace(wire=self.wire)
        if self.overlaps:
            return OverlappedMerge(self._replica_mesh, rules, local, in_background=self._settings.fleet is None)
        return self._merge_type(self._replica_mesh, rules, local)

    _digest: tuple[Any, str] | None = None

    def data_digest(self, reader: Reader) -> str:
        """A short hash of some batches, or ``NONDETERMINISTIC``; for a stream, whether it is sharded."""
        if not isinstance(reader, SequenceReader):
            return f"stream, shards={reader.is_sharded}"
        if self._digest is None or self._digest[0] is not reader:
            self._digest = (reader, data_digest(reader, len(reader.data)))
        return self._digest[1]

    _tx_digest: tuple[Any, str] | None = None

    def tx_digest(self, local: LocalState) -> str:
        """A digest of the update of ``tx`` with its settings, traced once for parameters of these shapes."""
        shapes = without_replica_axis(local.params)
        if self._tx_digest is None or self._tx_digest[0] != shapes:
            self._tx_digest = (shapes, self._digest_of(self._settings.tx, shapes, **self._settings.extra_args))
        return self._tx_digest[1]

    def _digest_of(self, tx: Any, shapes: Any, **extra: Any) -> str:
        return update_digest(tx, shapes, **extra)

    def _code_of_optimizers(self, local: LocalState) -> dict[str, str]:
        code, outer = {"code of tx": self.tx_digest(local)}, self._settings.outer
        if outer is not None:
            code["code of outer"] = self._digest_of(outer, without_replica_axis(local.params))
        return code

    def _share_resources(self) -> None:
        """Exchange what the replicas of all processes need, because the rows of each follow from the memory of all."""
        self._memory, self._row_limits = {}, {}
        for rank, memory, rows in itertools.chain.from_iterable(self._group.all_gather(self._own_resources)):
            self._memory[rank], self._row_limits[rank] = memory, rows

    def _resources(
        self, local_states: Sequence[LocalState], takes: Sequence[str]
    ) -> list[tuple[int, dict[str, int], float]]:
        """For each local replica its rank, the bytes that a round needs, and its largest step in rows."""
        found = []
        for rank, replica, local in zip(self.ranks, self._replicas, local_states, strict=True):
            memory = replica.memory(local, takes)
            most = min(row_limit(memory, replica.placement), MOST_ROWS)
            found.append((self.order[rank], memory.by_purpose, most))
        return found


def _structure(batch: Any) -> str:
    """What a loss is traced by: the structure of a batch, and the shapes of its arrays."""
    return f"{jax.tree.structure(batch)} {[np.shape(x) for x in jax.tree.leaves(batch)]}"
