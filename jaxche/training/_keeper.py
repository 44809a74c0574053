"""Saves a run and finds it again."""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax

from jaxche.training._agree import (
    gather_json,
    generation,
    is_elastic,
    meeting_place,
    member_lives,
    members,
    raise_everywhere,
)
from jaxche.training._checkpoints import Checkpoints
from jaxche.training._fingerprint import VARIES
from jaxche.training._history import History
from jaxche.training._lives import PeerLostError, lost
from jaxche.training._packing import Packing
from jaxche.training._record import Record
from jaxche.training._saved import nested, numbers, shapes, unnested, with_numbers
from jaxche.training._shared_folder import shared_folder
from jaxche.training._state import ReplicaState

if TYPE_CHECKING:
    from jaxche.training._trainer import Trainer

_log = logging.getLogger("jaxche")

# Of what is in a checkpoint and where. A folder of another format is refused.
_FORMAT = 2
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
        if asked.durable and is_elastic():
            raise ValueError(
                "durable=True waits for all processes to write, and an elastic run goes on without those that die: its "
                "parameters are safe with the others; leave durable out"
            )
        self._ocp, self._asked, self._trainer, self._batches = ocp, asked, trainer, len(data)
        self._folder = shared_folder(asked.folder)
        error, self._data = None, VARIES
        try:
            self._data = trainer._engine.data_digest(data)
        except Exception as e:
            error = e
        raise_everywhere(error, jax.process_index(), "the reading of the data")
        self._manager: Any = None
        self.record = Record(self._folder)
        # The step that was begun last, and the one whose saving a process did not live to finish.
        self._begun = self._abandoned = 0

    def _open(self) -> Any:
        options, settings = self._ocp.options, {}
        if is_elastic():
            # A save in which a process died holds nobody up, and its threads let go when it is missed.
            meet = meeting_place("saved")
            settings["async_options"] = options.AsyncOptions(
                timeout_secs=_PATIENCE_S,
                barrier_sync_fn=lambda *, key, timeout_ms: meet(key.replace("/", "."), timeout_ms),
            )
        from_start = generation() == 0
        if not from_start:
            settings["multiprocessing_options"] = options.MultiprocessingOptions(
                primary_host=members()[0],
                active_processes=set(members()),
                barrier_sync_key_prefix=f"jaxche-{generation()}",
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
            self._abandoned = max(gather_json(self._begun))
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

        most = max(gather_json(int(OperationIdGenerator.get_current_operation_id())))
        while int(OperationIdGenerator.get_current_operation_id()) < most:
            OperationIdGenerator.next_operation_id()

    def resume(self, state: ReplicaState) -> tuple[ReplicaState, History]:
        """The newest state that can be read, if it is further than the one given, and its record.

        Raises:
          ValueError: checkpoints of another model, data, seed or version.
        """
        reader = self._reader()
        seen = gather_json(sorted(reader.all_steps()))
        if any(steps != seen[0] for steps in seen):
            raise ValueError(
                f"checkpoints={str(self._folder)!r}: processes see different checkpoints there ({seen}); give a "
                "folder that all machines share"
            )
        for step in reversed(seen[0]):
            if step <= state.round:
                break
            restored = self._restore(reader, step, state)
            if restored is not None:
                state = restored
                break
        reader.close()
        self._manager = self._open()
        return state, self.record.cut(state.round)

    def _reader(self) -> Any:
        """A manager of this process alone, for what it cannot read the others may read."""
        options, own = self._ocp.options, jax.process_index()
        alone = options.MultiprocessingOptions(
            primary_host=own, active_processes={own}, barrier_sync_key_prefix=f"jaxche-reader-{own}"
        )
        settings = self._ocp.CheckpointManagerOptions(create=False, multiprocessing_options=alone)
        return self._ocp.CheckpointManager(self._folder, options=settings)

    def _restore(self, reader: Any, step: int, state: ReplicaState) -> ReplicaState | None:
        """The state of a checkpoint, or None where some process cannot read it."""
        args, error, refused, meta, found = self._ocp.args, None, None, {}, {}
        try:
            meta = reader.restore(step, args=args.Composite(run=args.JsonRestore())).run
            try:
                self._refuse_other(meta, state)
            except ValueError as e:
                refused = e
        except Exception as e:
            error = e
            if not (self._folder / str(step) / "run").is_dir():
                refused = ValueError(
                    f"checkpoints={str(self._folder)!r}: {step} there was not written by jaxche; give another folder"
                )
        raise_everywhere(refused, jax.process_index(), f"checkpoint {step}")
        if self._unreadable(step, error):
            return None
        packing = self._packing(self._as_saved(meta, state))
        wanted = packing.saved_as(meta["rows"])
        try:
            items = {name: args.StandardRestore(item) for name, item in _items(wanted).items()}
            read = reader.restore(step, args=args.Composite(**items))
            trees = {"params": read.params} | (read.state if "state" in items else {})
            found = {name: unnested(tree, trees[name]) for name, tree in wanted.items()}
        except Exception as e:
            error = e
        if self._unreadable(step, error):
            return None
        # Only now: what follows all processes compute together.
        locals_ = self._trainer._engine.comparing(packing.unpack(found, meta["rows"]))
        return with_numbers(replace(state, locals=locals_), meta)

    def _unreadable(self, step: int, error: Exception | None) -> bool:
        """Whether a process has an error; then the checkpoint is set aside, for this round will be written again."""
        said = [text for text in gather_json(None if error is None else f"{type(error).__name__}: {error}") if text]
        if said:
            names = (f"unreadable-{step}{f'-{number}' if number else ''}" for number in itertools.count())
            aside = next(path for path in map(self._folder.joinpath, names) if not path.exists())
            gather_json(None)  # all have found the same name
            if jax.process_index() == members()[0]:
                (self._folder / str(step)).rename(aside)
            gather_json(None)
            _log.warning("checkpoint %s cannot be read and is set aside as %s: %s", step, aside, said[0][:300])
        return bool(said)

    def _refuse_other(self, meta: Any, state: ReplicaState) -> None:
        """Refuse a checkpoint that this trainer cannot go on from."""
        where = f"checkpoints={str(self._folder)!r}"
        version, other = _version(), meta["jaxche"]
        if meta["format"] != _FORMAT or other.split(".")[:2] != version.split(".")[:2]:
            raise ValueError(
                f"{where} was written by jaxche {other} in format {meta['format']}, and this is {version} with format "
                f"{_FORMAT}; write pip install jaxche=={other}, or give another folder"
            )
        if other != version:
            _log.warning("%s was written by jaxche %s, and this is %s", where, other, version)
        if meta.get("data", VARIES) != self._data and VARIES not in (self._data, meta.get("data", VARIES)):
            _log.warning("%s was made with other data of as many batches; from here on it is this data", where)
        wanted = shapes(self._packing(self._as_saved(meta, state)).saved_as(meta["rows"]))
        for path in sorted({*wanted, *meta["leaves"]}, key=lambda path: (not path.startswith("params/"), path)):
            have, want = meta["leaves"].get(path, "missing"), wanted.get(path, "not there")
            if have != want:
                raise ValueError(
                    f"{where} is of another model or optimizer: {path} is {have} in the checkpoint and {want} in this "
                    "trainer; use the model and tx that it was made with, or give another folder"
                )
        for name, want in (("batches", self._batches), ("seed", self._trainer.seed)):
            if meta[name] != want:
                raise ValueError(
                    f"{where} is of a run with {name}={meta[name]}, and this one has {want}; use the same data and "
                    "seed, or give another folder"
                )

    def _as_saved(self, meta: Any, state: ReplicaState) -> ReplicaState:
        """The state in the form of a checkpoint: one of a single replica may hold its previous gradient."""
        compares = any(path.split("/")[:2] == ["noise", "previous"] for path in meta["leaves"])
        return replace(state, locals=self._trainer._engine.comparing(state.locals, compares))

    def _packing(self, state: ReplicaState) -> Packing:
        return self._trainer._engine.packing(state.locals)

    def due(self, state: ReplicaState) -> bool:
        """Whether this state is one to save."""
        return state.round % self._asked.every == 0

    def save(self, state: ReplicaState) -> None:
        """Save a state, unless it is; returns when the arrays are copied, or written."""
        if state.round in self._manager.all_steps() or state.round <= self._abandoned:
            return
        self._begun = state.round
        args, packing = self._ocp.args, self._packing(state)
        trees = packing.pack()
        meta = numbers(state) | {
            "format": _FORMAT,
            "jaxche": _version(),
            "rows": packing.rows,
            "leaves": shapes(trees),
            "batches": self._batches,
            "data": self._data,
            "seed": self._trainer.seed,
        }
        items = {name: args.StandardSave(item) for name, item in _items(trees).items()}
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
            if not is_elastic() or not (lost(member_lives()) or "Gloo" in str(error)):
                raise
            _log.warning("checkpoint %s was not %s, a process is missed: %s", self._begun, what, str(error)[:300])


def _version() -> str:
    # Not the metadata's: a checkout on PYTHONPATH has none, or another's.
    return sys.modules[__name__.partition(".")[0]].__version__


def _items(trees: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters as they are, and all else, if there is any; Orbax saves no empty trees."""
    rest = {name: nested(tree) for name, tree in trees.items() if name != "params"}
    return {"params": nested(trees["params"])} | ({"state": rest} if rest else {})
