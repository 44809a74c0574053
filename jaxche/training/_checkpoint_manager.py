"""The checkpoint manager: saves a run with Orbax and restores the newest checkpoint that all processes can read."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxche.data import StreamReader, from_json, is_stream, to_json
from jaxche.distributed import ElasticGroup, Group, PeerLostError, on_sigterm, shared_folder
from jaxche.reports import Every, History, RoundInfo, read_record, warn_of_damage
from jaxche.training._checkpoints import Checkpoints
from jaxche.training._checksums import checksum_of_json, checksums
from jaxche.training._fingerprint import NONDETERMINISTIC
from jaxche.training._hooks import Hook, Run
from jaxche.training._rounds import Rounds
from jaxche.training._state import Stop, TrainerState
from jaxche.training._state_dict import (
    FORMAT,
    READABLE,
    StateDict,
    checkpoint_items,
    from_nested,
    installed_version,
    leaf_shapes,
    metadata,
    name_collision,
    with_metadata,
)

_log = logging.getLogger("jaxche")

# Limit for all processes to write their shards. The death of a process ends the wait earlier.
_TIMEOUT_S = 3600


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
        error, self._data = None, NONDETERMINISTIC
        try:
            self._data = trainer._engine.data_digest(data)
        except Exception as e:
            error = e
        self._group.raise_everywhere(error, self._group.process_index, "the reading of the data")
        self._log = MetricsLog(self._group, self._folder)
        self._manager: Any = None
        # The step of the last save that was started, and of the last one that a lost process did not finish.
        self._started = self._abandoned = 0
        self._sigterm = contextlib.ExitStack()
        self._handles_sigterm = self._warned = False

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
        run.state = CheckpointReader(self._folder, self._trainer, self._batches, self._data).newest(run.state)
        self._manager = self._open()
        run.history = self._log.truncate(run.state.round)
        if self._trainer._engine.overlaps and self._every is None and self._config.every == 1 and self._group.is_first:
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
        is_due = run.state.round % self._config.every == 0 if self._every is None else run.is_due(self._every)
        if is_due or info.stop or run.is_done:
            with self._unless_lost("begun"):
                run.state = run.state.merged()  # a resumed run goes on from there, and so does this one
                self.save(run.state)
        return False

    def on_end(self, run: Run) -> None:
        if run.history and run.history[-1] is not self._logged:  # evaluated since
            self._append(run.history[-1])
        self._log.flush()

    def _append(self, info: RoundInfo) -> None:
        self._log.append(info)
        self._logged = info

    def on_admission(self) -> None:
        """Wait until all saves are written."""
        self._manager.wait_until_finished()

    def on_membership(self, run: Run, shrunk: bool) -> None:
        """Continue with the present members from the state of the run."""
        if shrunk:
            # Some processes may have started to save a round that is now repeated.
            self._abandoned = max(self._group.all_gather(self._started))
        else:
            self._align_operation_ids()
        self._manager = self._open()
        kept = self._log.truncate(run.state.round)
        # The process that wrote the record may have died before it wrote the last rounds.
        last = kept[-1].round if kept else -1
        for info in run.history:
            if info.round > last:
                self._log.append(info)

    def on_stop(self, run: Run, preempted: bool = False) -> None:
        self.save(run.state)
        if preempted:
            self._manager.wait_until_finished()

    def save(self, state: TrainerState) -> None:
        """Save a state unless it is saved; returns when the arrays are copied, or with ``durable`` written."""
        if state.round in self._manager.all_steps() or state.round <= self._abandoned:
            return
        self._started = state.round
        args, state_dict = self._ocp.args, self._trainer._engine.state_dict(state.local_states)
        trees = state_dict.trees()
        if len(self._group.members) < 2 <= jax.process_count():
            trees = jax.tree.map(_spanning, trees)
        meta = metadata(self._with_iterators(state)) | {
            "format": FORMAT,
            "jaxche": installed_version(),
            "rows": state_dict.rows,
            "leaves": leaf_shapes(trees, FORMAT),
            "batches": self._batches,
            "data": self._data,
            "seed": self._trainer.seed,
        }
        with self._unless_lost("begun"):
            meta["checksums"] = checksums(trees, FORMAT, self._group)
        meta["checksum"] = _checksum(meta)
        items = {name: args.StandardSave(item) for name, item in checkpoint_items(trees, FORMAT).items()}
        with self._unless_lost("begun"):
            self._manager.save(state.round, args=args.Composite(run=args.JsonSave(meta), **items), force=True)
        if self._config.durable:
            self._manager.wait_until_finished()

    def _with_iterators(self, state: TrainerState) -> TrainerState:
        """The state with those of the iterators of all processes, if data is a stream and has them."""
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
        group, options, settings, handlers = self._group, self._ocp.options, {}, None
        if isinstance(group, ElasticGroup):
            # The death of a process ends a save and its threads when it is detected.
            wait = group.thread_barrier("saved")
            settings["async_options"] = options.AsyncOptions(
                timeout_secs=_TIMEOUT_S,
                barrier_sync_fn=lambda *, key, timeout_ms: wait(key.replace("/", "."), timeout_ms),
            )
        is_first_quorum = group.quorum_id == "0"
        if not is_first_quorum:
            settings["multiprocessing_options"] = multiprocessing = options.MultiprocessingOptions(
                primary_host=group.members[0],
                active_processes=set(group.members),
                barrier_sync_key_prefix=f"jaxche-{group.quorum_id}",
            )
            handlers = _handlers(multiprocessing)
        options = self._ocp.CheckpointManagerOptions(
            max_to_keep=self._config.keep,
            # Remove unfinished checkpoints of dead processes only when a run starts.
            cleanup_tmp_directories=is_first_quorum,
            create=is_first_quorum,
            **settings,
        )
        return self._ocp.CheckpointManager(self._folder, options=options, handler_registry=handlers)

    def _align_operation_ids(self) -> None:
        """Set Orbax's number of the next save, which must be equal in all processes."""
        from orbax.checkpoint._src.futures.synchronization import OperationIdGenerator

        most = max(self._group.all_gather(int(OperationIdGenerator.get_current_operation_id())))
        while int(OperationIdGenerator.get_current_operation_id()) < most:
            OperationIdGenerator.next_operation_id()

    def close(self, kind: Any, error: Any, trace: Any) -> None:
        """Wait until all saves are written, but not after the death of a process."""
        if self._manager is not None and not isinstance(error, PeerLostError):
            with self._unless_lost("finished"):
                self._manager.wait_until_finished()
            with self._unless_lost("finished"):
                self._manager.close()

    @contextlib.contextmanager
    def _unless_lost(self, what: str) -> Iterator[None]:
        """Log the failure of a save after the death of a process: in an elastic run the others have the state."""
        try:
            yield
        except (jax.errors.JaxRuntimeError, ValueError, TimeoutError, PeerLostError) as error:
            if not self._group.elastic or not (self._group.lost() or "Gloo" in str(error)):
                raise
            text = "checkpoint %s was not %s, the loss of a process was detected: %s"
            _log.warning(text, self._started, what, str(error)[:300])


