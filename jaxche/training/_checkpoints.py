"""Checkpoints: the folder and the frequency, and the manager that saves a run with Orbax and restores it."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxche.cadence import ApplyPolicy, whole_number
from jaxche.data import StreamReader, from_json, is_stream, to_json
from jaxche.distributed import PeerLostError, on_sigterm
from jaxche.reports import Every, MetricsLog, RoundInfo, no_space
from jaxche.training._checkpoint_reader import CheckpointReader
from jaxche.training._checksums import checksum_of_metadata, checksums
from jaxche.training._hooks import Hook, Run
from jaxche.training._orbax import align_operation_ids, barriers, close_manager, end_threads, handlers, spanning
from jaxche.training._rounds import Rounds
from jaxche.training._shared_folder import shared_folder
from jaxche.training._state import Stop, TrainerState
from jaxche.training._state_dict import (
    FORMAT,
    checkpoint_items,
    installed_version,
    leaf_shapes,
    metadata,
)

_log = logging.getLogger("jaxche")

# Limit for all processes to write their shards. The death of a process ends the wait earlier.
_TIMEOUT_S = 3600
# Orbax measures its own limit by the wall clock, which a suspended machine or a correction puts forward by days.
_CENTURY_S = 100 * 365 * 24 * 3600
# Seconds between two checks whether another process has failed.
_POLL_S = 0.5
# Waits of more than so many seconds, and than this part of the time, are logged.
_MUCH_S, _MUCH = 20.0, 0.2
# Seconds before each further try of the last checkpoint, if there was no space.
_PAUSES_S = (1.0, 3.0, 6.0)


@dataclass(frozen=True)
class Checkpoints:
    """Where and how often to save a run; ``trainer.fit(..., checkpoints=...)`` continues from the newest checkpoint.

    A checkpoint has the merged parameters and model state, the optimizer state of every replica and of ``outer``, noise
    and progress, the cadence, and the position in the data. A save copies the arrays and writes them while training
    continues; the next save waits for it. So a failure loses at most the current round and the one before, and with
    ``durable`` the current round only; under exact sync it loses by default the updates of about a second. A file that
    is damaged later loses one checkpoint more. Unfinished checkpoints are ignored. In a run of several processes all of
    them write into one shared folder. A save without space on the disk leaves its checkpoint out, with a warning;
    ``fit`` raises OSError if it is the last one.

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
        the clock of the run) under exact sync, where a round is one update. The last round, and one in which a stop is
        requested, is always saved.
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
        try:
            import orbax.checkpoint as ocp
        except ImportError as error:
            raise ImportError("checkpoints need Orbax: pip install 'jaxche[checkpoints]'") from error
        self._group = trainer._group
        if config.durable and self._group.elastic:
            raise ValueError(
                "durable=True waits for all processes to write, and an elastic run continues without those that die: "
                "the others have its parameters; leave durable out"
            )
        self._ocp, self._config, self._trainer, self._source = ocp, config, trainer, data
        self._batches = "a stream" if is_stream(data) else len(data)
        self._every = every  # in place of that of the config
        self._logged: RoundInfo | None = None
        self._folder = shared_folder(self._group, config.folder)
        with self._group.errors_everywhere(self._group.process_index, "the reading of the data"):
            self._data = trainer._engine.data_digest(data)
        self._log = MetricsLog(self._group, self._folder)
        self._manager: Any = None
        # The step of the last save that was started, and of the last one that a lost process did not finish.
        self._started = self._abandoned = 0
        # The step of the save in flight, or 0; the number of saves of the present members; and why the last one
        # that ended left no checkpoint.
        self._in_flight, self._saves, self._missing = 0, 0, ""
        self._barrier, self._thread = self._group.thread_barrier("save-0"), threading.current_thread()
        self._sigterm = contextlib.ExitStack()
        self._handles_sigterm = self._warned = self._warned_of_waits = False
        # Seconds that training has waited for saves, of those since this time.
        self._waited_s, self._opened = 0.0, time.monotonic()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """The context of the fit; its exit waits until all saves are written."""
        with contextlib.ExitStack() as stack:
            # Remove the handler last, so that another SIGTERM does not end the process before all saves are written.
            stack.enter_context(self._sigterm)
            stack.push(self.close)
            yield

    def on_start(self, run: Run) -> None:
        """Restore the newest checkpoint, if it is of a later round than the state of the run."""
        if self._manager is not None:  # this process was admitted, with the state of the others
            return
        reader = CheckpointReader(self._folder, self._trainer, self._batches, self._data)
        run.state = reader.newest(run.state)
        if reader.is_of_other_data:
            _log.warning(
                "checkpoints=%r was made with other data of the same number of batches; %s",
                str(self._folder),
                "that run has ended, so nothing is trained now: give each run a folder of its own"
                if run.is_done
                else "training continues with this data",
            )
        self._manager = self._open()
        run.history = self._log.truncate(run.state.round)
        self._logged = run.history[-1] if run.history else None
        each = self._every is None and self._config.every in (None, 1)
        if self._trainer._engine.overlaps and each and self._group.is_first:
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
            with self._unless_lost("begun"):
                run.state = run.state.merged()  # a resumed run continues from there, and so does this one
                self.save(run.state)
        return False

    def _is_due(self, run: Run, info: RoundInfo) -> bool:
        if self._every is not None:
            return run.is_due(self._every)
        if self._config.every is not None:
            return run.state.round % self._config.every == 0
        # A save takes a hundred times as long as a short update.
        return info.policy != ApplyPolicy.SYNC or run.is_due(Every(seconds=1))

    def on_end(self, run: Run) -> None:
        self._append_last(run)
        self._settle()
        last = run.state.round
        if last <= self._abandoned and not self._group.broadcast(last in self._manager.all_steps()):
            self._abandoned = 0
            self._discard(last)
            self.save(run.state)
            self._settle()
        for pause_s in _PAUSES_S:
            if self._missing:
                time.sleep(pause_s)
                self.save(run.state)
                self._settle()
        self._log.flush()
        if self._missing:
            raise OSError(
                f"the last checkpoint, {run.state.round}, is missing: {self._missing} in {self._folder}. Make space "
                "there and start the run again: it continues from the newest checkpoint. The state of this run is in "
                "trainer.last_good_state"
            )

    def _append(self, info: RoundInfo) -> None:
        self._log.append(info)
        self._logged = info

    def _append_last(self, run: Run) -> None:
        """Append the last record, if it was evaluated since, or a keyboard interrupt came before it was written."""
        if run.history and run.history[-1] is not self._logged:
            self._append(run.history[-1])

    def on_admission(self) -> None:
        self._settle()

    def on_membership(self, run: Run, shrunk: bool) -> None:
        """Continue with the present members from the state of the run."""
        self._in_flight, self._saves, self._missing = 0, 0, ""
        if shrunk:
            end_threads(cancels=True)
            # Some processes may have started to save a round that is now repeated.
            self._abandoned = max(self._group.all_gather(self._started))
        else:
            align_operation_ids(self._group)
        self._manager = self._open()
        kept = self._log.truncate(run.state.round)
        # The process that wrote the record may have died before it wrote the last rounds.
        last = kept[-1].round if kept else -1
        for info in run.history:
            if info.round > last:
                self._log.append(info)
        self._logged = run.history[-1] if run.history else None

    def on_stop(self, run: Run, preempted: bool = False) -> None:
        self._append_last(run)
        self._settle()
        self.save(run.state)
        if preempted:
            self._settle()
            if self._group.is_leader and not self._missing:
                _log.warning("preempted: saved after round %s", run.state.round - 1)

    def save(self, state: TrainerState) -> None:
        """Save a state unless it is saved; returns when the arrays are copied, or with ``durable`` written.

        All members call it together. If there is no space, the checkpoint is missing and the run continues.
        """
        if state.round in self._manager.all_steps() or state.round <= self._abandoned:
            return
        self._started = state.round
        args, state_dict = self._ocp.args, self._trainer._engine.state_dict(state.local_states)
        trees = state_dict.trees()
        if len(self._group.members) < 2 <= jax.process_count():
            trees = jax.tree.map(spanning, trees)
        meta = metadata(self._with_iterators(state)) | {
            "format": FORMAT,
            "jaxche": installed_version(),
            "rows": state_dict.rows,
            "leaves": leaf_shapes(trees),
            "batches": self._batches,
            "data": self._data,
            "seed": self._trainer._settings.seed,
        }
        with self._unless_lost("begun"):
            meta["checksums"] = checksums(trees, self._group)
        meta["checksum"] = checksum_of_metadata(meta)
        items = {name: args.StandardSave(item) for name, item in checkpoint_items(trees).items()}
        self._wait_for_last_save()
        self._in_flight, self._saves = state.round, self._saves + 1
        self._barrier = self._group.thread_barrier(f"save-{self._saves}")
        with self._unless_lost("begun"), barriers(self._wait_for_others):
            try:
                self._manager.save(state.round, args=args.Composite(run=args.JsonSave(meta), **items), force=True)
            except threading.BrokenBarrierError:
                pass  # it failed in another process, and all agree on how when they wait for its end
            except BaseException:
                self._barrier.abort()
                raise
        if self._config.durable:
            self._settle()

    def _wait_for_last_save(self) -> None:
        """Wait until the save in flight has ended, and log once if training spends much of its time in that."""
        began = time.monotonic()
        self._settle()
        now = time.monotonic()
        self._waited_s += now - began
        if self._waited_s > _MUCH_S and self._waited_s > _MUCH * (now - self._opened) and not self._warned_of_waits:
            self._warned_of_waits = True
            if self._group.is_first:
                _log.warning(
                    "training has waited %.0f of %.0f s for checkpoints to be written; save less often: "
                    "trainer.fit(..., checkpoint_every=jaxche.Every(seconds=600))",
                    self._waited_s,
                    now - self._opened,
                )

    def _settle(self) -> None:
        """Wait until the save in flight has ended; all members call it together, and agree on how.

        If it failed for want of space, its checkpoint is missing. Any other error is raised.
        """
        if not self._in_flight:
            return
        step, self._in_flight = self._in_flight, 0
        with self._unless_lost("finished"):
            error = self._wait()
            reports = self._group.all_gather(None if error is None else no_space(error) or "")
            self._barrier.close()
            self._missing = next((report for report in reports if report), "")
            if reports.count(None) == len(reports):
                return
            if not self._missing:
                own = None if isinstance(error, threading.BrokenBarrierError) else error
                if own is not None:
                    own.add_note(
                        f"if another run writes to {self._folder} too, each removes files of the other; give each a "
                        "folder of its own, e.g. checkpoints='runs/second'"
                    )
                self._group.raise_everywhere(own, self._group.process_index, f"the save of checkpoint {step}")
            self._discard(step)

    def _wait(self) -> Exception | None:
        """Wait until the save in flight has ended in this process, and return its error."""
        with ThreadPoolExecutor(1) as pool:
            ended = pool.submit(self._manager.wait_until_finished)
            while not wait([ended], _POLL_S).done:
                if self._group.lost():
                    end_threads(cancels=True)
                # Threads may wait for folders that the first process was to make. The first process does not cancel:
                # there Orbax would count the save as written, and delete older ones.
                if self._barrier.is_broken and not self._group.is_first:
                    self._manager._checkpointer.cancel()
        try:
            ended.result()
        except Exception as error:
            end_threads()
            return error
        return None

    def _discard(self, step: int) -> None:
        """Remove the files of a checkpoint whose save failed, and begin with a new manager."""
        close_manager(self._manager)
        self._group.barrier()  # none writes any more
        if self._group.is_first:
            for path in self._folder.glob(f"{step}.orbax-checkpoint-tmp*"):
                shutil.rmtree(path, ignore_errors=True)
            _log.warning(
                "checkpoint %s is missing: %s in %s. Training continues, and the next save tries again. Make space "
                "there, or keep fewer checkpoints: jaxche.Checkpoints(folder, keep=1)",
                step,
                self._missing or "a process did not write its part",
                self._folder,
            )
        self._manager = self._open()

    def _wait_for_others(self, *, key: str, timeout_ms: int) -> None:
        """The barrier of Orbax's threads; they reach it at the end of a save, also of one that has failed."""
        if sys.exc_info()[0] is not None and threading.current_thread() is not self._thread:
            self._barrier.abort()
        else:
            self._barrier.wait(key.replace("/", "."), min(timeout_ms, 1e3 * _TIMEOUT_S))

    def _with_iterators(self, state: TrainerState) -> TrainerState:
        """The state with the iterator states of all processes, if data is a stream that has them."""
        reader = self._trainer._engine.reader(self._source)
        if state.stream is None or not isinstance(reader, StreamReader):
            return state
        iterator_state = None
        try:
            iterator_state = to_json(reader.iterator_state(state))
        except TypeError as error:
            if not self._warned:
                text = "the state of the stream is not saved (%s): a resumed run reads batches again and skips them"
                _log.warning(text, error)
                self._warned = True
        gathered = [from_json(one) for one in self._group.all_gather(iterator_state)]
        return replace(state, stream=state.stream._replace(states=reader.states_of(gathered)))

    def _open(self) -> Any:
        group, options, settings, registry = self._group, self._ocp.options, {}, None
        # Orbax's own barrier waits for a process that has failed, or died, until its timeout.
        sync = self._wait_for_others if group.num_processes > 1 else None
        settings["async_options"] = options.AsyncOptions(timeout_secs=_CENTURY_S, barrier_sync_fn=sync)
        is_first_quorum = group.quorum_id == "0"
        if not is_first_quorum:
            settings["multiprocessing_options"] = multiprocessing = options.MultiprocessingOptions(
                primary_host=group.members[0],
                active_processes=set(group.members),
                barrier_sync_key_prefix=f"jaxche-{group.quorum_id}",
            )
            registry = handlers(multiprocessing)
        options = self._ocp.CheckpointManagerOptions(
            max_to_keep=self._config.keep,
            # Remove unfinished checkpoints of dead processes only when a run starts.
            cleanup_tmp_directories=is_first_quorum,
            create=is_first_quorum,
            **settings,
        )
        return self._ocp.CheckpointManager(self._folder, options=options, handler_registry=registry)

    def close(self, kind: Any, error: Any, trace: Any) -> None:
        """Wait until all saves are written, but not after the death of a process."""
        if self._manager is None or isinstance(error, PeerLostError):
            return
        if error is None:
            self._settle()
        with self._unless_lost("finished"):
            failed = close_manager(self._manager)
            if failed is not None and not (error is not None and no_space(failed)):
                raise failed

    @contextlib.contextmanager
    def _unless_lost(self, what: str) -> Iterator[None]:
        """Log the failure of a save after the death of a process: in an elastic run the others have the state."""
        try:
            yield
        except (jax.errors.JaxRuntimeError, ValueError, TimeoutError, PeerLostError) as error:
            # If only a connection broke, the next round makes a new one.
            is_lost = isinstance(error, PeerLostError) or self._group.lost() or "Gloo" in str(error)
            if not (self._group.elastic and is_lost):
                raise
            text = "checkpoint %s was not %s, the loss of a process was detected: %s"
            _log.warning(text, self._started, what, str(error)[:300])
