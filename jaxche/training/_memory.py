"""What a replica's round needs of each of its devices."""

from __future__ import annotations

import math
from typing import Any

import jax


def round_memory(local: Any, executable: Any, batch_key: Any, in_flight: int) -> dict[str, int]:
    """Bytes a device holds at the fullest point of a replica's local steps.

    A round keeps the state it was given and works on a copy, so that what goes wrong in it costs nothing.

    Args:
      local: what the replica keeps between rounds: arrays on its devices.
      executable: its compiled step.
      batch_key: shapes and dtypes of the arrays of a batch.
      in_flight: steps dispatched ahead, each with its batch.

    Returns:
      Bytes by what they are for, and ``"in all"``; without the buffers of the merge itself.
    """
    analysis = executable.memory_analysis()
    batch = sum(math.prod(shape) * dtype.itemsize for shape, dtype in batch_key)
    kept = {
        "parameters": _bytes_per_device(local.params),
        "optimizer state": _bytes_per_device(local.opt_state),
        "model state": _bytes_per_device((local.model_state, local.outer_state, local.noise, local.progress)),
    }
    parts = kept | {
        "working copy": max(analysis.argument_size_in_bytes - batch, 0),
        f"{in_flight} batches ahead": in_flight * batch,
        "activations, gradients": analysis.temp_size_in_bytes,
    }
    return parts | {"in all": sum(parts.values())}


def _bytes_per_device(tree: Any) -> int:
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))
