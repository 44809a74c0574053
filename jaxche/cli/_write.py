"""The files of a run."""

from __future__ import annotations

import json
import logging
import platform
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxche.cluster import versions
from jaxche.training import History

_log = logging.getLogger("jaxche")


def write_policy(folder: Path, history: History, params: Any) -> None:
    """Writes what one policy did: ``history.jsonl``, ``history.png`` and the parameters in ``params``.

    Over what is there: a start after this one may have to write again. For rank 0 alone.
    ``orbax.checkpoint.StandardCheckpointer().restore(folder / "params")`` reads them back.
    """
    folder.mkdir(parents=True, exist_ok=True)
    history.to_json(folder / "history.jsonl")
    history.plot().savefig(folder / "history.png", dpi=110)
    _save(folder / "params", params)


def write_result(folder: Path, result: dict[str, Any]) -> None:
    """Writes ``result.json``, whole or not at all: it says that all is done."""
    folder.mkdir(parents=True, exist_ok=True)
    # All that the numbers depend on.
    used = versions() | {"numpy": np.__version__, "python": platform.python_version()}
    text = json.dumps(result | {"versions": used}, indent=2, default=str)
    write_whole(folder / "result.json", text + "\n")


def write_whole(path: Path, text: str) -> None:
    """Writes a file that is there whole or not at all, whenever this process dies."""
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf8")
    part.replace(path)


def read_whole(path: Path) -> dict[str, Any] | None:
    """What :func:`write_whole` wrote as JSON; None where there is no such file, or, with a warning, a damaged one."""
    try:
        found = json.loads(path.read_bytes().decode())
        if isinstance(found, dict):
            return found
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError):
        pass
    _log.warning("%s cannot be read and is left out", path)
    return None


def _save(path: Path, params: Any) -> None:
    import orbax.checkpoint as ocp

    with _alone() as checkpointer:
        checkpointer.save(path.resolve(), args=ocp.args.StandardSave(jax.tree.map(np.asarray, params)), force=True)


def read_params(path: Path) -> Any:
    """The parameters that :func:`write_policy` wrote, as NumPy arrays, by rank 0 alone."""
    import orbax.checkpoint as ocp

    with _alone() as checkpointer:
        kept = jax.tree.map(
            lambda x: np.empty(x.shape, x.dtype), checkpointer.metadata(path.resolve()).item_metadata.tree
        )
        return checkpointer.restore(path.resolve(), args=ocp.args.StandardRestore(kept))


def _alone() -> Any:
    """A checkpointer for rank 0. Merged parameters are the same everywhere, and other machines may not see this folder;
    left alone, Orbax waits for all processes of the run."""
    import orbax.checkpoint as ocp

    alone = ocp.options.MultiprocessingOptions(
        primary_host=0, active_processes={0}, barrier_sync_key_prefix="jaxche_rank0"
    )
    handler = ocp.StandardCheckpointHandler(multiprocessing_options=alone)
    return ocp.Checkpointer(handler, multiprocessing_options=alone)
