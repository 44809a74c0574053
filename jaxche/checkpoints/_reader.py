"""Reads the newest checkpoint that all processes of a group can read."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxche.checkpoints._checksums import checksums
from jaxche.checkpoints._metadata import CorruptError, checked, refuse_other_format
from jaxche.checkpoints._system_errors import is_of_process
from jaxche.checkpoints._trees import from_nested, items_of
from jaxche.distributed import Group

_log = logging.getLogger("jaxche")

# The parts of a checkpoint.
_ITEMS = {"run", "params", "residual", "state"}


class Checkpoint(NamedTuple):
    """A checkpoint as it was read: its step, its metadata, and its named trees."""

    step: int
    meta: dict[str, Any]
    trees: dict[str, Any]


class CheckpointReader:
    """Reads checkpoints, each process by itself: one that cannot read would make the others wait in a collective."""

    def __init__(self, group: Group, folder: Path, wanted: Callable[[Mapping[str, Any]], dict[str, Any]]):
        import orbax.checkpoint as ocp

        self._ocp, self._group, self._folder = ocp, group, folder
        # The shapes and shardings of the trees to read, from metadata; raises ValueError to refuse a checkpoint.
        self._wanted = wanted

    def newest(self, after: int) -> Checkpoint | None:
        """The newest checkpoint of a step later than ``after`` that all processes can read, or None."""
        with contextlib.closing(self._manager()) as manager:
            steps_seen = self._group.all_gather(sorted(manager.all_steps()))
            if any(steps != steps_seen[0] for steps in steps_seen):
                raise ValueError(
                    f"checkpoints={str(self._folder)!r}: processes see different checkpoints there ({steps_seen}); "
                    "give a folder that all machines share"
                )
            for step in reversed(steps_seen[0]):
                if step <= after:
                    break
                found = self._read(manager, step)
                if found is not None:
                    return found
        return None

    def _manager(self) -> Any:
        """An Orbax manager for this process only."""
        options, own = self._ocp.options, self._group.process_index
        alone = options.MultiprocessingOptions(
            primary_host=own, active_processes={own}, barrier_sync_key_prefix=f"jaxche-reader-{own}"
        )
        settings = self._ocp.CheckpointManagerOptions(create=False, multiprocessing_options=alone)
        return self._ocp.CheckpointManager(self._folder, options=settings)

    def _read(self, manager: Any, step: int) -> Checkpoint | None:
        """A checkpoint, or None if some process cannot read it."""
        args, error, refused = self._ocp.args, None, None
        meta: dict[str, Any] = {}
        wanted: dict[str, Any] = {}
        trees: dict[str, Any] = {}
        try:
            meta = checked(manager.restore(step, args=args.Composite(run=args.JsonRestore())).run)
            try:
                refuse_other_format(meta, self._folder)
                wanted = self._wanted(meta)
            except ValueError as e:
                refused = e
        except Exception as e:
            error = e
            if not (is_of_process(e) or self._is_own(step)):
                refused = ValueError(
                    f"checkpoints={str(self._folder)!r}: {step} there was not written by jaxche; give another folder"
                )
        self._group.raise_everywhere(refused, self._group.process_index, f"checkpoint {step}")
        if self._unreadable(step, error):
            return None
        try:
            items = {name: args.StandardRestore(item) for name, item in items_of(wanted).items()}
            read = manager.restore(step, args=args.Composite(**items))
            nested = {name: read[name] for name in items if name != "state"} | (read.state if "state" in items else {})
            trees = {name: from_nested(tree, nested[name]) for name, tree in wanted.items()}
        except Exception as e:
            error = e
        if self._unreadable(step, error) or self._unreadable(step, self._corrupt(trees, meta)):
            return None
        return Checkpoint(step, meta, trees)

    def _is_own(self, step: int) -> bool:
        """Whether jaxche wrote a checkpoint, as far as what is left of it shows, and the record of a run beside it."""
        path = self._folder / str(step)
        if os.path.isdir(path / "run"):
            return True
        try:
            items = {entry.name for entry in path.iterdir() if entry.is_dir()}
        except OSError:  # as of a damaged one
            return True
        return items <= _ITEMS and (self._folder / "history.jsonl").exists()

    def _corrupt(self, trees: Mapping[str, Any], meta: Mapping[str, Any]) -> Exception | None:
        """An error if arrays are not those that were saved; all processes call this together."""
        saved = meta.get("checksums", {})  # missing if a process died while they were computed
        here = checksums(trees, self._group) if saved else {}
        wrong = [name for name, checksum in here.items() if saved.get(name) != checksum]
        return CorruptError(f"the checksum of {wrong[0]} is wrong") if wrong else None

    def _unreadable(self, step: int, error: Exception | None) -> bool:
        """Whether any process has an error; then the checkpoint is renamed, because its round will be saved again."""
        own = error if is_of_process(error) else None  # it cannot read now, e.g. for want of memory
        self._group.raise_everywhere(own, self._group.process_index, f"checkpoint {step}")
        text = None if error is None else f"{type(error).__name__}: {error}"
        errors = [one for one in self._group.all_gather(text) if one]
        if not errors:
            return False
        # All wait for the rename before a save uses the name.
        with self._group.errors_everywhere(self._group.process_index, f"checkpoint {step}"):
            if self._group.is_first:
                names = (f"unreadable-{step}{f'-{number}' if number else ''}" for number in itertools.count())
                aside = next(path for path in map(self._folder.joinpath, names) if not path.exists())
                _log.warning("checkpoint %s cannot be read and is set aside as %s: %s", step, aside, errors[0][:300])
                (self._folder / str(step)).rename(aside)
                with contextlib.suppress(OSError):  # a run without a record yet, or a full disk
                    shutil.copy(self._folder / "history.jsonl", aside)  # which will be cut
        return True
