"""CPU devices for tests and notebooks."""

from __future__ import annotations

from typing import Any

import jax


def fake_devices(count: int) -> list[Any]:
    """Splits the processor into CPU devices, for notebooks, tests and plans.

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
    if isinstance(count, bool) or int(count) != count or count < 1:
        raise ValueError(f"count={count!r} must be a whole number of at least 1, e.g. jaxche.fake_devices(8)")
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", int(count))
    except RuntimeError:  # JAX has started, perhaps with these devices
        pass
    found = jax.devices()
    if len(found) != count or found[0].platform != "cpu":
        raise RuntimeError(
            f"JAX has already started with {len(found)} {found[0].platform} device(s), and {count} CPU devices are "
            f"needed; restart the kernel (or Python) and call jaxche.fake_devices({count}) before the first array"
        )
    return found
