"""Checks of the trainer's arguments."""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxche.averaging import MERGE_RULES, WIRES
from jaxche.cadence import AUTO_WIRES, TUNERS, ApplyPolicy, ElChe, VirtualFleet
from jaxche.distributed import NUM_PROCESSES, PACE_MS, scheduled
from jaxche.messages import brief, one_of, whole_number
from jaxche.replicas import BatchPlacement, DevicePlacement, spans_processes
from jaxche.reports import RoundInfo
from jaxche.scaling import AdamScale
from jaxche.sharding import RNG_NAMES, check_transform, wanted_names

_log = logging.getLogger("jaxche")


class Averaging(NamedTuple):
    """The arguments that say what replicas average, when, how and where; they depend on each other."""

    policy: ApplyPolicy
    average: str
    merge: str
    opt_state: str
    outer: Any
    scaling: Any
    backend: str
    staged: bool  # replicas are in stages


def check_names(average: Any, merge: Any, opt_state: Any, backend: Any) -> None:
    """Refuse unknown values of the arguments that say what a merge does."""
    if average is not None:
        one_of("average", average, ("parameters", "gradients"))
    one_of("merge", merge, ("auto", *MERGE_RULES))
    one_of("opt_state", opt_state, ("auto", "local", "average", "reset"))
    one_of("backend", backend, ("auto", "device", "host"))


def check_rules(tx: Any, averaging: Averaging) -> None:
    """Refuse arguments that are no optimizers, and rules without effect."""
    check_transform("tx", tx)
    if averaging.outer is not None:
        check_transform("outer", averaging.outer)
    has_rules = averaging.opt_state != "local" or averaging.outer is not None or averaging.merge != "steps"
    if averaging.average == "gradients" and has_rules:
        raise ValueError(
            "average='gradients' makes one identical update everywhere: merge=, opt_state= and outer= have "
            "nothing to act on; leave them out or write average='parameters'"
        )


def check_wire(wire: str, averaging: Averaging) -> None:
    """Refuse an unknown wire, and one for merges that send no change of the parameters."""
    one_of("wire", wire, (*WIRES, "auto"))
    if wire == "float32":
        return
    if averaging.staged:
        reason = "the stages of a jaxche.Partitioned merge one after the other in float32"
    elif averaging.average == "gradients":
        reason = "average='gradients' sums gradients in float32, for the exact update of the joined batch"
    else:
        return
    raise ValueError(
        f"wire={wire!r} codes the change of averaged parameters, and {reason}; leave it out, or write "
        "policy='cadence', average='parameters' for a model in one piece"
    )


def check_auto_wire(wire: str, che: ElChe | None, elastic: bool, fleet: Any) -> None:
    """Refuse ``wire="auto"`` where its merges cannot be measured and changed."""
    if wire != "auto":
        return
    if isinstance(fleet, VirtualFleet) and fleet.link_mbit is None:
        what = "measures merges, and on the clock of a fleet= without link_mbit= they cost the same with every wire"
    elif elastic:
        what = "changes the programs of all processes in a run, and an elastic run admits processes without them"
    elif che is not None and not TUNERS[che.tuner].stores_merges:
        what = f"follows the measured merges, which tuner={che.tuner!r} does not keep"
    else:
        return
    raise ValueError(f"wire='auto' {what}; write wire='int4', or leave it out")


def check_recorded(history: Sequence[RoundInfo], wire: str, overlaps: Sequence[float], groups: Sequence[int]) -> None:
    """Refuse recorded rounds whose merges a trainer with these arguments would not make again."""
    # Updates of exact sync have neither wire nor overlap.
    history = [info for info in history if info.average == "parameters"]
    wires = {info.wire for info in history if info.wire}
    for info in history:
        if info.group_merges > 1 and info.groups != tuple(groups):
            raise ValueError(
                f"history was recorded with other groups= ({info.groups} in round {info.round}, the group of each "
                f"replica) than those of this trainer ({tuple(groups)}); a replay makes the recorded merges again: "
                "write jaxche.Trainer(..., groups=...) with those groups"
            )
        recorded = {"wire": "auto" if len(wires) > 1 else info.wire, "overlap": info.overlap} if info.wire else {}
        for name, own, others in (("wire", wire, AUTO_WIRES * (wire == "auto")), ("overlap", overlaps[0], overlaps)):
            value = recorded.get(name, own)
            if value != own and value not in others:
                raise ValueError(
                    f"history was recorded with {name}={value!r} in round {info.round}, and this trainer has "
                    f"{name}={own!r}; a replay makes the recorded merges again: write "
                    f"jaxche.Trainer(..., {name}={value!r})"
                )


