"""Finds the newest state of a run that all its processes can read, and refuses those of another run."""

from __future__ import annotations

import contextlib
import itertools
import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxche.training._fingerprint import VARIES
from jaxche.training._packing import Packing
from jaxche.training._saved import FORMAT, READABLE, items_of, joined_alike, shapes, unnested, version, with_numbers
from jaxche.training._state import ReplicaState

if TYPE_CHECKING:
    from jaxche.training._trainer import Trainer

_log = logging.getLogger("jaxche")


class Finder:
    """Each process reads by itself, so that none waits in a collective for one that cannot; then all compare.

    Args:
      folder: of the checkpoints.
      trainer: whose states they have to be.
      batches: of an epoch of its data.
      data: digest of these.
    """

    def __init__(self, folder: Path, trainer: Trainer, batches: int, data: str):
        import orbax.checkpoint as ocp

        self._ocp, self._folder, self._trainer, self._batches, self._data = ocp, folder, trainer, batches, data
        self._group = trainer._group

    def newest(self, state: ReplicaState) -> ReplicaState:
        """The newest state that all processes can read, if it is further than the one given; else that.

        Raises:
          ValueError: checkpoints of another model, data, seed or version.
        """
        with contextlib.closing(self._reader()) as reader:
            seen = self._group.all_gather(sorted(reader.all_steps()))
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
                    return restored
        return state

    def _reader(self) -> Any:
        """Orbax for this process alone."""
        options, own = self._ocp.options, self._group.process_index
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
        self._group.raise_everywhere(refused, self._group.process_index, f"checkpoint {step}")
        if self._unreadable(step, error):
            return None
        packing = self._packing(meta, state)
        wanted = packing.saved_as(meta["rows"])
        try:
            items = {name: args.StandardRestore(item) for name, item in items_of(wanted, meta["format"]).items()}
            read = reader.restore(step, args=args.Composite(**items))
            trees = {"params": read.params} | (read.state if "state" in items else {})
            found = {name: unnested(tree, trees[name], meta["format"]) for name, tree in wanted.items()}
        except Exception as e:
            error = e
        if self._unreadable(step, error):
            return None
        # Only now: what follows all processes compute together.
        locals_ = self._trainer._engine.comparing(packing.unpack(found, meta["rows"]))
        return with_numbers(replace(state, locals=locals_), meta)

    def _unreadable(self, step: int, error: Exception | None) -> bool:
        """Whether a process has an error; then the checkpoint is set aside, for this round will be written again."""
        said = [
            text
            for text in self._group.all_gather(None if error is None else f"{type(error).__name__}: {error}")
            if text
        ]
        if not said:
            return False
        failed = None
        if self._group.is_first:
            names = (f"unreadable-{step}{f'-{number}' if number else ''}" for number in itertools.count())
            aside = next(path for path in map(self._folder.joinpath, names) if not path.exists())
            _log.warning("checkpoint %s cannot be read and is set aside as %s: %s", step, aside, said[0][:300])
            try:
                (self._folder / str(step)).rename(aside)
            except OSError as e:
                failed = e
        # Before anything is written under its name.
        self._group.raise_everywhere(failed, self._group.process_index, f"checkpoint {step}")
        return True

    def _refuse_other(self, meta: Any, state: ReplicaState) -> None:
        """Refuse a checkpoint that this trainer cannot go on from."""
        where = f"checkpoints={str(self._folder)!r}"
        own, other = version(), meta["jaxche"]
        if meta["format"] not in READABLE or other.split(".")[:2] != own.split(".")[:2]:
            raise ValueError(
                f"{where} was written by jaxche {other} in format {meta['format']}, and this is {own} with format "
                f"{FORMAT}; write pip install jaxche=={other}, or give another folder"
            )
        if other != own:
            _log.warning("%s was written by jaxche %s, and this is %s", where, other, own)
        if meta.get("data", VARIES) != self._data and VARIES not in (self._data, meta.get("data", VARIES)):
            _log.warning("%s was made with other data of as many batches; from here on it is this data", where)
        trees = self._packing(meta, state).saved_as(meta["rows"])
        if alike := joined_alike(trees, meta["format"]):
            raise ValueError(
                f"{where} was written in format {meta['format']}, in which {alike[0]} and {alike[1]} have one name, so "
                "that only one of them was kept; give another folder, and this version writes both"
            )
        wanted = shapes(trees, meta["format"])
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

    def _packing(self, meta: Any, state: ReplicaState) -> Packing:
        """The form of a checkpoint's state: one of a single replica may hold its previous gradient."""
        compares = any(path.split("/")[:2] == ["noise", "previous"] for path in meta["leaves"])
        engine = self._trainer._engine
        return engine.packing(engine.comparing(state.locals, compares))
