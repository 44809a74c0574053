"""An all-gather of JSON values over the coordination service of JAX, before there is a group."""

from __future__ import annotations

import json
import time
from typing import Any

from jax._src import distributed as _jax_distributed

from jaxche.distributed import numbered
from jaxche.messages import format_ranks


def all_gather(name: str, value: Any, timeout_s: float, replacement: bool = False) -> list[Any]:
    """Gather JSON of all processes, once per name; a ``replacement`` of a dead one reads and does not wait."""
    state: Any = _jax_distributed.global_state
    client, process_id = state.client, state.process_id
    key, wait_ms = f"jaxche/share/{name}", max(1, int(1e3 * timeout_s))
    deadline = time.monotonic() + timeout_s
    if replacement:
        return [own for _, own in sorted((_values(client, key) | {process_id: value}).items())]
    client.key_value_set(f"{key}/{process_id}", json.dumps(value))
    try:
        # One barrier and one read of the directory. A read of each key takes 10⁸ messages with 10,000 processes.
        client.wait_at_barrier(key, wait_ms)
    except Exception:  # jaxlib's errors have no common class
        missing = sorted(set(range(state.num_processes)) - _values(client, key).keys())
        if missing and time.monotonic() >= deadline - 1:
            raise TimeoutError(
                f"process {format_ranks(missing)} joined, but sent nothing for {name!r} within {timeout_s:.0f} s"
            ) from None
        raise
    values = _values(client, key)
    # Process 0 runs the service, so it must not exit before all have read.
    client.wait_at_barrier(f"{key}/read", wait_ms)
    return [values[rank] for rank in sorted(values)]


def _values(client: Any, key: str) -> dict[int, Any]:
    return {process: json.loads(text) for process, text in numbered(client, f"{key}/").items()}
