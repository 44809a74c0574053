"""The state of a run from its newest checkpoint; refuses those of other runs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxche.checkpoints import CheckpointReader, leaf_shapes
from jaxche.training._fingerprint import NONDETERMINISTIC
from jaxche.training._rounds import Rounds
from jaxche.training._state import TrainerState
from jaxche.training._state_dict import StateDict, with_metadata

_log = logging.getLogger("jaxche")


class Restore:
    """Continues a run from a folder of checkpoints.

    ``is_of_other_data`` is whether the state that was restored was trained on other data.

    Args:
      trainer: of the run.
      folder: with the checkpoints.
      source: what a checkpoint must have been made with by name: ``batches`` and ``seed``, and by warning ``data``.
    """

    is_of_other_data = False

    def __init__(self, trainer: Rounds, folder: Path, source: Mapping[str, Any]):
        self._trainer, self._folder, self._source = trainer, folder, source

    def newest(self, state: TrainerState) -> TrainerState:
        """The newest state that all processes can read, or the given one if none is of a later round."""
        reader = CheckpointReader(self._trainer._group, self._folder, lambda meta: self._wanted(meta, state))
        found = reader.newest(state.round)
        if found is None:
            return state
        meta, state_dict, rows = found.meta, self._state_dict(found.meta, state), self._rows(found.meta, state)
        data = {self._source["data"], meta["data"]}
        self.is_of_other_data = len(data) > 1 and NONDETERMINISTIC not in data
        if "residual" not in found.trees and any(map(_is_residual, meta["leaves"])):
            text = (
                "checkpoint %s has what the merges of %s replicas had not sent; here it is left out and starts at zero"
            )
            _log.warning(text, found.step, meta["rows"]["residual"])
        # From here on processes run collectives.
        local_states = self._trainer._engine.with_previous_gradient(state_dict.load(found.trees, rows))
        differ = "opt_state" in state_dict.rows and rows.get("opt_state") == self._trainer.world_size
        return with_metadata(replace(state, local_states=local_states, opt_states_differ=differ), meta)

    def _wanted(self, meta: Mapping[str, Any], state: TrainerState) -> dict[str, Any]:
        """The trees to read; refuses a checkpoint from which this trainer cannot continue."""
        where = f"checkpoints={str(self._folder)!r}"
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
        for name in ("batches", "seed"):
            if meta[name] != self._source[name]:
                raise ValueError(
                    f"{where} is of a run with {name}={meta[name]}, and this one has {self._source[name]}; use the "
                    "same data and seed, or give another folder"
                )
        return trees

    def _state_dict(self, meta: Mapping[str, Any], state: TrainerState) -> StateDict:
        """The state dict for a checkpoint, with a previous gradient if the checkpoint has one."""
        compares = any(path.split("/")[:2] == ["noise", "previous"] for path in meta["leaves"])
        engine = self._trainer._engine
        return engine.state_dict(engine.with_previous_gradient(state.local_states, compares))

    def _rows(self, meta: Mapping[str, Any], state: TrainerState) -> dict[str, int]:
        """The rows of the saved trees, without a residual of other shapes, as with another ``opt_state=``."""
        rows = meta["rows"]
        wanted = leaf_shapes(self._state_dict(meta, state).abstract_trees(rows))
        same = all(
            wanted.get(path) == meta["leaves"].get(path) for path in {*wanted, *meta["leaves"]} if _is_residual(path)
        )
        return rows if same else {name: count for name, count in rows.items() if name != "residual"}


def _is_residual(path: str) -> bool:
    return path.startswith("residual/")
