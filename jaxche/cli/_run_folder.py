"""The folder of a run: which one is refused, and the files that are written there and read again."""

from __future__ import annotations

import json
import logging
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import jaxche

_log = logging.getLogger("jaxche")


def refuse_directory(directory: Path, out: str, resumable: bool) -> None:
    """Refuse a directory with a finished run, one with a run that cannot resume, and one that is not writable."""
    finished = read_json(directory / "result.json") is not None
    if os.path.exists(directory) and (finished or not resumable):
        raise ValueError(f"{directory} exists; choose another --name")
    # Do not create the directory here: a directory that exists belongs to a run.
    existing = next(path for path in (directory, *directory.absolute().parents) if os.path.exists(path))
    try:
        # Permissions do not show a read-only or full file system, and do not bind the superuser.
        with tempfile.TemporaryFile(dir=existing) as probe:
            probe.write(b"\0")
    except OSError as error:
        raise ValueError(
            f"--out {out}: cannot write the run to {directory}: {existing} takes no files ({error.strerror}). "
            "Write the path of a folder that does, e.g. --out ~/runs"
        ) from None


def write_policy(directory: Path, history: jaxche.History, params: Any) -> None:
    """Write ``history.jsonl``, ``history.png`` and ``params`` of one policy, on rank 0."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    directory.mkdir(parents=True, exist_ok=True)
    write_atomic(directory / "history.jsonl", history.to_json())  # the record is there already, beside checkpoints
    history.plot().savefig(directory / "history.png", dpi=110)
    arrays = jax.tree.map(np.asarray, params)
    with _rank0_checkpointer() as checkpointer:
        checkpointer.save((directory / "params").resolve(), args=ocp.args.StandardSave(arrays), force=True)


def read_params(path: Path) -> Any:
    """Read the parameters of :func:`write_policy` as NumPy arrays, on rank 0."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    with _rank0_checkpointer() as checkpointer:
        target = jax.tree.map(
            lambda x: np.empty(x.shape, x.dtype), checkpointer.metadata(path.resolve()).item_metadata.tree
        )
        return checkpointer.restore(path.resolve(), args=ocp.args.StandardRestore(target))


def write_result(directory: Path, result: dict[str, Any]) -> None:
    """Write ``result.json``, which marks the run as finished."""
    import numpy as np

    directory.mkdir(parents=True, exist_ok=True)
    used = jaxche.cluster.versions() | {"numpy": np.__version__, "python": platform.python_version()}
    text = json.dumps(result | {"versions": used}, indent=2, default=str)
    write_atomic(directory / "result.json", text + "\n")


def write_atomic(path: Path, text: str) -> None:
    """Write a file by renaming a complete temporary file."""
    part = path.with_suffix(".part")
    try:
        part.write_text(text, encoding="utf8")
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON object; None for a missing file, and, with a warning, for a damaged one."""
    try:
        found = json.loads(path.read_bytes().decode())
        if isinstance(found, dict):
            return found
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError):
        pass
    _log.warning("%s cannot be read and is ignored", path)
    return None


def _rank0_checkpointer() -> Any:
    """A checkpointer for rank 0: by default Orbax waits for all processes, and other machines may not see the files."""
    import orbax.checkpoint as ocp

    options = ocp.options.MultiprocessingOptions(
        primary_host=0, active_processes={0}, barrier_sync_key_prefix="jaxche_rank0"
    )
    handler = ocp.StandardCheckpointHandler(multiprocessing_options=options)
    return ocp.Checkpointer(handler, multiprocessing_options=options)
