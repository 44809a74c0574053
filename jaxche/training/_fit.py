"""Whole epochs: rounds in a row, with progress, callbacks and a way to stop."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from jaxche.distributed import PREEMPTED_CODE, ElasticGroup, Group, PeerLostError, on_sigterm
from jaxche.reports import History, RoundInfo
from jaxche.training._checkpoints import Checkpoints
from jaxche.training._checks import checked_length
from jaxche.training._fingerprint import refuse_differences
from jaxche.training._keeper import Keeper
from jaxche.training._progress import Progress
from jaxche.training._state import ReplicaState, Stop

if TYPE_CHECKING:
    from jaxche.training._trainer import Trainer

_log = logging.getLogger("jaxche")

# Below this many rounds an outer momentum mostly overshoots.
_FEW_ROUNDS = 50

Callback = Callable[[ReplicaState, RoundInfo], Any]


def fit(
    trainer: Trainer,
    state: ReplicaState,
    data: Any,
    epochs: int = 1,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
    dry_run: bool = False,
    checkpoints: Checkpoints | str | os.PathLike[str] | None = None,
) -> tuple[ReplicaState, History]:
    """Train for some epochs; called as ``trainer.fit``.

    Args:
      trainer: the trainer.
      state: where to start.
      data: ``len(data)`` batches, ``data[i]``.
      epochs: how many more epochs, from the state's own epoch on.
      callbacks: functions ``callback(state, info)`` called after every round, on every process; one that returns
        something true stops training; with several processes all stop after the next round, also if only one wants to.
      progress: show a bar on rank 0 (plain lines where stderr is not a terminal).
      dry_run: compile, take one batch on every replica, merge once, and return the state unchanged with the one
        round's history: everything that can fail early has then run.
      checkpoints: a folder, or :class:`~jaxche.Checkpoints`: the run is saved there, and where it holds a later state
        than the one given, training goes on from it, to the epoch where it would have ended. On SIGTERM all processes
        save after the same round and exit with code 143; before the first round has merged, when there is nothing to
        save, they die of it at once, as they do without checkpoints.

    Returns:
      ``(state, history)``; with checkpoints the history is of the whole run. An interrupt from the keyboard returns
      what was reached (one process only; with many, it is raised).

    Raises:
      ValueError: ``epochs`` below 1, checkpoints that cannot be written or are of another run, or whatever
        :meth:`Trainer.round` refuses.
      RuntimeError: this process takes the place of one that died, and the others cannot let it in; says why.
      SystemExit: with code 143, preempted; with code 0 where it takes such a place and this fit has ended there.

    Example:
      >>> import jax.numpy as jnp, numpy as np, optax
      >>> import jaxche
      >>> data = jaxche.Batches(np.ones((12, 2), np.float32), batch_size=2)
      >>> trainer = jaxche.Trainer(lambda w, x: jnp.mean((x @ w - 1.0) ** 2), optax.sgd(0.1))
      >>> state, history = trainer.fit(trainer.init(jnp.zeros(2)), data, epochs=2, progress=False)
      >>> state.epoch, sum(info.examples for info in history)
      (2, 24)
    """
    group, membership = trainer._group, trainer._membership
    last_epoch, size, asked = _agreed(group, state, data, epochs, dry_run, checkpoints)
    keeper, history = None, History()
    with contextlib.ExitStack() as stack:
        # Who asked to stop or to join too late is not for the next fit.
        stack.callback(setattr, trainer, "_stop", Stop.NO)
        if membership:
            stack.callback(membership.reset)
        # Left after the keeper: another SIGTERM does not end what the first one had saved.
        heeding = stack.enter_context(contextlib.ExitStack())
        if asked is not None:
            keeper = Keeper(asked, trainer, data)
            stack.push(keeper.close)
        if dry_run:
            _, info = trainer.round(state, data, counts=(1,) * trainer.world_size)
            return state, History([info], trainer.memory)
        if isinstance(group, ElasticGroup):
            group.begin_fit()
        if membership and group.standby:
            state, history = membership.join(state, data, size, keeper)
        elif keeper:
            state, history = keeper.resume(state)
        bar = Progress(trainer, size, (state.epoch, state.cursor), last_epoch, progress)
        stack.callback(bar.close)
        before, merged = None, False
        try:
            while state.epoch < last_epoch or state.owed:
                try:
                    if membership and membership.has_pending:
                        state, before = membership.admit(state, history, keeper), None
                    after, info = trainer._round(state, data, last_epoch=last_epoch, ahead=True)
                except PeerLostError as error:
                    if membership is None:
                        raise
                    state, history = membership.recover(state, before, error, history, keeper, data, size)
                    before = None
                    continue
                before, state = (state if membership else None), after
                if keeper and not merged:
                    # Earlier the time for it could be over before there is anything to save.
                    heeding.enter_context(on_sigterm(lambda: trainer.request_stop(Stop.PREEMPTED)))
                merged = True
                history.append(info)
                bar.update(info)
                if keeper:
                    keeper.record.add(info)
                    if keeper.due(state) or info.stop or (state.epoch >= last_epoch and not state.owed):
                        keeper.save(state)
                trainer._tell(info)
                asked_to = [callback(state, info) for callback in callbacks]  # all of them, also after one said stop
                if any(asked_to) and group.num_processes > 1 and not info.stop:
                    trainer.request_stop()  # in the next round, together
                if info.stop == Stop.PREEMPTED:
                    if keeper:
                        keeper.settle()
                    if group.process_index == 0:  # whatever the bar: nobody asked for this
                        _log.warning("preempted: saved after round %s", info.round)
                    raise SystemExit(PREEMPTED_CODE)
                if info.stop or (any(asked_to) and group.num_processes == 1):
                    if keeper:
                        keeper.save(state)
                    break
        except KeyboardInterrupt:
            if group.num_processes > 1:
                raise
            if keeper:
                keeper.save(state)
            bar.say(f"interrupted: the state after round {state.round - 1} is returned")
        except Exception:
            trainer.last_good_state = state
            raise
        if isinstance(group, ElasticGroup):
            group.end_fit()
    history.memory = tuple(trainer.memory)
    has_momentum = bool(jax.tree.leaves(state.locals[0].outer_state))
    if has_momentum and len(history) < _FEW_ROUNDS:
        warnings.warn(
            f"an outer optimizer over only {len(history)} rounds: its momentum mostly overshoots; "
            "leave outer=None for short runs",
            stacklevel=3,
        )
    return state, history


def _agreed(
    group: Group, state: ReplicaState, data: Any, epochs: int, dry_run: bool, checkpoints: Any
) -> tuple[int, int, Checkpoints | None]:
    """Where training ends, the batches in an epoch, and what is saved, once all processes want the same."""
    error, wanted, last_epoch, size, asked = None, {}, 0, 0, None
    try:
        if isinstance(epochs, bool) or int(epochs) != epochs or epochs < 1:
            raise ValueError(f"epochs={epochs!r} must be a whole number of at least 1, e.g. epochs=3")
        last_epoch, size = state.epoch + int(epochs), checked_length(data)
        if checkpoints is not None:
            asked = checkpoints if isinstance(checkpoints, Checkpoints) else Checkpoints(checkpoints)
        # A folder may have another name on another machine.
        how = str(asked and {"every": asked.every, "keep": asked.keep, "durable": asked.durable})
        wanted = {"epochs": str(epochs), "dry_run": str(dry_run), "checkpoints": how, "state": f"round {state.round}"}
    except Exception as e:
        error = e
    if not group.standby:
        group.raise_everywhere(error, group.process_index, "the start of fit")
        refuse_differences(group, wanted)
    elif error is not None:
        raise error
    return last_epoch, size, asked
