"""What each process of a run says, told to all of them over the service where they met."""

from __future__ import annotations

import time
from typing import Any

from jax._src import distributed as _jax_distributed

from jaxche.cluster._output import listed


def share(
    name: str, process_id: int, num_processes: int, text: str, timeout_s: float, client: Any = None, late: bool = False
) -> list[str]:
    """What every process says under a name, in order; every process has to call it, once a name.

    Args:
      name: under which it is said; a new one each time.
      process_id: of this process.
      num_processes: how many this process expects.
      text: what it says.
      timeout_s: seconds to wait for the others.
      client: of JAX's coordination service; by default that of the run that was joined.
      late: takes the place of one that said this before: it hears what was said then, and nobody waits for it.

    Returns:
      What each said, by number of the process; only the text given where no run was joined.

    Raises:
      TimeoutError: if a process said nothing; names it.

    Example:
      >>> share("hosts", 0, 1, "node1", timeout_s=60)
      ['node1']
    """
    client = client or _jax_distributed.global_state.client
    if client is None:
        return [text]
    place, wait_ms = f"jaxche/share/{name}", max(1, int(1e3 * timeout_s))
    deadline = time.monotonic() + timeout_s
    if late:
        return [told for _, told in sorted((_said(client, place) | {process_id: text}).items())]
    client.key_value_set(f"{place}/{process_id}", text)
    try:
        # One barrier and one reading: waiting for each key in turn would cost 10,000 processes 10⁸ messages.
        client.wait_at_barrier(place, wait_ms)
        failed = None
    except Exception as error:  # jaxlib's errors share no class of their own
        failed = error
    told = _said(client, place)
    missing = [rank for rank in range(num_processes) if rank not in told]
    if failed is not None and missing and time.monotonic() >= deadline - 1:
        raise TimeoutError(
            f"process {listed(missing)} joined, but did not say within {timeout_s:.0f} s what it has under {name!r}"
        ) from None
    if failed is not None:
        raise failed
    # Nobody leaves, and process 0 takes the service with it, before all have heard.
    client.wait_at_barrier(f"{place}/heard", wait_ms)
    return [told[rank] for rank in sorted(told)]


def _said(client: Any, place: str) -> dict[int, str]:
    return {int(key.rpartition("/")[2]): text for key, text in client.key_value_dir_get(f"{place}/")}
