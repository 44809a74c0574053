"""Rounds: the trainer plans a round, runs it, merges it, and derives the next state."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jaxche.averaging import ema_weight
from jaxche.cadence import (
    DEAR,
    ApplyPolicy,
    ElChe,
    RoundPlan,
    RowShares,
    WireChoice,
    choose_wire,
    is_long_merge,
    merge_share,
)
from jaxche.data import Feed, Key, Reader, SequenceReader, StreamReader, as_stream, is_same, is_stream
from jaxche.distributed import hang_timeout
from jaxche.messages import brief, short_traceback
from jaxche.replicas import HOST_COLUMNS, LocalResult, MergeScale, in_order
from jaxche.reports import RoundInfo
from jaxche.scaling import effective_replicas
from jaxche.training._ema import with_ema_step
from jaxche.training._plan import (
    ENDLESS,
    PLANNED,
    SOLO_ROUND,
    End,
    GivenRound,
    PlannedRound,
    PlanRules,
    expected,
    given_plan,
    next_plan,
    next_shares,
    overlapped_steps,
    steps_sent,
    time_limit_ms,
)
from jaxche.training._preparation import PreparedEngine
from jaxche.training._round_end import (
    RoundStatistics,
    advance,
    errors_of,
    fleet_times,
    host_rows,
    measured_times,
    planned_weights,
)
from jaxche.training._settings import Settings
from jaxche.training._stages import StagedEngine
from jaxche.training._start_checks import checked_epoch_size
from jaxche.training._state import Stop, TrainerState

_log = logging.getLogger("jaxche")


def _is_on(*settings: str) -> bool:
    """Whether one of these settings of JAX is on in this thread."""
    return any(getattr(jax.config, name) for name in settings)


@contextlib.contextmanager
def _without_debug_nans() -> Iterator[None]:
    """Without ``jax_debug_nans``, which ends a step before its batch is known; the merge checks all numbers."""
    if not _is_on("jax_debug_nans", "jax_debug_infs"):
        yield
        return
    with jax.debug_nans(False), jax.debug_infs(False):
        yield


class Rounds:
    """A trainer that runs one round at a time; :class:`Trainer` adds :meth:`Trainer.fit` and the rest."""

    last_good_state: TrainerState | None = None
    updates_logged = False  # the line on the number of updates
    _limit_logged = False
    _stop = Stop.NO
    _solo_steps: int | None  # of a round of a single replica, or None if they follow from their time
    _membership: Any = None  # of an elastic run

    def __init__(self, settings: Settings):
        self._settings, self._group = settings, settings.group
        self._has_peers, self._first_choice = self._group.num_processes > 1, settings.first_choice
        # The noise scale is averaged over rounds, and outputs are kept for one.
        is_short = settings.scaling is not None or settings.outputs is not None
        self._solo_steps = SOLO_ROUND if is_short else None
        self._readers: dict[bool, Reader] = {}  # of the present stream, and of the present sequence
        self._engine = engine = (StagedEngine if settings.staged else PreparedEngine)(settings)
        self._local_engines = [engine]
        if len(settings.overlaps) > 1:  # local steps that merge beside those of the next round
            beside = replace(settings, overlap=max(settings.overlaps), opt_state="local", host=True)
            self._local_engines.append(PreparedEngine(beside))
            self._local_engines[1].share_steps(engine)
        self._engines = list(self._local_engines)
        if settings.chooses:  # the programs of exact sync beside those of local steps
            sync = replace(settings, average="gradients", merge="steps", overlap=0.0, overlaps=(0.0,))
            self._engines.append(PreparedEngine(sync))
        self._metric_programs: list[Any] = []  # of the last evaluations

    @short_traceback
    @jax.transfer_guard("allow")
    def round(
        self, state: TrainerState, data: Any, counts: Sequence[int] | None = None
    ) -> tuple[TrainerState, RoundInfo]:
        """One round: the local steps of every replica, then one merge.

        The state passed in stays valid. In a run of several processes all of them call this together.

        Args:
          state: from :meth:`init` or an earlier round.
          data: ``len(data)`` batches, ``data[i]`` a pytree of arrays with a leading batch axis. If it has
            ``.epoch(e)``, that sequence is used for epoch ``e``. Every epoch has ``len(data)`` batches, because random
            keys, the end of training and checkpoints depend on that number. The index alone determines the examples of
            a batch, because any process may read it, ahead of time, and again in a resumed run or a replay. To check
            this, the first batch is read twice. If the reads differ, one array must stay equal and differ from that of
            another batch, as labels do when images are augmented at random; such a run trains on each example once per
            epoch, but does not replay bit for bit. If there is no such array, the data is refused: it may return its
            next batch whatever the index, so that examples are lost and processes train on different data. For random
            augmentation that replays bit for bit, draw from the index: ``np.random.default_rng((seed, i))``. Or an
            iterable of batches without these methods, read in order; see :class:`~jaxche.Stream`.
          counts: local steps of each replica instead of the cadence's, without a time limit.

        Returns:
          ``(state, info)``.

        Raises:
          ValueError: invalid data, loss, pace or counts.
          NonFiniteLossError: a loss, a parameter or a state became NaN or infinite. The error has the ``state`` that
            was passed in, and the ``batches`` of the failed replica.
          RankError: another process failed.
          PlanMismatchError: the hosts planned different rounds.
        """
        self.check_state(state, "trainer.round")
        return self._round(state, data, given=GivenRound(counts))

    @hang_timeout()
    @_without_debug_nans()
    def _round(
        self, state: TrainerState, data: Any, end: End | None = None, given: GivenRound = PLANNED
    ) -> tuple[TrainerState, RoundInfo]:
        """Plan a round, run it, merge it, refuse it if it failed, and derive the next state from its measurements.

        In a run to an ``end`` the batches of the next rounds are read meanwhile.
        """
        planned = self._planned(state, data, end or ENDLESS, given)
        engine, settings = self._engine, self._settings
        feeds = engine.start(planned)
        clock = time.perf_counter()

        def rows(results: Sequence[LocalResult]) -> np.ndarray:
            prepare_ms = max(engine.compile_ms for engine in self._engines)
            return host_rows(planned, engine.ranks, results, self._stop, prepare_ms)

        ran = engine.run(planned, feeds, rows, lambda: self._read_ahead(planned, end, feeds))
        results, unsent = ran.results, ran.unsent
        if self._membership:
            self._membership.poll()
        merged = engine.merge(planned, ran, rows)
        elapsed_ms = (time.perf_counter() - clock) * 1e3
        if self._rules.newcomers:  # the others may have waited for their state, which is no time of a merge
            elapsed_ms = 0.0
        table = RoundStatistics(merged.table, engine.columns)
        errors = errors_of(planned, engine.ranks, results)
        table.check(planned, self._group, errors, bool(merged.report.finite))
        if self._stop <= table.stop:  # the table has it; a signal may have raised it meanwhile
            self._stop = Stop.NO
        if (fleet := settings.fleet) is None:
            times = measured_times(planned, table, elapsed_ms, merged.exchange_ms)
        else:
            table, times = fleet_times(planned, table, fleet, engine.batch_size, engine.sent_bytes)
        after, info = advance(planned, merged, table, times.with_clock(planned.state, table, self._has_peers))
        if unsent is not None and unsent.error and not self._has_peers:  # else the next round ends all processes
            raise unsent.error
        then = None
        weight = ema_weight(settings.ema, state.ema_examples, after.examples) if settings.ema else None
        if weight is not None:
            after, then = replace(after, ema_examples=after.examples), partial(with_ema_step, engine, weight=weight)
        if engine.overlaps:
            sent = merged.table[engine.ranks, : len(HOST_COLUMNS)]
            in_flight = engine.start_merge(planned, results, sent, max(table.wall_ms), times.merge_ms, then)
            after = replace(after, in_flight=in_flight, unsent=unsent)
        elif then is not None:
            after = replace(after, local_states=then(after.local_states))
        after = self._with_shares(self._with_wire(after, given), planned, info, table)
        self._log_limit(after.che)
        if settings.outputs is not None and not given.keeps:
            settings.outputs(info, in_order([batch for result in results for batch in result.outputs]))
        return after, info

    def _planned(self, state: TrainerState, data: Any, end: End, given: GivenRound) -> PlannedRound:
        """The next round, with its programs compiled."""
        state = self._with_own_choices(state, given)
        self._set_programs(state)
        engine = self._engine
        reader = self._reader(data)
        state = engine.adopted(state)
        if reader.is_sharded:  # rows stay on their process
            state = replace(state, row_shares=RowShares())
        plan = self._prepared_plan(reader, state, end, given)
        if self._settings.wire != "float32":
            state = replace(state, local_states=engine.fitted(state.local_states))
        if state.unsent is not None:
            state = replace(state, unsent=state.unsent.for_table(engine.columns))
        overlapped = overlapped_steps(state, plan, given, engine.overlap)
        group_merges = given.group_merges or (engine.groups.merges_of(state, plan) if engine.groups.ranks else 1)
        is_early = engine.can_exchange_early and group_merges == 1 and not given.keeps
        is_limited = given.counts is None and self._settings.fleet is None and reader.has_time_limit
        return PlannedRound(
            state,
            plan,
            reader,
            given,
            policy=self._rules.policy_of(state),
            rule=self._settings.merge if engine.average == "parameters" else None,
            wire=engine.wire,
            scale=self._merge_scale(plan),
            time_limit_ms=time_limit_ms(state.che, plan) if is_limited else None,
            overlap=engine.overlap,
            overlapped=overlapped,
            sent_after=steps_sent(state, plan, given, end, overlapped, engine.batch_size) if is_early else (),
            groups=engine.groups,
            group_merges=group_merges,
            opt_states_differ=engine.opt_states_differ(state.local_states[0]),
        )

    def _with_own_choices(self, state: TrainerState, given: GivenRound = PLANNED) -> TrainerState:
        """The state without the choices of a trainer with other arguments, and with those that this one makes."""
        first = self._first_choice
        choice = first and (state.choice or first)
        if choice is not None and choice.is_local and choice.overlap not in (overlaps := self._overlaps(state, given)):
            choice = replace(choice, overlap=overlaps[0], before_ms=0.0)
            if state.che is not None and len(self._settings.overlaps) > 1:  # the measured merges are of the other kind
                state = replace(state, che=replace(state.che, sync_samples=()))
        wire = (state.wire or WireChoice()) if self._settings.wire == "auto" and self.world_size > 1 else None
        shares = state.row_shares if self._settings.rows == "speed" else RowShares()
        if (choice, wire, shares) == (state.choice, state.wire, state.row_shares):
            return state
        return replace(state, choice=choice, wire=wire, row_shares=shares)

    def _overlaps(self, state: TrainerState, given: GivenRound = PLANNED) -> tuple[float, ...]:
        """The parts of a round that may run beside a merge of local steps, among which ``"auto"`` chooses."""
        overlaps = self._settings.overlaps
        if len(overlaps) == 1:
            return overlaps
        is_free = not (given.donates or given.settles) and self._engine.keeps_opt_state(state.local_states[0])
        return overlaps if is_free else overlaps[:1]

    def _set_programs(self, state: TrainerState) -> None:
        """Use the programs that the state has chosen: those of exact sync or of local steps, and a wire."""
        before = self._engine
        if self._settings.chooses:
            is_beside = state.choice is not None and state.choice.overlap
            self._engine = self._local_engines[-1 if is_beside else 0]
            if self._rules.policy_of(state) is ApplyPolicy.SYNC:
                self._engine = self._engines[-1]
        if self._engine is not before:
            before.settle()  # one program with collectives is in flight at a time, and another wire has one of its own
        if state.wire is not None and self._engine.average == "parameters":
            self._engine.use_wire(state.wire.wire, state.local_states)

    def _prepared_plan(
        self,
        reader: Reader,
        state: TrainerState,
        end: End = ENDLESS,
        given: GivenRound = PLANNED,
    ) -> RoundPlan:
        """The plan of a round, with its programs compiled."""
        reader.seek(state)
        plan = reader.fitted(self._plan(state, reader.size, end, given), state)
        if self._engine.is_prepared:
            self._engine.measure_batches(reader, plan)
        # In an elastic run all of them: a process that joins later has to have the same.
        for engine in self._engines if self._membership else [self._engine]:
            if not engine.is_prepared:
                engine.prepare(state.local_states, reader, plan, self._fingerprint_of(state, plan), given.donates)
        if end.examples is not None:  # the size of a batch is known now
            plan = reader.fitted(self._plan(state, reader.size, end, given), state)
        return plan

    def _plan(self, state: TrainerState, size: int, end: End = ENDLESS, given: GivenRound = PLANNED) -> RoundPlan:
        """The plan of the next round on data with ``size`` batches in an epoch."""
        if state.cursor >= size:
            raise ValueError(
                f"data has {size} batches in an epoch, and state is at batch {state.cursor} of one; continue with the "
                "data it was trained on, or begin an epoch of others: state = trainer.init(trainer.params(state))"
            )
        if given.counts is not None:
            return given_plan(state, size, self._rules, given)
        return next_plan(state, size, self._rules, end, self._engine.batch_size)

    @property
    def _rules(self) -> PlanRules:
        """The rules of the next plan; an elastic run changes the number of replicas."""
        joined = self.world_size if self._settings.chooses else self._settings.joined
        newcomers = self._membership.newcomers if self._membership else ()
        unit, ema = self._settings.unit, self._settings.ema
        return PlanRules(self.policy, self.world_size, joined, unit, self._solo_steps, newcomers, ema)

    def _merge_scale(self, plan: RoundPlan) -> MergeScale:
        """The scale of a merge of the planned steps, for the rule of the learning rate."""
        if self._settings.scaling is None:
            return MergeScale()
        weights, alpha = planned_weights(self._settings.merge, plan, plan.counts)
        return MergeScale(effective_replicas(weights, plan.counts, alpha), alpha)

    def _fingerprint_of(self, state: TrainerState, plan: RoundPlan) -> dict[str, str]:
        """The fingerprint of a run from its arguments, parameters and data; the engine adds that of the code."""
        shapes = [(x.shape, str(x.dtype)) for x in jax.tree.leaves(state.local_states[0])]
        return self._settings.fingerprint | {
            "jax": jax.__version__,
            "parameters": hashlib.sha256(repr(shapes).encode()).hexdigest()[:12],
            "batches": str(plan.epoch_size),
        }

    def _read_ahead(self, planned: PlannedRound, end: End | None, feeds: Sequence[Feed]) -> None:
        """Read the first batches of the next rounds after those of this one; they follow if it goes as planned."""
        state, plan, depth = planned.state, planned.plan, planned.reader.depth
        if end is None or state.pending_batches:
            return
        keys: list[list[Key]] = [[] for _ in feeds]
        for _ in range(depth):
            state = expected(state, plan, self._engine.batch_size)
            if end.is_reached(state) or max(map(len, keys), default=0) >= depth:
                break
            plan = self._plan(state, plan.epoch_size, end)
            for own, rank in zip(keys, self._engine.ranks, strict=True):
                own += plan.share(rank)
        planned.reader.prefetch(feeds, keys)

    def _with_wire(self, state: TrainerState, given: GivenRound) -> TrainerState:
        """The state with the wire of the next merge, once ``wire="auto"`` has measured that merges are dear.

        A replay takes that of the record.
        """
        wire, che, choice, engine = state.wire, state.che, state.choice, self._engine
        if given.done is not None or wire is None or wire.reason or che is None or merge_share(che) < DEAR:
            return state
        is_local = engine.average == "parameters"
        if choice is not None and not (is_local and (is_long_merge(che) or not choice.before_ms)):
            return state  # the measured merges are, or include, those of exact sync
        state = self._settled(state)  # a merge in flight has collectives, too
        engine.use_wire("int4", state.local_states)
        coded_ms = engine.merge_ms(state.local_states)
        wire = choose_wire(che, coded_ms)
        if self._group.is_first:
            _log.info("%s", wire.reason)
        if wire.wire == "int4":
            choice = choice and choice.with_local_ms(che.sync_samples, coded_ms)
            che = replace(che, sync_samples=(coded_ms,) * len(che.sync_samples))  # those in float32 are of the past
        return replace(state, wire=wire, choice=choice, che=che)

    def _with_shares(
        self, state: TrainerState, planned: PlannedRound, info: RoundInfo, table: RoundStatistics
    ) -> TrainerState:
        """The state with the rows of each replica, if they follow from its speed, and the choice of ``"auto"``."""
        if self._settings.rows != "speed" or planned.reader.is_sharded:
            return state
        if table.is_divided:
            state = replace(state, row_shares=replace(state.row_shares, shapes_differ=True))
        compile_ms = table.prepare_ms if self._settings.fleet is None else 0.0
        engine, overlaps = self._engine, self._overlaps(state, planned.given)
        return next_shares(state, info, self._rules, engine.batch_size, engine.max_rows, compile_ms, overlaps)

    def _log_limit(self, che: ElChe | None) -> None:
        """Log once that a limit keeps rounds short."""
        if che is None or not che.limit or self._limit_logged or self.policy in (ApplyPolicy.SYNC, ApplyPolicy.AUTO):
            return
        self._limit_logged = True
        if self._group.is_first:
            line = "%s; write che=jaxche.ElChe(..., max_anchor=...), or send less: see docs/slow_links.md"
            _log.warning(line, che.limit)

    def _settled(self, state: TrainerState) -> TrainerState:
        """The state that a round has returned, after its merge; all processes call this together.

        Raises:
          Exception: the error of a replica that failed after its table was sent; in other processes a RankError.
          PeerLostError: the merge failed.
        """
        merged = state.merged()
        if state.unsent is not None:
            errors = zip(self._engine.ranks, state.unsent.errors, strict=True)
            rank, error = next(((rank, error) for rank, error in errors if error is not None), (0, None))
            self._group.raise_everywhere(error, rank, f"round {state.round - 1}")
        return merged

    def _reader(self, data: Any) -> Reader:
        """The reader of this data; that of other data of its kind, a sequence or a stream, is closed."""
        for reader in self._readers.values():
            if reader.data is data:
                return reader
        settings, kind = self._settings, is_stream(data)
        checked_epoch_size(settings, data)
        reader = self._readers.get(kind)
        if reader is None or not is_same(reader.data, data):
            if reader is not None:
                reader.close()
            streams = settings.group, settings.processes_of_ranks
            reader = StreamReader(data, as_stream(data), *streams) if kind else SequenceReader(data)
            self._readers[kind] = reader
        elif isinstance(reader, StreamReader):
            reader.go_on_with(data)
        return reader

    def _wait_for_reads(self) -> None:
        """Wait until the batches of a sequence that were requested are read."""
        if isinstance(reader := self._readers.get(False), SequenceReader):
            reader.wait()

    def check_state(self, state: Any, call: str, any_tx: bool = False) -> None:
        """Refuse a value that is not a state of this trainer, and a ``call`` within a trace or a context of JAX."""
        check_untraced(call)
        self._check_context_mesh(call)
        self._engine.check_state(checked_state(state, call).local_states, any_tx)

    def _check_context_mesh(self, call: str) -> None:
        """Refuse a call under ``jax.set_mesh``, which is for programs on all devices of one mesh."""
        if jax.sharding.get_abstract_mesh().empty:
            return
        # A single replica trains under its own mesh.
        found, own = jax.sharding.get_mesh(), set(self._engine.devices[0].flat)
        if self.world_size > 1 or set(found.devices.flat) != own or self._engine.mesh not in (None, found):
            raise ValueError(
                f"{call} was called under jax.set_mesh(...), on whose mesh all programs would run, and each replica "
                f"has devices and a mesh of its own; write {call}(...) outside of it"
            )

    def request_stop(self, stop: Stop = Stop.ASKED) -> None:
        """Ask all processes to stop after the next round; its merge carries the request."""
        self._stop = max(self._stop, stop)

    def reset_requests(self) -> None:
        """Discard requests to stop and to admit processes."""
        self._stop = Stop.NO
        if self._membership:
            self._membership.reset()

    @property
    def policy(self) -> ApplyPolicy:
        """When replicas merge, as given."""
        return self._settings.policy

    @property
    def world_size(self) -> int:
        """The number of replicas, in an elastic run of those that take part now."""
        return self._engine.world_size

    @property
    def memory(self) -> list[dict[str, int]]:
        """Bytes that the steps of a round need on a device of each replica, beside what your own variables hold.

        One dict per replica, with its ``"rank"``, the bytes by purpose and ``"in all"``; empty before the first round.
        The merge follows the steps, when activations are free. Under exact sync it makes a new state beside the old,
        unless a fit has ``donate=True``.
        """
        return self._engine.memory

    @property
    def local_ranks(self) -> list[int]:
        """The ranks of the replicas of this process."""
        return self._engine.ranks

    @property
    def compilations(self) -> int:
        """The number of batch shapes that steps were compiled for, over the replicas of this process.

        Other counts never compile again.
        """
        replicas = {replica for engine in self._engines for replica in engine.replicas}  # two engines may share them
        return sum(replica.compilations for replica in replicas)


def check_untraced(call: str) -> None:
    """Refuse a call inside a function that JAX traces, or where it compiles nothing."""
    if isinstance(jnp.zeros(()), jax.core.Tracer):
        raise ValueError(
            f"{call} was called inside a function that JAX traces (jit, grad, vmap, scan); it compiles its own steps, "
            f"and loops in Python. Take the @jax.jit from the function around it, and write {call}(...) outside"
        )
    if _is_on("jax_disable_jit"):
        raise ValueError(
            f"{call} was called under jax.disable_jit, and a trainer compiles its steps; to debug the loss function, "
            "write loss_fn(params, data[0]) there, and train outside of it"
        )


def checked_state(state: Any, call: str = "trainer.fit") -> TrainerState:
    """The state; refuses a value that is not a state of a trainer."""
    if isinstance(state, TrainerState):
        if any(array.is_deleted() for local in state.local_states[:1] for array in itertools.islice(local.arrays, 1)):
            raise ValueError(
                "state was deleted: fit(state, data, donate=True) takes its arrays; go on with the state that fit "
                "returns, state, history = trainer.fit(state, data, donate=True), after an error with a checkpoint"
            )
        return state
    if hasattr(state, "apply_fn") and hasattr(state, "opt_state"):
        line = "state = trainer.init(train_state.params, opt_state=train_state.opt_state)"
    elif isinstance(state, tuple) and state and isinstance(state[0], TrainerState):
        line = "state, history = trainer.fit(state, data), which returns both"
    else:
        line = f"state = trainer.init(params), then {call}(state, ...)"
    raise ValueError(f"state={brief(state)} is not a state of this trainer; write {line}")
