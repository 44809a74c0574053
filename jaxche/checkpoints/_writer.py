"""Writes checkpoints with Orbax in a group whose processes may die, or find no space, while they save."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import jax

from jaxche.checkpoints._checksums import checksums
from jaxche.checkpoints._metadata import described
from jaxche.checkpoints._orbax import align_operation_ids, barriers, close_manager, end_threads, handlers, spanning
from jaxche.checkpoints._system_errors import is_of_process, no_space
from jaxche.checkpoints._trees import items_of
from jaxche.distributed import Group, PeerLostError, delayed_interrupt

_log = logging.getLogger("jaxche")

# Limit for all processes to write their shards. The death of a process ends the wait earlier.
_TIMEOUT_S = 3600
# Orbax measures its own limit by the wall clock, which a suspended machine or a correction puts forward by days.
_CENTURY_S = 100 * 365 * 24 * 3600
# Seconds between two checks whether another process has failed.
_POLL_S = 0.5
# Waits of more than so many seconds, and than this part of the time, are logged.
_MUCH_S, _MUCH = 20.0, 0.2


class CheckpointWriter:
    """Saves the arrays of a run while it trains on; all members of the group call its methods together."""

    missing = ""  # why the last save that ended left no checkpoint
    is_overdue = False  # whether a lost process left a save unfinished, and none was begun since

    def __init__(self, group: Group, folder: Path, keep: int):
        try:
            import orbax.checkpoint as ocp
        except ImportError as error:
            raise ImportError("checkpoints need Orbax: pip install 'jaxche[checkpoints]'") from error
        self._ocp, self._group, self._folder, self._keep = ocp, group, folder, keep
        self._manager: Any = None
        # The step of the last save that was begun, and of the last one that a lost process did not finish.
        self._begun = self._abandoned = 0
        self._discarded: set[int] = set()  # the steps whose save failed
        # The step of the save in flight, or 0, and the number of saves of the present members.
        self._in_flight, self._saves = 0, 0
        self._name = ""  # of its barriers
        self._barrier, self._thread = group.thread_barrier("save"), threading.current_thread()
        # Seconds that training has waited for saves, of those since this time.
        self._waited_s, self._opened, self._warned = 0.0, time.monotonic(), False

    @property
    def is_open(self) -> bool:
        """Whether it can save."""
        return self._manager is not None

    def open(self) -> None:
        """Make it ready to save, for the present members."""
        group, options = self._group, self._ocp.options
        # A fit that failed while it saved has left keys of its barriers, under another name.
        self._name = group.broadcast(os.urandom(6).hex())
        # Orbax's own barrier waits for a process that has failed, or died, until its timeout.
        sync = self._wait_for_others if group.num_processes > 1 else None
        is_first_quorum = group.quorum_id == "0"
        multiprocessing, registry = options.MultiprocessingOptions(), None
        if not is_first_quorum:
            multiprocessing = options.MultiprocessingOptions(
                primary_host=group.members[0],
                active_processes=set(group.members),
                barrier_sync_key_prefix=f"jaxche-{group.quorum_id}",
            )
            registry = handlers(multiprocessing)
        # Only when a run starts: unfinished checkpoints of dead processes are removed, and Orbax waits for all to make
        # the folder, by collectives that end soon if one process is late.
        is_start = is_first_quorum and self._manager is None
        settings = self._ocp.CheckpointManagerOptions(
            max_to_keep=self._keep,
            cleanup_tmp_directories=is_start,
            create=is_start,
            # There is none, and Orbax would wait for all processes, for minutes if one has died.
            save_root_metadata=False,
            async_options=options.AsyncOptions(timeout_secs=_CENTURY_S, barrier_sync_fn=sync),
            multiprocessing_options=multiprocessing,
        )
        self._manager = self._ocp.CheckpointManager(self._folder, options=settings, handler_registry=registry)

    def reopen(self, shrunk: bool) -> None:
        """Continue with other members, after some have died (``shrunk``) or were admitted."""
        self._in_flight, self._saves, self.missing = 0, 0, ""
        if shrunk:
            end_threads(cancels=True)
            # Some processes may have begun to save a round that is now repeated.
            self._abandoned = max(self._group.all_gather(self._begun))
        else:
            align_operation_ids(self._group)
        self.open()
        if shrunk:
            is_there = self._group.broadcast(self._abandoned in self._manager.all_steps())
            self.is_overdue = self._abandoned > 0 and not is_there

    def begin(self, step: int) -> bool:
        """Whether this step is still to be saved; :meth:`save` must follow then."""
        if step in self._manager.all_steps() or step <= self._abandoned:
            return False
        self._begun, self.is_overdue = step, False
        return True

    def save(self, step: int, meta: Mapping[str, Any], trees: Mapping[str, Any]) -> None:
        """Save named trees and JSON; returns when the arrays are copied."""
        if len(self._group.members) < 2 <= jax.process_count():
            trees = jax.tree.map(spanning, trees)
        sums = None
        with self.unless_lost("begun"):
            sums = checksums(trees, self._group)
        args, meta = self._ocp.args, described(meta, trees, sums)
        items = {name: args.StandardSave(item) for name, item in items_of(trees).items()}
        self._wait_for_last_save()
        self._in_flight, self._saves = step, self._saves + 1
        self._barrier = self._group.thread_barrier(f"save-{self._name}-{self._saves}")
        # What Ctrl-C leaves of a save goes on in threads of Orbax, and breaks the save that the end of the fit makes.
        with delayed_interrupt(), self.unless_lost("begun"), barriers(self._wait_for_others):
            try:
                self._manager.save(step, args=args.Composite(run=args.JsonSave(meta), **items), force=True)
            except threading.BrokenBarrierError:
                pass  # it failed in another process, and all agree on how when they wait for its end
            except BaseException:
                self._barrier.abort()
                raise

    def _wait_for_last_save(self) -> None:
        """Wait until the save in flight has ended, and log once if training spends much of its time in that."""
        began = time.monotonic()
        self.settle()
        now = time.monotonic()
        self._waited_s += now - began
        if self._waited_s > _MUCH_S and self._waited_s > _MUCH * (now - self._opened) and not self._warned:
            self._warned = True
            if self._group.is_first:
                _log.warning(
                    "training has waited %.0f of %.0f s for checkpoints to be written; save less often: "
                    "trainer.fit(..., checkpoint_every=jaxche.Every(seconds=600))",
                    self._waited_s,
                    now - self._opened,
                )

    def settle(self) -> None:
        """Wait until the save in flight has ended, and raise its error; on a full disk its checkpoint is missing."""
        if not self._in_flight:
            return
        step, self._in_flight = self._in_flight, 0
        with self.unless_lost("finished"):
            error = self._wait()
            reports = self._group.all_gather(None if error is None else no_space(error) or "")
            self._barrier.close()
            self.missing = next((report for report in reports if report), "")
            if reports.count(None) == len(reports):
                return
            if not self.missing:
                own = None if isinstance(error, threading.BrokenBarrierError) else error
                if own is not None and not is_of_process(own):
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

    def discard_abandoned(self, step: int) -> bool:
        """Whether the save of this step was left unfinished by a lost process; its files are then removed."""
        if step > self._abandoned or self._group.broadcast(step in self._manager.all_steps()):
            return False
        self._abandoned = 0
        self._discard(step)
        return True

    def _discard(self, step: int) -> None:
        """Remove the files of a checkpoint whose save failed, and begin with a new manager."""
        close_manager(self._manager)
        self._group.barrier()
        self._discarded.add(step)
        self._remove_discarded()
        if self._group.is_first:
            room = " Make space there, or keep fewer checkpoints: jaxche.Checkpoints(folder, keep=1)"
            _log.warning(
                "checkpoint %s is missing: %s in %s. Training continues, and the next save tries again.%s",
                step,
                self.missing or "a process ended before it had written its part",
                self._folder,
                room if self.missing else "",
            )
        self.open()

    def _remove_discarded(self) -> None:
        """Remove the files of saves that failed: also at the end, because TensorStore may write after its error."""
        for step in self._discarded if self._group.is_first else ():
            for path in self._folder.glob(f"{step}.orbax-checkpoint-tmp*"):
                shutil.rmtree(path, ignore_errors=True)

    def _wait_for_others(self, *, key: str, timeout_ms: int) -> None:
        """The barrier of Orbax's threads; they reach it at the end of a save, also of one that has failed."""
        if sys.exc_info()[0] is not None and threading.current_thread() is not self._thread:
            self._barrier.abort()
        else:
            self._barrier.wait(key.replace("/", "."), min(timeout_ms, 1e3 * _TIMEOUT_S))

    def close(self, error: BaseException | None) -> None:
        """Wait until all saves are written, at the end of a run or after its error."""
        if error is None:
            self.settle()
        with self.unless_lost("finished"):
            failed = close_manager(self._manager)
            self._remove_discarded()
            if failed is not None and error is None:
                raise failed
            # The error, or the exit of this process, is not to be hidden; the others know of their own.
            if not (failed is None or no_space(failed) or isinstance(failed, threading.BrokenBarrierError)):
                _log.warning("checkpoint %s was not finished: %s", self._begun, str(failed)[:300])

    @contextlib.contextmanager
    def unless_lost(self, what: str) -> Iterator[None]:
        """Log the failure of a save after the death of a process: in an elastic run the others have the state."""
        try:
            yield
        except (jax.errors.JaxRuntimeError, ValueError, TimeoutError, PeerLostError) as error:
            # If only a connection broke, the next round makes a new one.
            is_lost = isinstance(error, PeerLostError) or self._group.lost() or "Gloo" in str(error)
            if not (self._group.elastic and is_lost):
                raise
            text = "checkpoint %s was not %s, the loss of a process was detected: %s"
            _log.warning(text, self._begun, what, str(error)[:300])