def _handlers(multiprocessing: Any) -> Any:
    """Orbax's handlers that write through a process other than 0, which may be dead.

    The manager's own option of that name does not reach them.
    """
    import orbax.checkpoint as ocp
    from orbax.checkpoint import type_handlers
    from orbax.checkpoint._src.metadata.array_metadata_store import Store

    # Orbax refuses metadata of a single process where there are several.
    store = Store() if len(multiprocessing.active_processes) > 1 else None
    # In parallel, replicas would also write parts of arrays for processes that are dead.
    handler = type_handlers.ArrayHandler(
        primary_host=multiprocessing.primary_host, use_replica_parallel=False, array_metadata_store=store
    )
    absl = logging.getLogger("absl")
    level = absl.level
    absl.setLevel(logging.ERROR)  # it warns of every replacement
    type_handlers.register_type_handler(jax.Array, handler, override=True)
    absl.setLevel(level)
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    for args, kind in (
        (ocp.args.StandardSave, ocp.StandardCheckpointHandler),
        (ocp.args.JsonSave, ocp.JsonCheckpointHandler),
    ):
        registry.add(None, args, kind(multiprocessing_options=multiprocessing))
    return registry


def _spanning(array: jax.Array) -> jax.Array:
    """An array of this process as a replica of one on two processes, of which the other need not live.

    Orbax saves only arrays that span processes where there are several, even if all others are dead.
    """
    assert isinstance(array.sharding, jax.sharding.NamedSharding)
    mesh, spec = array.sharding.mesh, array.sharding.spec
    assert isinstance(mesh, jax.sharding.Mesh)
    own = mesh.devices.flat[0]
    others = [device for device in own.client.devices() if device.process_index != own.process_index]
    both = np.array([*mesh.devices.flat, *others[: mesh.size]]).reshape(2, *mesh.devices.shape)
    sharding = jax.sharding.NamedSharding(jax.sharding.Mesh(both, ("absent", *mesh.axis_names)), spec)
    shards = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, shards)


