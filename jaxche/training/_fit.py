"""``fit``: the training loop over whole epochs, extended by hooks."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from jaxche.distributed import PREEMPTED_CODE, PeerLostError
from jaxche.reports import History, RoundInfo
from jaxche.training._checkpoint_manager import CheckpointManager
from jaxche.training._checkpoints import Checkpoints
from jaxche.training._fingerprint import refuse_differences
from jaxche.training._hooks import Callback, CallbackHook, LauncherHook, ProgressHook, Run
from jaxche.training._rounds import Rounds
from jaxche.training._state import Stop, TrainerState

_log = logging.getLogger("jaxche")

# With fewer rounds an outer momentum mostly overshoots.
_FEW_ROUNDS = 50


def fit(
    trainer: Rounds,
    state: TrainerState,
    data: Any,
    epochs: int = 1,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
    dry_run: bool = False,
    checkpoints: Checkpoints | str | os.PathLike[str] | None = None,
) -> tuple[TrainerState, History]:
    """Train for some epochs; called as ``trainer.fit``.

    Args:
      trainer: the trainer.
      state: the state to start from.
      data: ``len(data)`` batches, ``data[i]``; or an iterable of batches, see :class:`~jaxche.Stream`.
      epochs: how many more epochs, from the state's own epoch on.
      callbacks: functions ``callback(state, info)`` called after every round, on every process. A true result stops
        training; with several processes all stop after the next round, even if only one callback asks to.
      progress: show a bar on rank 0 (lines if stderr is not a terminal).
      dry_run: compile, take one batch on every replica, merge once, and return the state unchanged with the history of
        that round. This finds errors that would otherwise occur early in the run.
      checkpoints: a folder, or :class:`~jaxche.Checkpoints`: the run is saved there. If the folder has a later state
        than the one given, training continues from it to the epoch where it would have ended. On SIGTERM all processes
        save after the same round and exit with code 143. Before the first merge there is nothing to save, and SIGTERM
        ends them at once, as it does without checkpoints.

    Returns:
      ``(state, history)``; with checkpoints the history is of the whole run. A keyboard interrupt returns the state
      and history so far; with several processes it is raised.

    Raises:
      ValueError: ``epochs`` below 1, checkpoints that cannot be written or are of another run, or an argument that
        :meth:`Trainer.round` refuses.
      RuntimeError: this process replaces one that died, and the members refuse to admit it; gives the reason.
      SystemExit: with code 143 after preemption; with code 0 in such a replacement process if the fit has ended.

    Example:
      >>> import jax.numpy as jnp, numpy as np, optax
      >>> import jaxche
      >>> data = jaxche.Batches(np.ones((12, 2), np.float32), batch_size=2)
      >>> trainer = jaxche.Trainer(lambda w, x: jnp.mean((x @ w - 1.0) ** 2), optax.sgd(0.1))
      >>> state, history = trainer.fit(trainer.init(jnp.zeros(2)), data, epochs=2, progress=False)
      >>> state.epoch, sum(info.examples for info in history)
      (2, 24)
    """
    last_epoch, size, config = _agree(trainer, state, data, epochs, dry_run, checkpoints)
    with contextlib.ExitStack() as stack:
        # Requests that come too late must not reach the next fit.
        stack.callback(trainer.reset_requests)
        bar, hooks = ProgressHook(trainer, progress), []
        if config is not None:
            hooks.append(CheckpointManager(config, trainer, data))
            stack.enter_context(hooks[0].active())
        if dry_run:
            _, info = trainer._round(state, data, counts=(1,) * trainer.world_size, keeps=True)
            return state, History([info], trainer.memory)
        stack.callback(bar.close)
        run = Run(state, data, size, last_epoch, hooks=(*hooks, bar, LauncherHook(trainer), CallbackHook(callbacks)))
        _train(trainer, run, bar)
    run.history.memory = tuple(trainer.memory)
    has_momentum = bool(jax.tree.leaves(run.state.local_states[0].outer_state))
    if has_momentum and len(run.history) < _FEW_ROUNDS:
        warnings.warn(
            f"an outer optimizer over only {len(run.history)} rounds: its momentum mostly overshoots; "
            "leave outer=None for short runs",
            stacklevel=3,
        )
    return run.state, run.history


def training_rounds(trainer: Rounds, run: Run) -> Iterator[RoundInfo]:
    """Run rounds until the last epoch; in an elastic run processes may be lost and admitted between them."""
    membership = trainer._membership
    while not run.is_done:
        try:
            if membership:
                membership.admit(run)
            state, info = trainer._round(run.state, run.data, last_epoch=run.last_epoch, prefetch=True)
        except PeerLostError as error:
            if membership is None:
                raise
            membership.recover(run, error)
            continue
        run.previous, run.state = (run.state if membership else None), state
        run.history.append(info)
        yield info


def _train(trainer: Rounds, run: Run, bar: ProgressHook) -> None:
    """Train to the last epoch, or until a hook, a signal or an error ends it."""
    group, membership = trainer._group, trainer._membership
    if membership:
        membership.begin_fit(run)
    for hook in run.hooks:
        hook.on_start(run)
    try:
        for info in training_rounds(trainer, run):
            answers = [hook.on_round(run, info) for hook in run.hooks]
            wants_stop = any(answers)
            if wants_stop and group.num_processes > 1 and not info.stop:
                trainer.request_stop()  # all processes stop after the next round
            if info.stop == Stop.PREEMPTED:
                _stop(run, preempted=True)
                if group.process_index == 0:
                    _log.warning("preempted: saved after round %s", info.round)
                raise SystemExit(PREEMPTED_CODE)
            if info.stop or (wants_stop and group.num_processes == 1):
                _stop(run)
                break
    except KeyboardInterrupt:
        if group.num_processes > 1:
            raise
        _stop(run)
        bar.write(f"interrupted: the state after round {run.state.round - 1} is returned")
    except Exception:
        trainer.last_good_state = run.state
        raise
    if membership:
        membership.end_fit()


def _stop(run: Run, preempted: bool = False) -> None:
    for hook in run.hooks:
        hook.on_stop(run, preempted)


def _agree(
    trainer: Rounds, state: TrainerState, data: Any, epochs: int, dry_run: bool, checkpoints: Any
) -> tuple[int, int, Checkpoints | None]:
    """The last epoch, the batches in an epoch and the checkpoints, checked to be equal in all processes."""
    group = trainer._group
    error, wanted, last_epoch, size, config = None, {}, 0, 0, None
    try:
        if isinstance(epochs, bool) or int(epochs) != epochs or epochs < 1:
            raise ValueError(f"epochs={epochs!r} must be a whole number of at least 1, e.g. epochs=3")
        last_epoch, size = state.epoch + int(epochs), trainer._epoch_size(data, int(epochs))
        if checkpoints is not None:
            config = checkpoints if isinstance(checkpoints, Checkpoints) else Checkpoints(checkpoints)
        # The folder may have another name on another machine.
        how = str(config and {"every": config.every, "keep": config.keep, "durable": config.durable})
        wanted = {"epochs": str(epochs), "dry_run": str(dry_run), "checkpoints": how, "state": f"round {state.round}"}
    except Exception as e:
        error = e
    if not group.standby:
        group.raise_everywhere(error, group.process_index, "the start of fit")
        refuse_differences(group, wanted)
    elif error is not None:
        raise error
    return last_epoch, size, config
