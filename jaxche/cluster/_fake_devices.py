"""CPU devices for tests and notebooks."""

from __future__ import annotations

from typing import Any

import jax

from jaxche.messages import whole_number


def fake_devices(count: int) -> list[Any]:
    """Split the processor into CPU devices, for notebooks, tests and plans.

    They share one processor, so they test correctness and not speed. With ``pace_ms=`` the trainer makes them act as
    devices of different speeds.

    Args:
      count: number of devices.

    Returns:
      The devices. JAX uses only these from now on, also on a machine with GPUs.

    Raises:
      ValueError: ``count`` is below 1.
      RuntimeError: JAX has already started, with other devices.

    Example:
      >>> import jaxche
      >>> len(jaxche.fake_devices(8))
      8
    """
    count = whole_number("count", count, 1, "jaxche.fake_devices(8)")
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # JAX has started, perhaps with these devices
        pass
    found = jax.devices()
    if len(found) != count or found[0].platform != "cpu":
        raise RuntimeError(
            f"JAX has already started with {len(found)} {found[0].platform} device(s), and {count} CPU devices are "
            f"needed; restart the kernel (or Python) and call jaxche.fake_devices({count}) before the first array"
        )
    return found
