"""Checkpoints of a fit: the folder and the frequency, and the hook that saves the run and restores it."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median_low
from typing import Any

import jax
import optax

from jaxche.cadence import ApplyPolicy
from jaxche.checkpoints import (
    CheckpointReader,
    CheckpointWriter,
    FolderLock,
    MetricsLog,
    leaf_shapes,
    shared_folder,
)
from jaxche.data import StreamReader, from_json, is_stream, to_json
from jaxche.distributed import PeerLostError, on_sigterm
from jaxche.messages import whole_number
from jaxche.replicas import LocalState, with_previous_gradient
from jaxche.reports import Every, RoundInfo
from jaxche.training._ema import with_ema_step
from jaxche.training._engine import Engine
from jaxche.training._fingerprint import NONDETERMINISTIC
from jaxche.training._hooks import Hook, Run
from jaxche.training._rounds import Rounds
from jaxche.training._state import Stop, TrainerState
from jaxche.training._state_dict import StateDict, metadata, with_metadata

_log = logging.getLogger("jaxche")

# Trees of a checkpoint that follow from an argument of the trainer: whose it is, and what to use.
_OF_ARGUMENTS = {
    "noise": ("a run with another scaling=", "scaling="),
    "outer_state": ("a run with another outer=", "outer="),
    "ema": ("a run with another ema=", "ema="),
    "opt_state": ("a run with another tx", "tx"),
}
# Seconds between checkpoints where rounds are short, by default. With overlap at least so many merges are between them,
# because a save waits for the merge before it.
_PAUSE_S, _MERGES = 1.0, 20
# Seconds before each further try of the last checkpoint, if there was no space.
_PAUSES_S = (1.0, 3.0, 6.0)


@dataclass(frozen=True)
class Checkpoints:
    """Where and how often to save a run; ``trainer.fit(..., checkpoints=...)`` continues from the newest checkpoint.

    A checkpoint has the merged parameters and model state, their moving average, the optimizer state of every replica
    and of ``outer``, noise and progress, the cadence, and the position in the data. A save copies the arrays and writes
    them while training continues; the next save waits for it. So a failure loses at most the current round and the one
    before, and with ``durable`` the current round only; under exact sync, and with merges beside steps, it loses by
    default the training of about a second or more, see ``every``. A file that is damaged later loses one checkpoint
    more. Unfinished checkpoints are ignored. In a run of several processes all of them write into one shared folder. A
    save without space on the disk leaves its checkpoint out, with a warning; ``fit`` raises OSError if it is the last
    one.

    With the same number of replicas, training continues bit for bit. With another number, each replica starts from the
    mean of the saved optimizer states (values other than floats: those of the first replica), and the cadence measures
    again from the saved anchor. The noise scale continues; with a single replica before or after, its next gradient is
    not compared with an earlier one. No batch is repeated or left out, because the position in the data does not depend
    on the number of replicas.

    Plain Orbax opens the parameters: ``ocp.StandardCheckpointer().restore(folder / "12" / "params")``. The record of
    the rounds is beside them, in ``history.jsonl``.

    Args:
      folder: for the checkpoints of one run.
      every: rounds between checkpoints, unless ``fit(checkpoint_every=)`` is given. By default 1, but once a second (on
        the clock of the run) under exact sync, where a round is one update, and where merges run beside steps, because
        a checkpoint waits for them; then at most once in the time of 20 merges. The last round, and one in which a stop
        is requested, is always saved.
      keep: number of newest checkpoints to keep.
      durable: whether training waits until each checkpoint is written. Not for elastic runs, where processes may die.

    Raises:
      ValueError: ``every`` or ``keep`` below 1; and in ``trainer.fit``, ``durable`` in an elastic run.

    References:
      Orbax, ``CheckpointManager``.

    Example:
      >>> import tempfile, jaxche, jax.numpy as jnp, numpy as np, optax
      >>> data = jaxche.Batches(np.ones((12, 2), np.float32), batch_size=2)
      >>> def train(folder):
      ...     trainer = jaxche.Trainer(lambda w, x: jnp.mean((x @ w - 1.0) ** 2), optax.adam(0.1), policy="sync")
      ...     state = trainer.init(jnp.zeros(2))
      ...     return trainer.fit(state, data, epochs=2, progress=False, checkpoints=jaxche.Checkpoints(folder, every=3))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     state, history = train(folder)
      ...     again, record = train(folder)  # restores the last checkpoint
      >>> again.epoch, len(record) == len(history), bool(jnp.all(again.params == state.params))
      (2, True, True)
    """

    folder: str | os.PathLike[str]
    every: int | None = None
    keep: int = 3
    durable: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.folder, str | os.PathLike) or not os.fspath(self.folder):
            raise ValueError(f"checkpoints={self.folder!r} is not a folder; write checkpoints='runs/mine/checkpoints'")
        if "://" in os.fspath(self.folder):
            raise ValueError(
                f"folder={os.fspath(self.folder)!r} is not a folder of this system; mount the bucket on every machine "
                "and give the folder where it is, e.g. folder='/mnt/bucket/run'"
            )
        if self.every is not None:
            whole_number("every", self.every, 1, "every=3")
        whole_number("keep", self.keep, 1, "keep=3")


class CheckpointManager(Hook):
    """Saves and restores the checkpoints of a fit; refuses a folder that processes cannot write or do not share."""

    def __init__(self, config: Checkpoints, trainer: Rounds, data: Any, every: Every | None = None):
        self._group = trainer._group
        if config.durable and self._group.elastic:
            raise ValueError(
                "durable=True waits for all processes to write, and an elastic run continues without those that die: "
                "the others have its parameters; leave durable out"
            )
        self._config, self._trainer, self._data = config, trainer, data
        self._every = every  # in place of that of the config
        self._logged: RoundInfo | None = None
        self._folder = shared_folder(self._group, config.folder)
        self._lock = FolderLock(self._folder)
        self._writer = CheckpointWriter(self._group, self._folder, config.keep)
        with self._group.errors_everywhere(self._group.process_index, "the reading of the data"):
            digest = trainer._engine.data_digest(trainer._reader(data))
        # What the run was made with, by name in the metadata.
        batches = "a stream" if is_stream(data) else len(data)
        self._source = {"batches": batches, "data": digest, "seed": trainer._settings.seed}
        self._log = MetricsLog(self._group, self._folder)
        self._sigterm = contextlib.ExitStack()
        self._handles_sigterm = self._warned = False

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """The context of the fit; its exit waits until all saves are written."""
        with contextlib.ExitStack() as stack:
            # Remove the handler last, so that another SIGTERM does not end the process before all saves are written.
            stack.enter_context(self._sigterm)
            stack.callback(self._lock.release)
            stack.push(self.close)
            yield

    def on_start(self, run: Run) -> None:
        """Restore the newest checkpoint, if it is of a later round than the state of the run."""
        # With the versions that trace it.
        self._source["optimizer"] = [
            f"{jax.__version__} {optax.__version__}",
            self._trainer._engine.tx_digest(run.state.local_states[0]),
        ]
        if self._writer.is_open:  # this process was admitted, with the state of the others
            return
        with self._group.errors_everywhere(self._group.process_index, "the lock of the checkpoints folder"):
            if self._group.is_leader:
                self._lock.acquire()
        restore = Restore(self._trainer, self._folder, self._source)
        given, run.state = run.state, restore.newest(run.state)
        ended = "that run has ended, so nothing is trained now: give each run a folder of its own"
        if restore.is_of_other_data and self._group.is_first:
            _log.warning(
                "checkpoints=%r was made with other data of the same number of batches; %s",
                str(self._folder),
                ended if run.is_done else "training continues with this data",
            )
        if restore.is_of_other_optimizer and self._group.is_first:
            _log.warning(
                "checkpoints=%r was made with another tx, or other settings of it, such as its learning rate; %s",
                str(self._folder),
                ended if run.is_done else "training continues with this one",
            )
        if run.end.is_passed(run.state) and not restore.is_of_other_data and self._group.is_first:
            # A loop of fits that is started again counts each from here, and trains for longer.
            _log.warning(
                "checkpoints=%r has epoch %s, step %s of a run, beyond the end of this fit: it trains nothing, and a "
                "fit after it counts from there. In place of a loop of fits write one fit(epochs=...) over all epochs",
                str(self._folder),
                run.state.epoch,
                run.state.steps,
            )
        self._writer.open()
        run.history = self._log.truncate(run.state.round)
        self._logged = run.history[-1] if run.history else None
        if (run.history or run.state is not given) and not run.has_last_record and self._group.is_first:
            _log.warning(
                "%s ends before round %s, the last one before this fit: rounds are missing from the history. If it is "
                "the record of another run, give each run a folder of its own",
                self._folder / "history.jsonl",
                run.state.round - 1,
            )
        run.settles = self._every is None and self._config.every == 1
        # Not where "auto" has chosen overlap: it waits for merges then.
        if self._trainer._local_engines[0].overlaps and run.settles and self._group.is_first:
            _log.warning(
                "a checkpoint waits for the merge before it, so with one after every round overlap= hides nothing; "
                "write trainer.fit(..., checkpoint_every=jaxche.Every(seconds=600))"
            )

    def on_round(self, run: Run, info: RoundInfo) -> bool:
        if not self._handles_sigterm:
            # Before the first round there is nothing to save, and SIGTERM ends the process.
            self._sigterm.enter_context(on_sigterm(lambda: self._trainer.request_stop(Stop.PREEMPTED)))
            self._handles_sigterm = True
        self._append(info)
        if self._is_due(run, info) or info.stop or run.is_done:
            with self._writer.unless_lost("begun"):
                # A resumed run continues from there, and so does this one.
                run.state = self._trainer._settled(run.state)
                self._save(run.state)
        return False

    def _is_due(self, run: Run, info: RoundInfo) -> bool:
        if self._writer.is_overdue:
            return True
        if self._every is not None:
            return run.is_due(self._every)
        if self._config.every is not None:
            return run.state.round % self._config.every == 0
        if info.overlap:  # a save waits for the merge
            merges_ms = run.state.che.sync_samples if run.state.che else ()
            return run.is_due(Every(seconds=max(_PAUSE_S, _MERGES * median_low(merges_ms or [0.0]) / 1e3)))
        # A save takes a hundred times as long as a short update.
        return info.policy != ApplyPolicy.SYNC or run.is_due(Every(seconds=_PAUSE_S))

    def on_end(self, run: Run) -> None:
        self._append_last(run)
        self._writer.settle()
        if self._writer.discard_abandoned(run.state.round):
            self._save(run.state)
            self._writer.settle()
        for pause_s in _PAUSES_S:
            if self._writer.missing:
                time.sleep(pause_s)
                self._save(run.state)
                self._writer.settle()
        self._log.flush()
        if self._writer.missing:
            raise OSError(
                f"the last checkpoint, {run.state.round}, is missing: {self._writer.missing} in {self._folder}. Make "
                "space there and start the run again: it continues from the newest checkpoint. The state of this run "
                "is in trainer.last_good_state"
            )

    def _append(self, info: RoundInfo) -> None:
        self._log.append(info)
        self._logged = info

    def _append_last(self, run: Run) -> None:
        """Append the last record, if it was evaluated since, or a keyboard interrupt came before it was written."""
        if run.history and run.history[-1] is not self._logged:
            self._append(run.history[-1])

    def on_admission(self) -> None:
        self._writer.settle()

    def on_membership(self, run: Run, shrunk: bool) -> None:
        """Continue with the present members from the state of the run."""
        if self._group.is_leader:  # that of a leader that was lost may last a while
            self._lock.try_acquire()
        self._writer.reopen(shrunk)
        kept = self._log.truncate(run.state.round)
        # The process that wrote the record may have died before it wrote the last rounds.
        last = kept[-1].round if kept else -1
        for info in run.history:
            if info.round > last:
                self._log.append(info)
        self._logged = run.history[-1] if run.history else None

    def on_stop(self, run: Run, preempted: bool = False) -> None:
        self._append_last(run)
        self._writer.settle()
        self._save(run.state)
        if preempted:
            self._writer.settle()
            if self._group.is_leader and not self._writer.missing:
                _log.warning("preempted: saved after round %s", run.state.round - 1)

    def close(self, kind: Any, error: Any, trace: Any) -> None:
        """Wait until all saves are written, but not after the death of a process."""
        if self._writer.is_open and not isinstance(error, PeerLostError):
            self._writer.close(error)

    def _save(self, state: TrainerState) -> None:
        """Save a state unless it is saved; returns when the arrays are copied, or with ``durable`` written."""
        if not self._writer.begin(state.round):
            return
        # A round that was interrupted may have changed the engine.
        state_dict = self._trainer._engine.state_dict(state.local_states, state.opt_states_differ)
        trees = state_dict.trees()
        meta = metadata(self._with_iterators(state)) | {"rows": state_dict.rows} | self._source
        self._writer.save(state.round, meta, trees)
        if self._config.durable:
            self._writer.settle()

    def _with_iterators(self, state: TrainerState) -> TrainerState:
        """The state with the iterator states of all processes, if data is a stream that has them."""
        reader = self._trainer._reader(self._data)
        if state.stream is None or not isinstance(reader, StreamReader):
            return state
        try:
            iterator_state = to_json(reader.iterator_state(state))
        except TypeError as error:
            iterator_state = None
            if not self._warned:
                text = "the state of the stream is not saved (%s): a resumed run reads batches again and skips them"
                _log.warning(text, error)
                self._warned = True
        gathered = [from_json(one) for one in self._group.all_gather(iterator_state)]
        return replace(state, stream=state.stream._replace(states=reader.states_of(gathered)))


class Restore:
    """Continues a run from a folder of checkpoints; ``source`` is what this run has, by name in the metadata."""

    # Whether the state that was restored was trained on other data, or with another optimizer, as far as can be seen.
    is_of_other_data = is_of_other_optimizer = False

    def __init__(self, trainer: Rounds, folder: Path, source: Mapping[str, Any]):
        self._trainer, self._folder, self._source = trainer, folder, source

    def newest(self, state: TrainerState) -> TrainerState:
        """The newest state that all processes can read, or the given one if none is of a later round."""
        reader = CheckpointReader(self._trainer._group, self._folder, lambda meta: self._wanted(meta, state))
        found = reader.newest(state.round)
        if found is None:
            return state
        meta, (state_dict, rows) = found.meta, self._form(found.meta, state)
        data = {self._source["data"], meta["data"]}
        self.is_of_other_data = len(data) > 1 and NONDETERMINISTIC not in data
        (*here, own), (*there, other) = self._source["optimizer"], meta["optimizer"]
        self.is_of_other_optimizer = here == there and own != other
        is_first = self._trainer._group.is_first
        if "residual" not in found.trees and any(map(_is_residual, meta["leaves"])) and is_first:
            _log.warning(
                "checkpoint %s has what the merges of %s replicas had not sent; here it is left out and starts at zero",
                found.step,
                meta["rows"]["residual"],
            )
        # From here on processes run collectives.
        engine = self._trainer._engine
        local_states = self._with_previous_gradient(engine, state_dict.load(found.trees, rows))
        differ = "opt_state" in state_dict.rows and rows.get("opt_state") == self._trainer.world_size
        state = with_metadata(replace(state, local_states=local_states, opt_states_differ=differ), meta)
        if "ema" in found.trees or self._trainer._settings.ema is None:
            return state
        # The average begins with the parameters of a run that had none.
        return replace(state, local_states=with_ema_step(engine, local_states, 1.0), ema_examples=state.examples)

    def _wanted(self, meta: Mapping[str, Any], state: TrainerState) -> dict[str, Any]:
        """The trees to read; refuses a checkpoint from which this trainer cannot continue."""
        where = f"checkpoints={str(self._folder)!r}"
        state_dict, rows = self._form(meta, state)
        trees = state_dict.abstract_trees(rows)
        if not any(path.startswith("ema/") for path in meta["leaves"]):
            trees.pop("ema", None)
        wanted = leaf_shapes(trees)
        saved = {name: leaf for name, leaf in meta["leaves"].items() if "residual" in trees or not _is_residual(name)}
        for path in sorted({*wanted, *saved}, key=lambda path: (not path.startswith("params/"), path)):
            have, want = saved.get(path, "missing"), wanted.get(path, "not there")
            if have != want:
                of, own = _OF_ARGUMENTS.get(path.split("/")[0], ("another model or optimizer", "model and tx"))
                raise ValueError(
                    f"{where} is of {of}: {path} is {have} in the checkpoint and {want} in this trainer; use the {own} "
                    "that it was made with, or give another folder"
                )
        for name in ("batches", "seed"):
            if meta[name] != self._source[name]:
                raise ValueError(
                    f"{where} is of a run with {name}={meta[name]}, and this one has {self._source[name]}; use the "
                    "same data, batch size and seed, or give another folder"
                )
        return trees

    def _form(self, meta: Mapping[str, Any], state: TrainerState) -> tuple[StateDict, dict[str, int]]:
        """The state dict for a checkpoint, with a previous gradient if the checkpoint has one, and the rows to read.

        A residual of other shapes than those of any engine, as with another ``opt_state=``, is not read.
        """
        compares = any(path.split("/")[:2] == ["noise", "previous"] for path in meta["leaves"])
        found = [
            engine.state_dict(self._with_previous_gradient(engine, state.local_states, compares))
            for engine in self._trainer._local_engines
        ]
        for state_dict in found:
            if _has_residual_of(meta, state_dict):
                return state_dict, meta["rows"]
        return found[0], {name: count for name, count in meta["rows"].items() if name != "residual"}

    def _with_previous_gradient(
        self, engine: Engine, local_states: Sequence[LocalState], compares: bool | None = None
    ) -> tuple[LocalState, ...]:
        """The local states with or without a previous gradient in their noise scale.

        The default is what the steps need: a single replica compares successive gradients.
        """
        scaling = self._trainer._settings.scaling
        if scaling is None or local_states[0].noise is None:
            return tuple(local_states)
        engine.lay_out(local_states)
        compares = scaling.solo if compares is None else compares
        return tuple(
            local._replace(**placement.move({"noise": with_previous_gradient(local.noise, local.params, compares)}))
            for _, placement, local in engine.here(local_states)
        )


def _has_residual_of(meta: Mapping[str, Any], state_dict: StateDict) -> bool:
    """Whether a checkpoint has residuals of these shapes, or none."""
    wanted, saved = leaf_shapes(state_dict.abstract_trees(meta["rows"])), meta["leaves"]
    return all(wanted.get(path) == saved.get(path) for path in {*wanted, *saved} if _is_residual(path))


def _is_residual(path: str) -> bool:
    return path.startswith("residual/")
