"""What a replica's round needs of each of its devices."""

from __future__ import annotations

from typing import Any

from jaxche.sharding import nbytes_per_device


def round_memory(local: Any, executable: Any, in_flight: int) -> dict[str, int]:
    """Bytes a device holds at the fullest point of a replica's local steps.

    A round keeps the state it was given and works on a copy, so that what goes wrong in it costs nothing.

    Args:
      local: what the replica keeps between rounds: arrays on its devices.
      executable: its compiled step, ``step(start, carry, batch)``.
      in_flight: steps dispatched ahead, each with its batch.

    Returns:
      Bytes by what they are for, and ``"in all"``; without the buffers of the merge itself.
    """
    # What a step reads of the start of the round is what is kept; only the carry is more.
    (_, carry, batch), (_, carried, fed) = executable.args_info[0], executable.input_shardings[0]
    parts = {
        "parameters": nbytes_per_device(local.params),
        "optimizer state": nbytes_per_device(local.opt_state),
        "model state": nbytes_per_device((local.model_state, local.outer_state, local.noise, local.progress)),
        "working copy": nbytes_per_device(carry, carried),
        # In a tuple: of a batch that is one array and that the loss does not read, ``fed`` is None.
        f"{in_flight} batches ahead": in_flight * nbytes_per_device((batch,), (fed,)),
        "activations, gradients": executable.memory_analysis().temp_size_in_bytes,
    }
    return parts | {"in all": sum(parts.values())}