def check_joined() -> None:
    """Refuse a process that was started as one of several and has not called ``initialize``."""
    if NUM_PROCESSES in os.environ:
        name, count = NUM_PROCESSES, os.environ[NUM_PROCESSES]
    else:
        name, count = scheduled(os.environ)
    if str(count) != "1" and not jax.distributed.is_initialized():
        raise ValueError(
            f"this process was started as one of {count} ({name}), but has not joined the others; write "
            f"jaxche.initialize() behind the imports, before the first array, or set {NUM_PROCESSES}=1 to train alone"
        )


def _is_number(value: Any) -> bool:
    """Whether a value is a number of Python or NumPy, and no flag."""
    return isinstance(value, Real) and not isinstance(value, bool)


def _one_per_replica(value: Any, world_size: int) -> list[Any]:
    """The given list, or a single value for each replica."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    is_list |= isinstance(value, np.ndarray) and value.ndim > 0
    return list(value) if is_list else [value] * world_size


def checked_paces(pace_ms: Any, world_size: int) -> list[float | None]:
    """The pace of each replica in ms, from the argument or from the variable of the launcher."""
    if pace_ms is None and (text := os.environ.get(PACE_MS)) is not None:
        try:
            pace_ms = float(text)
        except ValueError:
            pace_ms = math.nan
        if not 0 < pace_ms < math.inf:
            raise ValueError(f"{PACE_MS}={text!r} must be a positive number of ms; write {PACE_MS}=20, or unset it")
    paces = _one_per_replica(pace_ms, world_size)
    valid = (p is None or (_is_number(p) and math.isfinite(p) and float(p) > 0) for p in paces)
    if len(paces) != world_size or not all(valid):
        raise ValueError(
            f"pace_ms={brief(pace_ms)} must be one positive number of ms, or {world_size}, one per replica; write e.g. "
            f"pace_ms={[20.0] * min(world_size, 4)}"
        )
    return paces


def check_fleet(fleet: Any, world_size: int, num_processes: int, pace_ms: Any) -> None:
    """Refuse a virtual fleet of other replicas, over several processes, or beside real paces."""
    if fleet is None:
        return
    if not isinstance(fleet, VirtualFleet):
        raise ValueError(f"fleet={fleet!r} is not one; write fleet=jaxche.VirtualFleet(ms_per_batch=[20.0, 50.0])")
    if len(fleet.ms_per_batch) != world_size:
        raise ValueError(
            f"fleet has {len(fleet.ms_per_batch)} ranks, and there are {world_size} replicas; give ms_per_batch one "
            "number a replica, or as many replicas: replicas=jaxche.fake_devices(2)"
        )
    if num_processes > 1:
        raise ValueError(
            f"fleet= is a clock of one process, and this run has {num_processes}; start one process with all replicas"
        )
    if pace_ms is not None:
        raise ValueError(f"pace_ms={pace_ms!r} pads real time, and fleet= replaces it; leave one of them out")


def check_auto(given: Mapping[str, Any], staged: bool) -> None:
    """Refuse arguments of one policy where ``policy="auto"`` changes between two."""
    for name in given:
        raise ValueError(
            f"policy='auto' changes between exact sync and local steps, and {name}= is of one of them; leave it out, "
            "or write policy='sync' or policy='cadence'"
        )
    if staged:
        raise ValueError(
            "policy='auto' has no programs for a jaxche.Partitioned; write policy='cadence' or policy='sync'"
        )


# The largest part of a round beside a merge: later corrections make training unstable.
MOST_OVERLAP = 0.5
# Half of the run: the mean of all parameters so far.
_MOST_AGE = 0.5


def checked_overlap(overlap: Any) -> float:
    """The part of a round that runs beside a merge."""
    if not _is_number(overlap) or not 0 <= overlap <= MOST_OVERLAP:
        raise ValueError(
            f"overlap={overlap!r} is the part of a round that its replicas may take before the merge of the last one "
            "comes in, from 0 (wait for each merge) to 0.5; later corrections make training unstable; write overlap=0.5"
        )
    return float(overlap)


def checked_ema(ema: Any) -> float | None:
    """The mean age of the parameters in the moving average, as a part of the run so far."""
    if ema is None:
        return None
    if not _is_number(ema) or not 0 < ema <= _MOST_AGE:
        raise ValueError(
            f"ema={brief(ema)} is the mean age of the parameters in the moving average, as a part of the run so far, "
            f"and no decay: a number above 0, of at most {_MOST_AGE}; write ema=0.05"
        )
    return float(ema)


def check_overlap(overlap: float, averaging: Averaging, placements: Sequence[BatchPlacement], virtual: bool) -> None:
    """Refuse merges in flight beside steps with collectives, and rounds without parameters to correct later."""
    if not overlap:
        return
    policy, average = averaging.policy, averaging.average
    if policy not in (ApplyPolicy.CADENCE, ApplyPolicy.AUTO) or average != "parameters":
        raise ValueError(
            f"overlap={overlap} corrects parameters that replicas have trained on; policy={policy.value!r} with "
            f"average={average!r} needs the result of each merge at once; write policy='cadence', "
            "average='parameters', or leave overlap= out"
        )
    if averaging.opt_state != "local":
        raise ValueError(
            f"overlap={overlap} leaves each replica its moments, because a late correction makes them noisier, and "
            f"opt_state={averaging.opt_state!r} changes them at each merge; write opt_state='local', or leave it out"
        )
    if averaging.backend == "device":
        raise ValueError(
            f"overlap={overlap} merges on CPU devices, where no step waits for a merge, and backend='device' on those "
            "of the replicas; leave backend= out"
        )
    if averaging.scaling is not None:
        raise ValueError(f"overlap={overlap}: scaling= needs the noise of each merge at once; leave one of them out")
    if not all(type(placement) is DevicePlacement for placement in placements):
        raise ValueError(
            f"overlap={overlap} is for replicas of one device: the steps of sharded replicas and of stages have "
            "collectives of their own, and two in flight can deadlock; leave overlap= out"
        )
    busy = {device for placement in placements for device in placement.devices.flat}
    for process in range(jax.process_count()) if jax.process_count() > 1 and not virtual else ():
        own = sum(device.process_index == process for device in busy)
        free = sum(device.process_index == process and device not in busy for device in jax.devices("cpu"))
        if free < own:
            raise ValueError(
                f"overlap={overlap} merges on CPU devices that no replica trains on, and process {process} has {free} "
                f"of them for {own} replicas; write jax.config.update('jax_num_cpu_devices', {2 * own}) before "
                f"jaxche.initialize(), and replicas=jax.devices()[::2]"
            )


def can_overlap(averaging: Averaging, placements: Sequence[BatchPlacement], virtual: bool) -> bool:
    """Whether merges can run beside steps without slowing them down; the same in all processes."""
    try:
        cpus = set(jax.devices("cpu"))
        check_overlap(MOST_OVERLAP, averaging._replace(opt_state="local"), placements, virtual)
    except (RuntimeError, ValueError):  # the first one if JAX has no CPU devices
        return False
    # Replicas on the CPU share its cores with a merge.
    return virtual or cpus.isdisjoint(device for placement in placements for device in placement.devices.flat)


def checked_rows(rows: Any, joined_batches: Any, policy: ApplyPolicy, world_size: int, staged: bool) -> tuple[str, int]:
    """How rows are dealt out, and the number of batches joined in an update under ``sync``."""
    if joined_batches is not None and policy is not ApplyPolicy.SYNC:
        raise ValueError(
            f"joined_batches={joined_batches!r} is of policy='sync'; with policy={policy.value!r} leave it out"
        )
    if staged and (rows == "speed" or joined_batches is not None):
        raise ValueError(
            "rows='speed' and joined_batches= cut batches, and the stages of a jaxche.Partitioned take whole ones, in "
            "equal micro-batches; leave them out"
        )
    if rows is not None:
        one_of("rows", rows, ("speed", "equal"))
    if rows == "equal" and policy is ApplyPolicy.AUTO:
        raise ValueError(
            "rows='equal' takes whole batches, and policy='auto' chooses the rows of each replica; leave rows= out, or "
            "write policy='cadence', or policy='sync', with rows='equal'"
        )
    if joined_batches is not None:
        whole_number("joined_batches", joined_batches, 1, f"joined_batches={world_size}")
    default = "speed" if policy in (ApplyPolicy.SYNC, ApplyPolicy.AUTO) and not staged else "equal"
    return rows or default, world_size if joined_batches is None or world_size == 1 else int(joined_batches)


def check_outputs(outputs: Any, staged: bool, placements: Sequence[BatchPlacement]) -> None:
    """Refuse a value that cannot be called, and replicas whose outputs are not on one process."""
    if outputs is None:
        return
    if not callable(outputs):
        raise ValueError(
            f"outputs={brief(outputs)} is not a function; write outputs=lambda info, batches: kept.extend(batches)"
        )
    if staged:
        raise ValueError("outputs= are those of a loss function, and loss_fn is a jaxche.Partitioned; leave them out")
    if any(map(spans_processes, placements)):
        raise ValueError(
            "outputs= are given to the process of a replica, and here a replica spans several; leave outputs= out, or "
            "give each process replicas of its own"
        )


def check_whole_batches(policy: ApplyPolicy, rows: Any, joined: int, world_size: int) -> None:
    """Refuse arguments that move rows between processes, where each process reads its own stream."""
    given = {"policy='auto'": policy is ApplyPolicy.AUTO, "rows='speed'": rows == "speed"}
    given[f"joined_batches={joined}"] = joined != world_size
    for name, is_given in given.items():
        if is_given:
            raise ValueError(
                f"{name} deals out rows by speed, and with shards=True each process trains on its own batches; write "
                "rows='equal' and policy='sync' or policy='cadence', or jaxche.Stream(source, shards=False), "
                "with which every process reads all batches"
            )


def checked_max_rows(max_rows: Any, rows: str, world_size: int) -> list[float] | None:
    """The largest step of each replica in rows, or None."""
    if max_rows is None:
        return None
    given = _one_per_replica(max_rows, world_size)
    if len(given) != world_size:
        raise ValueError(f"max_rows={max_rows!r} must be one whole number, or {world_size}, one a replica")
    given = [whole_number("max_rows", n, 1, "max_rows=64") for n in given]
    if rows != "speed":
        raise ValueError(f"max_rows={max_rows!r} limits rows by speed, and here rows are equal; leave it out")
    return [float(n) for n in given]


def _name_of(callback: Any) -> str:
    name = getattr(callback, "__name__", "")
    return name if name.isidentifier() else "callback"


def check_flags(**flags: Any) -> None:
    """Refuse a text or an object as a flag, which would count as true."""
    for name, value in flags.items():
        if not isinstance(value, int | np.bool_ | None):
            raise ValueError(f"{name}={brief(value)} is neither True nor False; write {name}=True, or leave it out")


def checked_callbacks(callbacks: Any) -> list[Any]:
    """The callbacks, functions of ``(state, info)``."""
    if callable(callbacks) or not isinstance(callbacks, Iterable):
        name = _name_of(callbacks)
        raise ValueError(f"callbacks={brief(callbacks)} is not a list of functions; write callbacks=[{name}]")
    callbacks = list(callbacks)  # a generator can be read once
    for i, callback in enumerate(callbacks):
        if isinstance(callback, type):
            name = callback.__name__
            raise ValueError(f"callbacks[{i}]={name} is a class; write callbacks=[{name}()], with its arguments")
        if not callable(callback):
            raise ValueError(
                f"callbacks[{i}]={brief(callback)} is not a function; write def callback(state, info): ..., and "
                "callbacks=[callback]"
            )
        try:
            signature = inspect.signature(callback)
        except ValueError:  # of a builtin without one
            continue
        try:
            signature.bind(None, None)
        except TypeError:
            raise ValueError(
                f"callbacks[{i}] takes {signature}, and is called with the state and the RoundInfo of each round; "
                f"write def {_name_of(callback)}(state, info): ..."
            ) from None
    return callbacks


def check_scaling(rule: Any, base_batch_size: Any, opt_state: str) -> None:
    """Refuse invalid scaling of the learning rate."""
    if rule is None:
        if base_batch_size is not None:
            raise ValueError(
                f"base_batch_size={base_batch_size!r} has nothing to act on without a rule; write e.g. "
                f"scaling=jaxche.AdaScale(), base_batch_size={base_batch_size!r}"
            )
        return
    if isinstance(rule, type) or not hasattr(rule, "lr_factor"):
        raise ValueError(f"scaling={rule!r} is not a scaling rule; write e.g. scaling=jaxche.AdaScale()")
    size = base_batch_size
    if size is not None and not (_is_number(size) and math.isfinite(size) and size > 0):
        raise ValueError(
            f"base_batch_size={size!r} must be the examples of the batch the learning rate was tuned for, e.g. "
            "base_batch_size=32; leave it out for those of one batch of the data"
        )
    if isinstance(rule, AdamScale) and opt_state == "reset":
        raise ValueError(
            "opt_state='reset' leaves no second moments for scaling=jaxche.AdamScale() to read; write "
            "opt_state='local' or scaling=jaxche.AdaScale()"
        )


def check_metrics_of_model(loss_fn: Any) -> None:
    """Warn of nnx metrics in a model that several replicas train."""
    if names := getattr(loss_fn, "metric_names", ()):
        warnings.warn(
            f"the model holds nnx metrics, {brief(names)}, and replicas do not add them up: a merge takes the mean of "
            'totals, and leaves counts. Return the numbers from loss_fn, return loss, {"accuracy": accuracy}, and the '
            "history has their means",
            stacklevel=4,
        )


def warn_of_unused_model_state(loss_fn: Any, model_state: Any) -> None:
    """Log that no step reads or changes the model state, because the loss function does not take it."""
    if jax.tree.leaves(model_state) and "model_state" not in wanted_names(
        loss_fn, "params, batch", (*RNG_NAMES, "model_state")
    ):
        _log.warning(
            "trainer.init got model_state=, and loss_fn does not take it: training neither reads nor changes it. Write "
            "def loss_fn(params, batch, model_state), which returns (loss, (metrics, new_model_state)); for a linen "
            "module jaxche.linen_loss(module, loss_fn) does that"
        )


def check_model_state(given: Any, returned: Any) -> None:
    """Refuse a model state that a loss returns with other entries, shapes or dtypes than those that it gets."""

    def entries(tree: Any) -> dict[str, str]:
        named = jax.tree.leaves_with_path(tree)
        return {jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in named}

    before, after = entries(given), entries(returned)
    unlike = [name for name in before | after if before.get(name) != after.get(name)]
    if unlike:
        name = unlike[0]
        sown = (
            ". Values that a module sows are no model state: with linen leave their collection out of it, and write "
            'output, sown = apply(x, mutable=["losses"]); with nnx write nnx.pop(model, nnx.Intermediate) in loss_fn'
        )
        raise ValueError(
            f"the loss returned a model_state unlike the one it got: model_state{name} is "
            f"{after.get(name, 'missing')}, and was {before.get(name, 'missing')}, one of {len(unlike)} such entries; "
            "return every entry of model_state, updated or not, with its shape and dtype"
            f"{sown if set(after) - set(before) else ''}"
        )
    if jax.tree.structure(given) != jax.tree.structure(returned):
        raise ValueError(
            "the loss returned a model_state unlike the one it got: the tree is "
            f"{brief(jax.tree.structure(returned))} instead of {brief(jax.tree.structure(given))}; return the same tree"
        )


def check_arrays(name: str, tree: Any, write: str) -> None:
    """Refuse a leaf that JAX cannot take as an array."""
    for path, leaf in jax.tree.leaves_with_path(tree):
        if isinstance(leaf, bool | int | float | complex):
            continue
        with contextlib.suppress(AttributeError, TypeError):
            _ = leaf.shape, jnp.result_type(leaf)
            continue
        raise ValueError(f"{name}{jax.tree_util.keystr(path)} is {brief(leaf)}, not an array of numbers; {write}")


def check_bits(trees: Mapping[str, Any], placements: Iterable[BatchPlacement]) -> None:
    """Refuse arrays of less than a byte a number on CPU devices, whose layout JAX's compiled programs refuse."""
    if all(device.platform != "cpu" for placement in placements for device in placement.devices.flat):
        return
    for name, tree in trees.items():
        for path, leaf in jax.tree.leaves_with_path(tree):
            dtype = getattr(leaf, "dtype", None)
            if dtype is None or not jnp.issubdtype(dtype, np.number):
                continue
            kinds = (jnp.finfo, jnp.float8_e4m3fn) if jnp.issubdtype(dtype, jnp.inexact) else (jnp.iinfo, jnp.int8)
            if kinds[0](dtype).bits < 8:
                raise ValueError(
                    f"{name}{jax.tree_util.keystr(path)} is {dtype}, and JAX's compiled programs refuse such an array "
                    f"on a CPU device; give x.astype(jnp.{kinds[1].__name__}), which has the same numbers"
                )
