"""Restores the newest checkpoint that all processes can read, and refuses those of other runs."""

from __future__ import annotations

import contextlib
import itertools
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxche.training._checksums import checksum_of_metadata, checksums
from jaxche.training._fingerprint import NONDETERMINISTIC
from jaxche.training._rounds import Rounds
from jaxche.training._state import TrainerState
from jaxche.training._state_dict import (
    FORMAT,
    StateDict,
    checkpoint_items,
    from_nested,
    installed_version,
    leaf_shapes,
    with_metadata,
)

_log = logging.getLogger("jaxche")


class _CorruptError(Exception):
    """The files of a checkpoint can be read, but have other contents than were written."""


class CheckpointReader:
    """Restores the newest checkpoint that all processes can read, and refuses those of other runs.

    Each process reads by itself, because one that cannot read would make the others wait in a collective. Then they
    compare. ``is_of_other_data`` is whether the state that was restored was trained on other data.
    """

    is_of_other_data = False

    def __init__(self, folder: Path, trainer: Rounds, batches: int | str, data: str):
        import orbax.checkpoint as ocp

        self._ocp, self._folder, self._trainer, self._batches, self._data = ocp, folder, trainer, batches, data
        self._group = trainer._group

    def newest(self, state: TrainerState) -> TrainerState:
        """The newest state that all processes can read, or the given one if none is of a later round."""
        with contextlib.closing(self._reader()) as reader:
            steps_seen = self._group.all_gather(sorted(reader.all_steps()))
            if any(steps != steps_seen[0] for steps in steps_seen):
                raise ValueError(
                    f"checkpoints={str(self._folder)!r}: processes see different checkpoints there ({steps_seen}); "
                    "give a folder that all machines share"
                )
            for step in reversed(steps_seen[0]):
                if step <= state.round:
                    break
                restored = self._restore(reader, step, state)
                if restored is not None:
                    return restored
        return state

    def _reader(self) -> Any:
        """An Orbax manager for this process only."""
        options, own = self._ocp.options, self._group.process_index
        alone = options.MultiprocessingOptions(
            primary_host=own, active_processes={own}, barrier_sync_key_prefix=f"jaxche-reader-{own}"
        )
        settings = self._ocp.CheckpointManagerOptions(create=False, multiprocessing_options=alone)
        return self._ocp.CheckpointManager(self._folder, options=settings)

    def _restore(self, reader: Any, step: int, state: TrainerState) -> TrainerState | None:
        """The state of a checkpoint, or None if some process cannot read it."""
        args, error, refused, meta, found = self._ocp.args, None, None, {}, {}
        try:
            meta = reader.restore(step, args=args.Composite(run=args.JsonRestore())).run
            if meta.pop("checksum", None) != checksum_of_metadata(meta):
                raise _CorruptError("the checksum of its metadata is wrong")
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
        state_dict, rows = self._state_dict(meta, state), self._rows(meta, state)
        wanted = state_dict.abstract_trees(rows)
        try:
            items = {name: args.StandardRestore(item) for name, item in checkpoint_items(wanted).items()}
            read = reader.restore(step, args=args.Composite(**items))
            trees = {name: read[name] for name in items if name != "state"} | (read.state if "state" in items else {})
            found = {name: from_nested(tree, trees[name]) for name, tree in wanted.items()}
        except Exception as e:
            error = e
        if self._unreadable(step, error) or self._unreadable(step, self._corrupt(found, meta)):
            return None
        if "residual" not in wanted and any(map(_is_residual, meta["leaves"])):
            text = (
                "checkpoint %s has what the merges of %s replicas had not sent; here it is left out and starts at zero"
            )
            _log.warning(text, step, meta["rows"]["residual"])
        # From here on processes run collectives.
        local_states = self._trainer._engine.with_previous_gradient(state_dict.load(found, rows))
        differ = "opt_state" in state_dict.rows and rows.get("opt_state") == self._trainer.world_size
        return with_metadata(replace(state, local_states=local_states, opt_states_differ=differ), meta)

    def _corrupt(self, found: dict[str, Any], meta: Any) -> Exception | None:
        """An error if arrays are not those that were saved; all processes call this together."""
        saved = meta.get("checksums")  # missing if a process died while they were computed
        here = checksums(found, self._group) if saved else {}
        wrong = [name for name, checksum in here.items() if saved.get(name) != checksum]
        return _CorruptError(f"the checksum of {wrong[0]} is wrong") if wrong else None

    def _unreadable(self, step: int, error: Exception | None) -> bool:
        """Whether any process has an error; then the checkpoint is renamed, because its round will be saved again."""
        errors = [
            text
            for text in self._group.all_gather(None if error is None else f"{type(error).__name__}: {error}")
            if text
        ]
        if not errors:
            return False
        # All wait for the rename before a save uses the name.
        with self._group.errors_everywhere(self._group.process_index, f"checkpoint {step}"):
            if self._group.is_first:
                names = (f"unreadable-{step}{f'-{number}' if number else ''}" for number in itertools.count())
                aside = next(path for path in map(self._folder.joinpath, names) if not path.exists())
                _log.warning("checkpoint %s cannot be read and is set aside as %s: %s", step, aside, errors[0][:300])
                (self._folder / str(step)).rename(aside)
        return True

    def _refuse_other(self, meta: Any, state: TrainerState) -> None:
        """Refuse a checkpoint from which this trainer cannot continue."""
        where = f"checkpoints={str(self._folder)!r}"
        own, other = installed_version(), meta["jaxche"]
        if meta["format"] != FORMAT or other.split(".")[:2] != own.split(".")[:2]:
            raise ValueError(
                f"{where} was written by jaxche {other} in format {meta['format']}, and this is {own} with format "
                f"{FORMAT}; write pip install jaxche=={other}, or give another folder"
            )
        if other != own:
            _log.warning("%s was written by jaxche %s, and this is %s", where, other, own)
        data = {self._data, meta["data"]}
        self.is_of_other_data = len(data) > 1 and NONDETERMINISTIC not in data
        trees = self._state_dict(meta, state).abstract_trees(self._rows(meta, state))
        wanted = leaf_shapes(trees)
        saved = {name: leaf for name, leaf in meta["leaves"].items() if "residual" in trees or not _is_residual(name)}
        for path in sorted({*wanted, *saved}, key=lambda path: (not path.startswith("params/"), path)):
            have, want = saved.get(path, "missing"), wanted.get(path, "not there")
            if have != want:
                raise ValueError(
                    f"{where} is of another model or optimizer: {path} is {have} in the checkpoint and {want} in this "
                    "trainer; use the model and tx that it was made with, or give another folder"
                )
        for name, want in (("batches", self._batches), ("seed", self._trainer._settings.seed)):
            if meta[name] != want:
                raise ValueError(
                    f"{where} is of a run with {name}={meta[name]}, and this one has {want}; use the same data and "
                    "seed, or give another folder"
                )

    def _state_dict(self, meta: Any, state: TrainerState) -> StateDict:
        """The state dict for a checkpoint, with a previous gradient if the checkpoint has one."""
        compares = any(path.split("/")[:2] == ["noise", "previous"] for path in meta["leaves"])
        engine = self._trainer._engine
        return engine.state_dict(engine.with_previous_gradient(state.local_states, compares))

    def _rows(self, meta: Any, state: TrainerState) -> dict[str, int]:
        """The rows of the saved trees, without a residual of other shapes, as with another ``opt_state=``."""
        rows = meta["rows"]
        wanted = leaf_shapes(self._state_dict(meta, state).abstract_trees(rows))
        same = all(
            wanted.get(path) == meta["leaves"].get(path) for path in {*wanted, *meta["leaves"]} if _is_residual(path)
        )
        return rows if same else {name: count for name, count in rows.items() if name != "residual"}


def _is_residual(path: str) -> bool:
    return path.startswith("residual/")
