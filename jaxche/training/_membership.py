"""The membership of an elastic run in ``fit``: shrinks it when processes die, and admits their replacements."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxche.cadence import ApplyPolicy, Choice, ElChe, RoundPlan, RowShares
from jaxche.data import StreamReader, to_json
from jaxche.distributed import Admission, ElasticGroup, PeerLostError, TakenForDeadError, padded
from jaxche.messages import format_ranks
from jaxche.replicas import LocalState
from jaxche.reports import History
from jaxche.training._fingerprint import NONDETERMINISTIC
from jaxche.training._hooks import Run
from jaxche.training._rounds import Rounds
from jaxche.training._state import TrainerState
from jaxche.training._state_dict import metadata, with_metadata

_log = logging.getLogger("jaxche")

# How often connections may break in one round while all processes are alive.
_MAX_FALSE_ALARMS = 3


class Membership:
    """Changes the members of a group and the ranks of its trainer."""

    def __init__(self, trainer: Rounds, group: ElasticGroup):
        self._trainer, self._group = trainer, group
        # The incarnations of the processes to admit before the next round, and the new order of ranks.
        self._pending: tuple[dict[int, int], list[int]] | None = None
        # The ranks that get their state during the next round, and take no local steps in it.
        self.newcomers: tuple[int, ...] = ()
        # The last measured steps per round and ms per step, by rank at the start.
        self._measured: dict[int, tuple[int, float]] = {}
        # The rounds in which connections broke while all processes were alive.
        self._false_alarms: list[int] = []

    def begin_fit(self, run: Run) -> None:
        """Start a fit; a standby process waits until it is admitted to the run."""
        self._group.begin_fit()
        if self._group.standby:
            self._join(run)

    def end_fit(self) -> None:
        """End a fit on all members, once all of them have come to its end; raises PeerLostError if one has died."""
        self._group.barrier()
        self._group.end_fit()

    def reset(self) -> None:
        """Discard pending admissions at the end of a fit."""
        self._pending, self.newcomers = None, ()

    def poll(self) -> None:
        """Agree on the processes to admit after this round.

        Each round calls it before its merge, so that a death is detected here, where the round can be abandoned, and
        not in a collective on devices.
        """
        if self._group.standby:
            return
        found = self._group.broadcast(self._candidates() if self._group.is_first else None)
        self._pending = found and ({int(process): number for process, number in found[0].items()}, found[1])

    def _candidates(self) -> tuple[dict[int, int], list[int]] | None:
        fingerprint, accepted = self._trainer._engine.fingerprint, {}
        processes_of_ranks = self._trainer._settings.processes_of_ranks
        for process, request in self._group.candidates().items():
            reason = refusal(fingerprint, request["fingerprint"])
            if any(process in own and len(own) > 1 for own in processes_of_ranks):
                reason = "its replica needs other processes too"
            if reason is None:
                accepted[process] = request["incarnation"]
            else:
                self._group.refuse(process, request["incarnation"], reason)
        if not accepted:
            return None
        return accepted, ranks_of(processes_of_ranks, {*self._group.members, *accepted})

    def admit(self, run: Run) -> None:
        """Admit the processes that :meth:`poll` found; all members call it together.

        Their state is sent while the next round runs. That round keeps to local steps, if the last one had them.
        """
        if self._pending is None:
            return
        engine, (admitted, order) = self._trainer._engine, self._pending
        run.state = run.state.merged()
        with self._group.collective():
            state_dict = engine.state_dict(run.state.local_states, run.state.opt_states_differ)
            given = jax.block_until_ready(state_dict.pooled())
        for hook in run.hooks:
            hook.on_admission()
        # The broadcast waits for all: all members admit them, or none.
        state, choice = self._of_ranks(run.state, order), run.state.choice
        if choice is not None and choice.is_local:
            reason = "local steps while a process that joins gets its state"
            state = replace(state, choice=Choice(ApplyPolicy.CADENCE, reason=reason, since=state.round))
        homes = self._trainer._settings.processes_of_ranks
        newcomers = [place for place, rank in enumerate(order) if not admitted.keys().isdisjoint(homes[rank])]
        message, arrays = {}, []
        if self._group.is_first:
            message = {"order": order, "newcomers": newcomers, "history": run.history.to_json()}
            message["state"] = metadata(self._with_iterator(state, run.data))
            message["measured"] = list(self._measured.items())
            message["opt_states_differ"] = state.opt_states_differ
            arrays = [_whole(leaf) for leaf in jax.tree.leaves(given)]
        self._group.admit(admitted, message, arrays)
        # Before the collectives that follow: if a process dies in them, the state has the ranks of the engine.
        run.state, run.previous, self._pending, self.newcomers = state, None, None, tuple(newcomers)
        self._arrange(order, state.local_states)
        processes = format_ranks(list(admitted))
        _log.warning("process %s joined: continuing from round %s with %s", processes, state.round, len(order))
        self._call_hooks(run, shrunk=False)

    def after_round(self, state: TrainerState) -> TrainerState:
        """The state after a round; if it was the first of newcomers, ``policy="auto"`` begins again with exact sync."""
        if self.newcomers and state.choice is not None:
            state = replace(state, choice=_measured_again(state.round))
        self.newcomers = ()
        return state

    def _with_iterator(self, state: TrainerState, data: Any) -> TrainerState:
        """The state with that of the iterator of a stream, if it can be sent: the process then need not read again."""
        reader = self._trainer._reader(data)
        if state.stream is None or not isinstance(reader, StreamReader):
            return state
        found = reader.iterator_state(state)
        try:
            to_json(found)
        except TypeError:
            return state
        return replace(state, stream=state.stream._replace(states=(found,)))

    def _join(self, run: Run) -> None:
        """Become a member of the run, with its state and history.

        It compiles first, so that the members need not wait. Its optimizer states are the mean over replicas, as from a
        checkpoint of another number of replicas. It raises RuntimeError if the members refuse it, and SystemExit with
        code 0 if the fit has ended.
        """
        trainer, engine, group = self._trainer, self._trainer._engine, self._group
        state = replace(run.state, in_flight=None, unsent=None)  # those of others, in which it was taken for dead
        own = [engine.order[rank] for rank in engine.ranks]
        self._arrange(own, state.local_states)
        plan = RoundPlan(0, 0, 0, (1,) * len(own), run.size)
        reader = trainer._reader(run.data)
        reader.seek(state)
        for one in trainer._engines:
            one.prepare(state.local_states, reader, plan, trainer._fingerprint_of(state, plan))
        text = "process %s takes the place of one that died, and waits for the end of a round"
        _log.warning(text, group.process_index)
        while True:
            try:
                admission = group.request_admission(engine.fingerprint)
                if admission is None:
                    raise SystemExit(0)
                failed, local_states = self._take_over(run, state, admission)
                break
            except PeerLostError as error:
                _log.warning("process %s was not admitted, and tries again: %s", group.process_index, error)
                group.restart()
                self._arrange(own, state.local_states)
        run.state = replace(run.state, local_states=local_states)
        if failed is not None:
            self.recover(run, failed)

    def _take_over(
        self, run: Run, state: TrainerState, admission: Admission
    ) -> tuple[PeerLostError | None, tuple[LocalState, ...]]:
        """Become a member, then wait for the arrays; returns them, and the error of a collective before they came."""
        group, che, message, failed = self._group, self._trainer._settings.che, admission.message, None
        order, state_dict = message["order"], self._trainer._engine.state_dict(state.local_states)
        with admission.sock:
            group.join(admission)
            self._measured = {rank: (steps, ms) for rank, (steps, ms) in message["measured"]}
            che = che and replace(che, world_size=len(order), batch_counts=(), ms_per_batch=(), ms_samples=())
            state = replace(state, che=che, opt_states_differ=message["opt_states_differ"])
            run.state = with_metadata(state, message["state"])
            run.previous, run.history = None, History.from_json(message["history"])
            self.newcomers = tuple(message["newcomers"])
            try:
                self._arrange(order, state.local_states)
                self._call_hooks(run, shrunk=False)
            except PeerLostError as error:  # of the others, not of the sender
                failed = error
            arrays = _arrays(state_dict.abstract_trees({}), group.receive_state(admission))
        return failed, state_dict.load(arrays, {})

    def recover(self, run: Run, error: PeerLostError) -> None:
        """Continue with the remaining processes after a failed collective, or join them; raises if they cannot."""
        while True:
            # If a pending process has died, the next collective detects it; else it requests admission again.
            self.reset()
            try:
                self._shrink(run, error)
                self._call_hooks(run, shrunk=True)
                return
            except TakenForDeadError:
                self._group.restart()
                self._join(run)
                return
            except PeerLostError as another:  # another process died meanwhile
                if another is error:
                    raise
                error = another

    def _call_hooks(self, run: Run, shrunk: bool) -> None:
        for hook in run.hooks:
            hook.on_membership(run, shrunk)

    def _shrink(self, run: Run, error: PeerLostError) -> None:
        """Give the run the state from which the remaining processes continue, the same on all of them.

        A round is merged by all or by none: a process that finished the merge that failed elsewhere returns to the
        state before it. If no process has died, all continue over new connections.
        """
        run.state, order, lost = self._common_state(run.state, run.previous, error)
        run.previous = None
        run.history = History([info for info in run.history if info.round < run.state.round], run.history.memory)
        self._arrange(order, run.state.local_states)
        what = f"process {format_ranks(lost)} died" if lost else "a merge failed, but no process died"
        _log.warning("%s: continuing from round %s with %s", what, run.state.round, len(order))

    def _common_state(
        self, state: TrainerState, before: TrainerState | None, error: PeerLostError
    ) -> tuple[TrainerState, list[int], list[int]]:
        """The last state of all remaining processes, their ranks, and the processes that were lost."""
        trainer = self._trainer
        lost = self._group.shrink()
        try:
            state, before = state.merged(), before and before.merged()
        except PeerLostError:
            # The merge in flight failed: its round is dropped, and the one that began since.
            assert before is not None, "a state with a merge in flight is not the first"
            state, before = before.merged(), None
        reached = self._group.all_gather(state.round)
        if state.round > min(reached):
            assert before is not None, "a process that finished a round has the state before it"
            state = before
        order = ranks_of(trainer._settings.processes_of_ranks, self._group.members)
        if not lost:
            self._count_false_alarm(state.round, error)
        if not order:
            error.add_note(f"process {format_ranks(lost)} died, and the remaining processes cannot continue")
            raise error
        state = self._of_ranks(state, order)
        if len(order) == 1:  # with its previous steps in a round: an outer step or an update needs its round
            trainer._solo_steps = 1 if trainer.policy is ApplyPolicy.SYNC else self._measured.get(order[0], (1, 0.0))[0]
        return state, order, lost

    def _arrange(self, order: Sequence[int], local_states: Sequence[LocalState]) -> None:
        """Continue with these ranks on all engines of the trainer; all members call it together."""
        # All engines have the same ranks, also if a process dies in the collectives that follow.
        for engine in self._trainer._engines:
            engine.arrange(order, local_states)
        for engine in self._trainer._engines:
            engine.connect(local_states)

    def _of_ranks(self, state: TrainerState, order: Sequence[int]) -> TrainerState:
        """The state of these ranks; ``policy="auto"`` begins again with exact sync.

        Each update of exact sync measures a merge, and rounds of local steps take longer.
        """
        choice = state.choice
        if choice is not None and len(order) > 1:
            choice = _measured_again(state.round)
        elif choice is not None:
            choice = Choice(ApplyPolicy.CADENCE, reason="one replica is left, which merges nothing", since=state.round)
        shares = RowShares(shapes_differ=state.row_shares.shapes_differ)
        # As the first member has it: a process that came later has fewer measurements.
        che = self.rearranged(state.che, order)
        che = self._group.broadcast(che and che.to_dict())
        return replace(state, che=che and ElChe.from_dict(che), row_shares=shares, choice=choice)

    def _count_false_alarm(self, round: int, error: PeerLostError) -> None:
        """Raise the error if connections have broken too often in one round while all processes are alive."""
        alarms = self._false_alarms = [*(old for old in self._false_alarms if old == round), round]
        if len(alarms) > _MAX_FALSE_ALARMS:
            error.add_note(
                f"the connections between the processes broke {len(alarms)} times in round {round}, though "
                "all processes are alive; does something between their machines close them, e.g. a firewall?"
            )
            raise error

    def rearranged(self, che: ElChe | None, order: Sequence[int]) -> ElChe | None:
        """The cadence of these ranks in this order, with the last measurements of each; None for a single rank.

        If any rank has no measurement, discard all measurements, and keep the anchor.
        """
        measured, present = self._measured, self._trainer._engine.order
        if che is not None:
            measured |= zip(present, zip(che.limited_counts, che.ms_per_batch, strict=True), strict=True)
        like = che or self._trainer._settings.che
        if len(order) == 1 or like is None:
            return None
        saved: dict[str, Any] = like.to_dict() | {"world_size": len(order), "ms_samples": (), "sync_samples": ()}
        saved["half_life"] = self._trainer._settings.groups.present(order).half_life(len(order))
        if che is not None and set(order) <= set(present):
            places = [present.index(rank) for rank in order]
            samples = tuple(tuple(row[place] for place in places) for row in che.ms_samples)
            saved |= {"ms_samples": samples, "sync_samples": che.sync_samples}
        elif not all(measured.get(rank, (0, 0.0))[1] for rank in order):
            return ElChe.from_dict(saved | {"batch_counts": (), "ms_per_batch": ()})
        # A rank that returns gets as many steps as fit into the round of the others.
        length = max(n * ms for n, ms in (measured[rank] for rank in (present if che is not None else order)))
        ms = tuple(measured[rank][1] for rank in order)
        counts = tuple(
            measured[rank][0] if che is None or rank in present else max(1, int(length / measured[rank][1]))
            for rank in order
        )
        return ElChe.from_dict(saved | {"batch_counts": counts, "ms_per_batch": ms})


def _measured_again(round: int) -> Choice:
    """The choice with which ``policy="auto"`` begins again."""
    return Choice(reason="not measured again since the processes changed: exact sync", since=round)


def refusal(members: Mapping[str, str], candidate: Mapping[str, str]) -> str | None:
    """Why the fingerprint of a candidate is refused, or None."""
    pairs = {name: (members.get(name), candidate.get(name)) for name in {*members, *candidate}}
    different = sorted(name for name, pair in pairs.items() if pair[0] != pair[1] and NONDETERMINISTIC not in pair)
    return f"it differs in {', '.join(different)}; run the same script and data everywhere" if different else None


def ranks_of(processes_of_ranks: Sequence[tuple[int, ...]], processes: Collection[int]) -> list[int]:
    """The ranks with all their processes among the members; none if a member would have no replica."""
    ranks = [rank for rank, own in enumerate(processes_of_ranks) if set(own) <= set(processes)]
    busy = {process for rank in ranks for process in processes_of_ranks[rank]}
    return ranks if busy == set(processes) else []


def _arrays(wanted: dict[str, Any], data: np.ndarray) -> dict[str, Any]:
    """The arrays of a received state, with the shapes and shardings of ``wanted``."""
    leaves, treedef = jax.tree.flatten(wanted)
    arrays, start = [], 0
    for leaf in leaves:
        host = np.frombuffer(data, leaf.dtype, count=int(np.prod(leaf.shape)), offset=start).reshape(leaf.shape)
        start += padded(host.nbytes)
        arrays.append(jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index, host=host: host[index]))
    return jax.tree.unflatten(treedef, arrays)


def _whole(leaf: Any) -> np.ndarray:
    """The host array of a leaf with all its shards in this process."""
    if len(leaf.addressable_shards) == 1:  # without a copy, on the CPU
        return np.asarray(leaf.addressable_shards[0].data)
    host = np.empty(leaf.shape, leaf.dtype)
    for shard in leaf.addressable_shards:
        host[shard.index] = np.asarray(shard.data)
    return host
