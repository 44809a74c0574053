"""What a partitioned model is given, refused by name before anything is computed or sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jaxche.averaging import is_float
from jaxche.sharding import Device, collections_of, local_devices
from jaxche.stages._schedule import SCHEDULES


def check_micro_batching(micro_batch_size: Any, schedule: Any) -> None:
    """Refuse micro-batches of no size and unknown schedules."""
    size = micro_batch_size
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
        raise ValueError(
            f"micro_batch_size={size!r} must be a whole number of examples, at least 1; write e.g. micro_batch_size=8"
        )
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r} is unknown; write one of {', '.join(map(repr, SCHEDULES))}")


def check_timeout(timeout_s: Any) -> None:
    """Refuse to wait for no time at all."""
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not timeout_s > 0:
        raise ValueError(f"timeout_s={timeout_s!r} must be positive seconds; write timeout_s=300")


def check_cut(size: int, examples: int) -> None:
    """Refuse a batch that micro-batches do not divide."""
    if examples % size:
        best = next(n for n in range(min(size, examples), 0, -1) if examples % n == 0)
        raise ValueError(
            f"micro_batch_size={size} does not divide the batch of {examples} examples; "
            f"write e.g. micro_batch_size={best}"
        )


def check_protocol(protocol: Any) -> None:
    """Refuse what is no protocol."""
    if isinstance(protocol, type) or not all(hasattr(protocol, n) for n in ("wire", "micro_batch_size", "schedule")):
        raise ValueError(
            f"protocol={protocol!r} is not a protocol; write protocol=jaxche.Direct(), "
            "jaxche.Pipeline(micro_batch_size=8) or jaxche.DataStore('/shared/run')"
        )


def checked_stages(local_stages: Sequence[int] | None, n_stages: int) -> tuple[int, ...]:
    """The stages of this process, ascending."""
    if local_stages is None:
        return tuple(range(n_stages))
    local = tuple(sorted(int(i) for i in local_stages))
    if not local or len(set(local)) != len(local) or local[0] < 0 or local[-1] >= n_stages:
        raise ValueError(
            f"local_stages={list(local_stages)!r} must be different numbers from 0 to {n_stages - 1}, at least one; "
            "write e.g. local_stages=[jax.process_index()]"
        )
    return local


def checked_devices(devices: Sequence[Device] | None, local: Sequence[int], n_stages: int) -> tuple[Device | None, ...]:
    """One entry a stage: its device, or None for a stage of another process."""
    have = local_devices() if devices is None else list(devices)
    if any(not isinstance(device, jax.Device) for device in have):
        raise ValueError(f"devices={devices!r} must be devices, e.g. devices=jax.devices()")
    if devices is not None and len(have) == n_stages:
        have = [have[stage] for stage in local]
    if len(have) < len(local):
        raise ValueError(
            f"{len(local)} stages need {len(local)} devices, but there "
            f"{'is' if len(have) == 1 else 'are'} {len(have)}; to put several stages on one device write "
            f"devices=[jax.local_devices()[0]] * {n_stages}"
        )
    placed: list[Device | None] = [None] * n_stages
    for stage, device in zip(local, have, strict=False):
        if device.process_index != jax.process_index():
            raise ValueError(
                f"devices: {device} of stage {stage} belongs to process {device.process_index}, this is process "
                f"{jax.process_index()}; give the stages of this process devices of jax.local_devices()"
            )
        placed[stage] = device
    return tuple(placed)


def check_stage_params(params: Any, n_stages: int) -> None:
    """Refuse parameters that are not one entry a stage, or not float.

    Args:
      params: what was given as such.
      n_stages: how many stages there are.

    Raises:
      ValueError: another number of entries, or a leaf that is not float, by its name.

    Example:
      >>> import jax.numpy as jnp
      >>> check_stage_params([jnp.zeros(2)], n_stages=2)
      Traceback (most recent call last):
      ValueError: params: 1 entries for 2 stages; give a list with the parameters of each stage
    """
    if not isinstance(params, (list, tuple)) or len(params) != n_stages:
        got = f"{len(params)} entries" if isinstance(params, (list, tuple)) else type(params).__name__
        raise ValueError(f"params: {got} for {n_stages} stages; give a list with the parameters of each stage")
    for stage, tree in enumerate(params):
        if others := collections_of(tree):
            raise ValueError(
                f"params[{stage}] is a whole dict of variables, {', '.join(map(repr, tree))}, and the optimizer would "
                f'train all; give variables["params"], and keep {others[0]} in the stage function'
            )
        for path, leaf in jax.tree.leaves_with_path(tree):
            if not is_float(leaf):
                name = f"params[{stage}]{jax.tree_util.keystr(path)}"
                kind = getattr(leaf, "dtype", type(leaf).__name__)
                raise ValueError(f"{name} is {kind}, not float; keep what is not trained in the stage function")