class _CorruptError(Exception):
    """The files of a checkpoint can be read, and are not what was written."""


class CheckpointReader:
    """Restores the newest checkpoint that all processes can read, and refuses those of other runs.

    Each process reads by itself, so that none waits in a collective for one that cannot read; then all compare.
    """

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
            if meta.pop("checksum", None) not in (None, _checksum(meta)):
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
            items = {
                name: args.StandardRestore(item) for name, item in checkpoint_items(wanted, meta["format"]).items()
            }
            read = reader.restore(step, args=args.Composite(**items))
            trees = {name: read[name] for name in items if name != "state"} | (read.state if "state" in items else {})
            found = {name: from_nested(tree, trees[name], meta["format"]) for name, tree in wanted.items()}
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
        return with_metadata(replace(state, local_states=local_states), meta)

    def _corrupt(self, found: dict[str, Any], meta: Any) -> Exception | None:
        """An error if arrays are not those that were saved; all processes call this together."""
        saved = meta.get("checksums")  # missing in older checkpoints
        here = checksums(found, meta["format"], self._group) if saved else {}
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
        failed = None
        if self._group.is_first:
            names = (f"unreadable-{step}{f'-{number}' if number else ''}" for number in itertools.count())
            aside = next(path for path in map(self._folder.joinpath, names) if not path.exists())
            _log.warning("checkpoint %s cannot be read and is set aside as %s: %s", step, aside, errors[0][:300])
            try:
                (self._folder / str(step)).rename(aside)
            except OSError as e:
                failed = e
        # All wait for the rename before a save uses the name.
        self._group.raise_everywhere(failed, self._group.process_index, f"checkpoint {step}")
        return True

    def _refuse_other(self, meta: Any, state: TrainerState) -> None:
        """Refuse a checkpoint from which this trainer cannot continue."""
        where = f"checkpoints={str(self._folder)!r}"
        own, other = installed_version(), meta["jaxche"]
        if meta["format"] not in READABLE or other.split(".")[:2] != own.split(".")[:2]:
            raise ValueError(
                f"{where} was written by jaxche {other} in format {meta['format']}, and this is {own} with format "
                f"{FORMAT}; write pip install jaxche=={other}, or give another folder"
            )
        if other != own:
            _log.warning("%s was written by jaxche %s, and this is %s", where, other, own)
        if meta.get("data", NONDETERMINISTIC) != self._data and NONDETERMINISTIC not in (
            self._data,
            meta.get("data", NONDETERMINISTIC),
        ):
            _log.warning(
                "%s was made with other data of the same number of batches; training continues with this data", where
            )
        trees = self._state_dict(meta, state).abstract_trees(self._rows(meta, state))
        if names := name_collision(trees, meta["format"]):
            raise ValueError(
                f"{where} was written in format {meta['format']}, in which {names[0]} and {names[1]} have one name, so "
                "that only one of them was saved; give another folder, and this version saves both"
            )
        wanted = leaf_shapes(trees, meta["format"])
        saved = {name: leaf for name, leaf in meta["leaves"].items() if "residual" in trees or not _is_residual(name)}
        for path in sorted({*wanted, *saved}, key=lambda path: (not path.startswith("params/"), path)):
            have, want = saved.get(path, "missing"), wanted.get(path, "not there")
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

    def _state_dict(self, meta: Any, state: TrainerState) -> StateDict:
        """The state dict for a checkpoint, with a previous gradient if the checkpoint has one."""
        compares = any(path.split("/")[:2] == ["noise", "previous"] for path in meta["leaves"])
        engine = self._trainer._engine
        return engine.state_dict(engine.with_previous_gradient(state.local_states, compares))

    def _rows(self, meta: Any, state: TrainerState) -> dict[str, int]:
        """The rows of the saved trees, without a residual of other shapes, as with another ``opt_state=``."""
        rows = meta["rows"]
        wanted = leaf_shapes(self._state_dict(meta, state).abstract_trees(rows), meta["format"])
        same = all(
            wanted.get(path) == meta["leaves"].get(path) for path in {*wanted, *meta["leaves"]} if _is_residual(path)
        )
        return rows if same else {name: count for name, count in rows.items() if name != "residual"}


