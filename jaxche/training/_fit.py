"""``fit``: the training loop, extended by hooks."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax

from jaxche.data import as_stream, is_stream, line_for_two_arrays
from jaxche.distributed import PREEMPTED_CODE, PeerLostError, delayed_interrupt
from jaxche.messages import type_of
from jaxche.replicas import free
from jaxche.reports import Every, History, RoundInfo, as_every
from jaxche.training._checkpoints import CheckpointManager, Checkpoints
from jaxche.training._checks import check_flags, checked_callbacks
from jaxche.training._ema import with_ema_values
from jaxche.training._evaluate import (
    MOST_BATCHES,
    MetricProgram,
    batches_of,
    check_evaluation,
    evaluate,
    metric_program,
    number_of_batches,
)
from jaxche.training._fingerprint import refuse_differences
from jaxche.training._hooks import (
    Callback,
    CallbackHook,
    DonationHook,
    EvaluationHook,
    Hook,
    LauncherHook,
    ProgressHook,
    Run,
)
from jaxche.training._plan import End, GivenRound
from jaxche.training._rounds import Rounds
from jaxche.training._start_checks import checked_epoch_size
from jaxche.training._state import Stop, TrainerState
from jaxche.training._updates import UpdatesHook

_log = logging.getLogger("jaxche")

# With fewer rounds an outer momentum mostly overshoots.
_FEW_ROUNDS = 50
# Arguments, and the one that each is about.
_ABOUT = {
    "eval_every": "validation",
    "metric_fn": "validation",
    "metrics": "validation",
    "checkpoint_every": "checkpoints",
}


def fit(
    trainer: Rounds,
    state: TrainerState,
    data: Any,
    epochs: int | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
    dry_run: bool = False,
    checkpoints: Checkpoints | str | os.PathLike[str] | None = None,
    *,
    max_steps: int | None = None,
    max_examples: int | None = None,
    max_time: float | None = None,
    validation: Any = None,
    metric_fn: Callable[..., Any] | None = None,
    metrics: Any = None,
    eval_every: Every | int | None = None,
    log_every: Every | int | None = None,
    checkpoint_every: Every | int | None = None,
    donate: bool = False,
) -> tuple[TrainerState, History]:
    """Train for some epochs, steps, examples or seconds.

    Training ends at the first limit. Each counts from the given state; if a checkpoint folder has a later state of the
    same run, training continues from that and ends where it would have ended.

    Args:
      state: from :meth:`init` or an earlier fit.
      data: ``len(data)`` batches, ``data[i]``; or an iterable of batches, see :class:`~jaxche.Stream`.
      epochs: how many more epochs, from the state's own epoch on. None is one epoch, or no limit if there is another;
        an iterator, which can be read once, has one.
      callbacks: functions ``callback(state, info)`` called after every round, and after the evaluation of that round,
        on every process. One that returns True stops training; with several processes all stop after the next round,
        even if only one callback asks to. Let a callback that watches a loss read ``info.validation``: ``info.loss`` is
        a mean over the examples of one round, and rounds differ in length.
      progress: show a bar on rank 0 (lines if stderr is not a terminal). Its numbers are those of ``RoundInfo``: the
        first epoch is 0.
      dry_run: compile, take one batch on every replica, merge once, and return the state unchanged with the history of
        that round. With ``validation`` one batch is evaluated too. This finds errors that would otherwise occur early
        in the run.
      checkpoints: a folder, or :class:`~jaxche.Checkpoints`: the run is saved there. If the folder has a later state
        than the one given, training continues from it to the end where it would have ended. On SIGTERM all processes
        save after the same round and exit with code 143. Before the first merge there is nothing to save, and SIGTERM
        ends them at once, as it does without checkpoints.
      max_steps: how many more steps. A step is a batch of the data trained on by any replica, which is what a schedule
        in ``tx`` counts; training ends after exactly this number.
      max_examples: how many more examples. Training ends at the first merge at which as many are done; the last round
        has no more batches than are needed for that, if they are whole ones.
      max_time: how many more seconds. Training ends at the first merge after. Only steps, waits and merges count, as in
        ``RoundInfo.clock_ms``, not compilation, evaluation, callbacks and checkpoints. On a
        :class:`~jaxche.VirtualFleet` these are its seconds.
      validation: data to evaluate the merged parameters on, or with ``ema=`` their moving average, as for
        :meth:`evaluate`. The results are in ``RoundInfo.validation``, and so in the history, its plot, the progress
        line and the loggers. One batch is read before the first step, to refuse what could not be evaluated.
      metric_fn: of the evaluation, see :meth:`evaluate`.
      metrics: of the evaluation, as for :meth:`evaluate`.
      eval_every: when to evaluate, an :class:`~jaxche.Every` or a number of steps; by default after every epoch. The
        last round is always evaluated, unless training was interrupted.
      log_every: how often the progress prints a line, and a :class:`~jaxche.reports.Logger` such as TensorBoard's gets
        a round, as for ``eval_every``; that round has its own numbers, not means over the rounds left out. By
        default a line is printed every ten seconds, and every round is logged. Rounds with an evaluation and the last
        one always are. The history has every round, and other callbacks get every round.
      checkpoint_every: how often to save, as for ``eval_every``; it replaces ``every`` of :class:`~jaxche.Checkpoints`.
      donate: take the arrays of ``state``, and in each round those of the state before it, as ``donate_argnums`` of
        ``jax.jit`` does: devices then hold the optimizer's state once, not three times. Do not use that state again,
        nor those that callbacks were given in earlier rounds. An error within a round leaves no state, so save
        checkpoints. Ctrl-C interrupts after the round. Rounds keep their state, and only the given one is freed, in
        elastic runs, with ``overlap=``, and with :class:`~jaxche.AdamScale` on several replicas. ``policy="auto"``
        runs no merges beside steps then, unless ``overlap=`` is given.

    Returns:
      ``(state, history)``; with checkpoints the history is of the whole run. A keyboard interrupt returns the state
      and history so far. It is raised with several processes, and before the rounds, while the arguments are checked
      and a checkpoint is restored.

    Raises:
      ValueError: a limit or a frequency that is not above 0, validation data that can be read once only, an argument
        without the one that it is about, checkpoints that cannot be written or are of another run, or an argument that
        :meth:`round` refuses.
      OSError: there was no space for the last checkpoint; the state is in ``trainer.last_good_state``.
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

      With an evaluation every four steps:

      >>> state, history = trainer.fit(state, data, max_steps=8, validation=data, eval_every=4, progress=False)
      >>> state.steps, history[-1].steps_done, sorted(history[-1].validation)
      (20, 20, ['loss'])
    """
    check_flags(progress=progress, dry_run=dry_run, donate=donate)
    limits = {"epochs": epochs, "max_steps": max_steps, "max_examples": max_examples, "max_time": max_time}
    frequencies = {"eval_every": eval_every, "log_every": log_every, "checkpoint_every": checkpoint_every}
    arguments = _Arguments(data, limits, frequencies, validation, metric_fn, metrics, callbacks, dry_run, checkpoints)
    agreed = _agree(trainer, state, arguments)
    with contextlib.ExitStack() as stack:
        # Requests that come too late must not reach the next fit.
        stack.callback(trainer.reset_requests)
        hooks: list[Hook] = []
        if agreed.program is not None:
            every = agreed.every["eval_every"] or Every(epochs=1)
            hooks.append(EvaluationHook(trainer, validation, agreed.program, metrics, every))
        if agreed.checkpoints is not None:
            manager = CheckpointManager(agreed.checkpoints, trainer, data, agreed.every["checkpoint_every"])
            hooks.append(manager)
            stack.enter_context(manager.active())
        if dry_run:
            return state, History([_dry_round(trainer, state, arguments, agreed.program)], trainer.memory)
        log_every = agreed.every["log_every"]
        bar = ProgressHook(trainer, progress, log_every)
        stack.callback(bar.close)
        calls = CallbackHook(agreed.callbacks, log_every, trainer._group.is_leader)
        hooks += [UpdatesHook(trainer), bar, LauncherHook(trainer), calls]
        hooks += [DonationHook(state)] if donate else []
        # An elastic run repeats a round without those that were lost in it, from the state before it.
        run = Run(state, data, agreed.size, agreed.end, donates=donate and not trainer._membership, hooks=hooks)
        _train(trainer, run)
    is_short = run.is_done and not run.end._replace(epochs=None).is_reached(run.state)
    if is_short and epochs is None and any(limits.values()) and trainer._group.is_leader:
        _log.warning(
            "data ended after %s steps, before the limits of this fit: it is %s, which can be read once; for more "
            "epochs write jaxche.Stream(lambda epoch: batches(seed=epoch))",
            f"{run.state.steps - state.steps:,}",
            type_of(as_stream(data).source),
        )
    run.history.memory = tuple(trainer.memory)
    if len(run.history) < _FEW_ROUNDS and jax.tree.leaves(run.state.local_states[0].outer_state):
        warnings.warn(
            f"an outer optimizer over only {len(run.history)} rounds: its momentum mostly overshoots; "
            "leave outer=None for short runs",
            stacklevel=4,
        )
    return run.state, run.history


def _dry_round(trainer: Rounds, state: TrainerState, arguments: _Arguments, program: MetricProgram | None) -> RoundInfo:
    """The record of one batch on every replica, one merge, and one batch of validation data."""
    given = GivenRound((1,) * trainer.world_size, keeps=True)
    after, info = trainer._round(state, arguments.data, given=given)
    after.merged()
    if program is None:
        return info
    averaged = with_ema_values(trainer._engine, state)
    batches = [*itertools.islice(batches_of(arguments.validation), 1)] * trainer.world_size
    return replace(info, validation=evaluate(trainer, averaged, batches, program, arguments.metrics))


def training_rounds(trainer: Rounds, run: Run) -> Iterator[RoundInfo]:
    """Run rounds until the end; in an elastic run processes may be lost and admitted between them."""
    membership = trainer._membership
    while not run.is_done:
        with _donated(run) if run.donates else contextlib.nullcontext():
            try:
                if membership:
                    membership.admit(run)
                given = GivenRound(donates=run.donates, settles=run.settles)
                state, info = trainer._round(run.state, run.data, run.end, given)
                if membership:
                    state = membership.after_round(state)
                if info.stop or run.end.is_reached(state):
                    state = trainer._settled(state)
            except PeerLostError as error:
                if membership is None:
                    raise
                membership.recover(run, error)
                continue
            run.advance(state, info, keeps=membership is not None)
        yield info


@contextlib.contextmanager
def _donated(run: Run) -> Iterator[None]:
    """A round that takes the arrays of the state: Ctrl-C interrupts after it, and an error may leave no state."""
    line = "interrupted: fit ends after this round; a second Ctrl-C ends it now, and with donate=True no state is left"
    with delayed_interrupt(line):
        try:
            yield
        except BaseException as error:
            run.is_lost = run.state.is_deleted
            if run.is_lost:
                free(run.state.local_states, kept=[])
                error.add_note(
                    "fit(donate=True) has taken the state before this round; continue from a checkpoint, or leave "
                    "donate= out"
                )
            raise


def _train(trainer: Rounds, run: Run) -> None:
    """Train to the end, or until a hook, a signal or an error ends it."""
    group, membership = trainer._group, trainer._membership
    if membership:
        membership.begin_fit(run)
    for hook in run.hooks:
        hook.on_start(run)
    try:
        stopped = None
        while True:
            try:
                if run.state.round != stopped:
                    _run_rounds(trainer, run)
                    stopped = run.state.round
                for hook in run.hooks:
                    hook.on_end(run)
                if membership:
                    membership.end_fit()
                break
            except PeerLostError as error:
                if membership is None:
                    raise
                # The remaining processes end the fit again: the lost one may have written only a part of what it wrote.
                membership.recover(run, error)
    except KeyboardInterrupt:
        if group.num_processes > 1 or run.is_lost:
            raise
        _stop(run)
        # Also without progress: a loop around fit goes on.
        done = f"after round {run.state.round - 1}" if run.state.round else "from before the first round"
        _log.warning("interrupted: fit returns the state %s, and the script goes on after it", done)
    except SystemExit as error:
        # The others would wait for this process in the next merge.
        if error.code != PREEMPTED_CODE and not group.ends_together():
            raise RuntimeError(
                f"sys.exit({error.code!r}) ended process {group.process_index} within fit, and others still train; to "
                "stop all processes, return True from a callback, and exit after fit"
            ) from error
        raise
    except Exception:
        trainer.last_good_state = None if run.is_lost else run.state
        raise


def _run_rounds(trainer: Rounds, run: Run) -> None:
    """Run rounds until the end, or until a hook or a signal stops them."""
    group = trainer._group
    for info in training_rounds(trainer, run):
        answers = [hook.on_round(run, run.history[-1]) for hook in run.hooks]
        wants_stop = any(answers)
        if wants_stop and group.num_processes > 1 and not info.stop:
            trainer.request_stop()  # all processes stop after the next round
        if info.stop == Stop.PREEMPTED:
            _stop(run, preempted=True)
            raise SystemExit(PREEMPTED_CODE)
        if info.stop or (wants_stop and group.num_processes == 1):
            _stop(run)
            break


def _stop(run: Run, preempted: bool = False) -> None:
    run.state = run.state.merged()
    for hook in run.hooks:
        hook.on_stop(run, preempted)


class _Checked(NamedTuple):
    """The checked arguments of a fit."""

    end: End
    size: int  # batches in an epoch
    callbacks: Sequence[Callback]
    every: dict[str, Every | None]
    program: MetricProgram | None
    checkpoints: Checkpoints | None
    texts: dict[str, str]  # equal in all processes


class _Arguments(NamedTuple):
    """The arguments of a fit, as given."""

    data: Any
    limits: dict[str, Any]
    frequencies: dict[str, Any]
    validation: Any
    metric_fn: Callable[..., Any] | None
    metrics: Any
    callbacks: Any
    dry_run: bool
    checkpoints: Any

    def checked(self, trainer: Rounds, state: TrainerState) -> _Checked:
        """The checked arguments of a fit that starts from this state."""
        callbacks = checked_callbacks(self.callbacks)
        trainer.check_state(state, "trainer.fit")
        limits = self.limits
        if limits["epochs"] is None and is_stream(self.data) and as_stream(self.data).has_one_epoch:
            limits = limits | {"epochs": 1}
        end = End.of_fit(state, **limits)
        epochs = 1 if end.epochs is None else end.epochs - state.epoch
        size = checked_epoch_size(trainer._settings, self.data, epochs)
        if size > MOST_BATCHES and end == End(epochs=end.epochs):
            raise ValueError(
                f"epochs={epochs}, and an epoch of this data has {size:,} batches, as of a data set "
                "that repeats without end; leave out .repeat(), or write max_steps=1000 in place of epochs="
            )
        self._warn_of_equal_epochs(state, end, size, trainer._group.is_leader)
        if trainer._group.is_leader and isinstance(self.data, tuple) and (line := line_for_two_arrays(self.data)):
            _log.warning("%s; if they are two batches, write data=list(data)", line)
        every = {name: as_every(name, value) for name, value in self.frequencies.items()}
        end = end._replace(stops=tuple(one.steps for one in every.values() if one is not None and one.steps))
        self._refuse_unused()
        config = self.checkpoints
        if config is not None and not isinstance(config, Checkpoints):
            config = Checkpoints(config)
        # The folder may have another name on another machine.
        how = str(config and {"every": config.every, "keep": config.keep, "durable": config.durable})
        texts = {name: str(value) for name, value in (limits | every).items()}
        texts |= {"dry_run": str(self.dry_run), "checkpoints": how, "state": f"round {state.round}"}
        texts["validation"] = str(self.validation is not None)
        program = None if self.validation is None else self._evaluation(trainer, state)
        return _Checked(end, size, callbacks, every, program, config, texts)

    def _warn_of_equal_epochs(self, state: TrainerState, end: End, size: int, is_leader: bool) -> None:
        """Warn of a sequence with ``set_epoch()``, which is called for streams, if the fit has more than one epoch."""
        data = self.data
        if is_stream(data) or callable(getattr(data, "epoch", None)) or not callable(getattr(data, "set_epoch", None)):
            return
        is_one = end.epochs == state.epoch + 1 or (end.steps is not None and end.steps - state.steps <= size)
        if is_leader and not is_one:
            _log.warning(
                "data is %s with set_epoch(), which is called for a stream only: all epochs of this fit have the "
                "same batches in the same order. For another order in each, give it a method epoch(e) that returns the "
                "batches of epoch e, or write jaxche.Stream(lambda epoch: batches(epoch))",
                type_of(data),
            )

    def _refuse_unused(self) -> None:
        """Refuse arguments without the one that they are about."""
        given = self._asdict() | self.frequencies
        for name, other in _ABOUT.items():
            if given[name] is not None and given[other] is None:
                raise ValueError(f"{name}= is given without {other}=; give both, or none")

    def _evaluation(self, trainer: Rounds, state: TrainerState) -> MetricProgram:
        """The program of the evaluations; refuses data that can be read once only, and what they would refuse."""
        try:
            size = number_of_batches(self.validation, trainer._group)
        except ValueError as error:
            raise ValueError(f"validation: {error}") from None
        if size is None and ((stream := as_stream(self.validation)).has_one_epoch or stream.shares_iterator):
            raise ValueError(
                f"validation is {type_of(stream.source)}, which can be read once only, and every evaluation "
                "reads all of it; write validation=list(...)"
            )
        program = metric_program(trainer, self.metric_fn, self.metrics)
        check_evaluation(trainer, state, self.validation, program, self.metrics)
        return program


def _agree(trainer: Rounds, state: TrainerState, arguments: _Arguments) -> _Checked:
    """The arguments of a fit, checked to be equal in all processes."""
    group = trainer._group
    if group.standby:
        return arguments.checked(trainer, state)
    with group.errors_everywhere(group.process_index, "the start of fit"):
        checked = arguments.checked(trainer, state)
    refuse_differences(group, checked.texts)
    return checked
