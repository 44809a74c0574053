"""The memory of a round on a device, and the rows of a step for which there is memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jaxche.replicas._placement import BatchPlacement
from jaxche.replicas._programs import LocalState
from jaxche.sharding import nbytes_per_device

# The share of a device's memory that larger steps may fill: the merge needs some, and memory breaks into pieces.
_MEMORY_SHARE = 0.8


class RoundMemory(NamedTuple):
    """Peak bytes on a device in the local steps of a round, without the merge."""

    rows: int  # of a step
    fixed: int
    of_rows: int  # in proportion to the rows
    by_purpose: dict[str, int]  # all of them, and "in all"


def round_memory(local: LocalState, executable: Any, rows: int, in_flight: int, takes: Sequence[str]) -> RoundMemory:
    """The memory of a round on a copy of the state, but for the trees that it takes, with ``in_flight`` batches."""
    start, carry, batch = executable.args_info[0]
    _, carry_shardings, batch_shardings = executable.input_shardings[0]
    carry, carry_shardings = (one._replace(**dict.fromkeys(takes)) for one in (carry, carry_shardings))
    # Whole on each device. The other constants are arrays of the local state.
    frozen = sum(math.prod(x.shape) * x.dtype.itemsize for x in start.frozen)
    fixed = {
        "parameters": nbytes_per_device(local.params),
        "optimizer state": nbytes_per_device(local.opt_state),
        "model state": nbytes_per_device(local._replace(params=None, opt_state=None, residual=None, ema=None)),
        **({"moving average": nbytes_per_device(local.ema)} if local.ema is not None else {}),
        **({"unsent changes": nbytes_per_device(local.residual)} if local.residual is not None else {}),
        **({"frozen arrays": frozen} if frozen else {}),
        "working copy": nbytes_per_device(carry, carry_shardings),
    }
    of_rows = {
        # In a tuple: for a batch of one array that the loss does not read, the sharding is None.
        f"{in_flight} batches ahead": in_flight * nbytes_per_device((batch,), (batch_shardings,)),
        "activations, gradients": executable.memory_analysis().temp_size_in_bytes,
    }
    sizes = sum(fixed.values()), sum(of_rows.values())
    return RoundMemory(rows, *sizes, fixed | of_rows | {"in all": sum(sizes)})


def row_limit(memory: RoundMemory, placement: BatchPlacement) -> float:
    """The most rows of a step for which devices have memory; infinite if theirs is not known."""
    here = [device for device in placement.devices.flat if device.process_index == jax.process_index()]
    limits = [(device.memory_stats() or {}).get("bytes_limit", math.inf) for device in here]
    return max(float(memory.rows), memory.rows * (_MEMORY_SHARE * min(limits) - memory.fixed) / max(memory.of_rows, 1))