def _checksum(meta: dict[str, Any]) -> int:
    """The checksum of metadata, without what is refused by name if it is wrong."""
    return checksum_of_json({name: value for name, value in meta.items() if name not in ("format", "jaxche")})


def _is_residual(path: str) -> bool:
    return path.startswith("residual/")


class MetricsLog:
    """The rounds of a run as JSON lines beside its checkpoints, written by the leader and read by all."""

    def __init__(self, group: Group, folder: Path):
        self._group = group
        self._file = folder / "history.jsonl"
        self._unwritten = b""

    def append(self, info: RoundInfo) -> None:
        """Write the line of a round; while the disk is full it is kept, and written with a later one."""
        if self._group.is_leader:
            was_full = bool(self._unwritten)
            self._unwritten += History([info]).to_json().encode()
            self.flush(warns=not was_full)

    def flush(self, warns: bool = True) -> None:
        """Write the lines that are not on file yet."""
        if not self._unwritten:
            return
        size = self._file.stat().st_size if self._file.exists() else 0
        try:
            with self._file.open("ab") as file:
                file.write(self._unwritten)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            with contextlib.suppress(OSError):
                os.truncate(self._file, size)
            if warns:
                lines = self._unwritten.count(b"\n")
                _log.warning("%s: %s; its last %d rounds are not on file yet", self._file, error.strerror, lines)
            return
        self._unwritten = b""

    def truncate(self, rounds: int) -> History:
        """Keep and return the rounds before this number, because later rounds are repeated.

        Unreadable lines are dropped. All processes call this together.
        """
        data = self._file.read_bytes() if self._file.exists() else b""
        record, kept = read_record(data), History()
        for info in record.rounds:
            # The first round need not be number 0.
            if (kept[-1].round if kept else -1) < info.round < rounds:
                kept.append(info)
            elif kept and info.round == kept[-1].round:  # with the results of an evaluation at the end
                kept[-1] = info
        self._group.barrier()  # all have read the file
        if self._group.is_leader:
            warn_of_damage(str(self._file), record)
            self._unwritten = b""
            if (text := kept.to_json().encode()) != data and data.startswith(text):
                os.truncate(self._file, len(text))  # needs no space, which a full disk has not
            elif text != data:
                part = self._file.with_suffix(".part")
                part.write_bytes(text)
                part.replace(self._file)
        return kept
