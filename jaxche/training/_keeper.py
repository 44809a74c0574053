"""Saves a run and finds it again."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax

from jaxche.distributed import ElasticGroup, PeerLostError, shared_folder
from jaxche.reports import History
from jaxche.training._checkpoints import Checkpoints
from jaxche.training._finder import Finder
from jaxche.training._fingerprint import VARIES
from jaxche.training._record import Record
from jaxche.training._saved import FORMAT, items_of, numbers, shapes, version
from jaxche.training._state import ReplicaState

if TYPE_CHECKING:
    from jaxche.training._trainer import Trainer

_log = logging.getLogger("jaxche")

# For all processes to have written their parts. Of one that dies the others hear at once.
_PATIENCE_S = 3600


class Keeper:
    """Saves a run and finds it again. All processes of a run make the same calls.

    Args:
      asked: what the user wants.
      trainer: whose states are kept.
      data: what the run trains on.

    Attributes:
      record: of the rounds.

    Raises:
      ImportError: Orbax is missing.
      ValueError: a folder that some process cannot write, or that not all of them share.
    """

    def __init__(self, asked: Checkpoints, trainer: Trainer, data: Any):
        try:
            import orbax.checkpoint as ocp
        except ImportError as error:
            raise ImportError("checkpoints need Orbax: pip install 'jaxche[checkpoints]'") from error
        self._group = trainer._group
        if asked.durable and self._group.elastic:
            raise ValueError(
                "durable=True waits for all processes to write, and an elastic run goes on without those that die: its "
                "parameters are safe with the others; leave durable out"
            )
        self._ocp, self._asked, self._trainer, self._batches = ocp, asked, trainer, len(data)
        self._folder = shared_folder(self._group, asked.folder)
        error, self._data = None, VARIES
        try:
            self._data = trainer._engine.data_digest(data)
        except Exception as e:
            error = e
        self._group.raise_everywhere(error, self._group.process_index, "the reading of the data")
        self._finder = Finder(self._folder, trainer, self._batches, self._data)
        self._manager: Any = None
        self.record = Record(self._group, self._folder)
        # The step that was begun last, and the one whose saving a process did not live to finish.
        self._begun = self._abandoned = 0

    def _open(self) -> Any:
        group, options, settings = self._group, self._ocp.options, {}
        if isinstance(group, ElasticGroup):
            # A save in which a process died holds nobody up, and its threads let go when that is detected.
            wait = group.thread_barrier("saved")
            settings["async_options"] = options.AsyncOptions(
                timeout_secs=_PATIENCE_S,
                barrier_sync_fn=lambda *, key, timeout_ms: wait(key.replace("/", "."), timeout_ms),
            )
        from_start = group.quorum_id == "0"
        if not from_start:
            settings["multiprocessing_options"] = options.MultiprocessingOptions(
                primary_host=group.members[0],
                active_processes=set(group.members),
                barrier_sync_key_prefix=f"jaxche-{group.quorum_id}",
            )
        options = self._ocp.CheckpointManagerOptions(
            max_to_keep=self._asked.keep,
            # What the dead did not finish goes when a run starts.
            cleanup_tmp_directories=from_start,
            create=from_start,
            **settings,
        )
        return self._ocp.CheckpointManager(self._folder, options=options)

    def reopen(self, rounds: int, others_died: bool = True) -> None:
        """Go on with the processes that take part from now on, from a state of so many rounds."""
        if others_died:
            # One may have begun a save of a round that is now done again, and others not.
            self._abandoned = max(self._group.all_gather(self._begun))
        else:
            self._count_alike()
        self._manager = self._open()
        self.record.cut(rounds)

    def settle(self) -> None:
        """Wait until all that was begun is written."""
        self._manager.wait_until_finished()

    def _count_alike(self) -> None:
        """Orbax tells the saves of a process apart by their number, which has to be the same in one that joined."""
        from orbax.checkpoint._src.futures.synchronization import OperationIdGenerator

        most = max(self._group.all_gather(int(OperationIdGenerator.get_current_operation_id())))
        while int(OperationIdGenerator.get_current_operation_id()) < most:
            OperationIdGenerator.next_operation_id()

    def resume(self, state: ReplicaState) -> tuple[ReplicaState, History]:
        """The newest state that can be read, if it is further than the one given, and its record.

        Raises:
          ValueError: checkpoints of another model, data, seed or version.
        """
        state = self._finder.newest(state)
        self._manager = self._open()
        return state, self.record.cut(state.round)

    def due(self, state: ReplicaState) -> bool:
        """Whether this state is one to save."""
        return state.round % self._asked.every == 0

    def save(self, state: ReplicaState) -> None:
        """Save a state, unless it is; returns when the arrays are copied, or written."""
        if state.round in self._manager.all_steps() or state.round <= self._abandoned:
            return
        self._begun = state.round
        args, packing = self._ocp.args, self._trainer._engine.packing(state.locals)
        trees = packing.pack()
        meta = numbers(state) | {
            "format": FORMAT,
            "jaxche": version(),
            "rows": packing.rows,
            "leaves": shapes(trees, FORMAT),
            "batches": self._batches,
            "data": self._data,
            "seed": self._trainer.seed,
        }
        items = {name: args.StandardSave(item) for name, item in items_of(trees, FORMAT).items()}
        with self._unless_lost("begun"):
            self._manager.save(state.round, args=args.Composite(run=args.JsonSave(meta), **items), force=True)
        if self._asked.durable:
            self.settle()

    def close(self, kind: Any, error: Any, trace: Any) -> None:
        """Wait until all is written, at the end of a ``with`` block; but not for processes that have died."""
        if self._manager is not None and not isinstance(error, PeerLostError):
            with self._unless_lost("finished"):
                self._manager.wait_until_finished()
            with self._unless_lost("finished"):
                self._manager.close()

    @contextlib.contextmanager
    def _unless_lost(self, what: str) -> Iterator[None]:
        """In an elastic run a save in which a process died is no error: the others have the state, and go on."""
        try:
            yield
        except (jax.errors.JaxRuntimeError, ValueError, TimeoutError, PeerLostError) as error:
            if not self._group.elastic or not (self._group.lost() or "Gloo" in str(error)):
                raise
            _log.warning(
                "checkpoint %s was not %s, the loss of a process was detected: %s", self._begun, what, str(error)[:300]
            )
