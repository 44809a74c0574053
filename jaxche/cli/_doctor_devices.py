"""The checks of `jaxche doctor` for the devices of JAX: they start, and they are those of the driver."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator

from jaxche.cli._doctor_checks import Finding
from jaxche.cli._nvidia import install_line


@contextlib.contextmanager
def plugin_errors() -> Iterator[list[str]]:
    """Collect the errors of JAX's plugins while its devices start, which JAX logs with tracebacks."""
    errors: list[str] = []

    def collect(record: logging.LogRecord) -> bool:
        if not record.exc_info or "plugin" not in record.getMessage():
            return True
        errors.append((str(record.exc_info[1]).splitlines() or [record.getMessage()])[0])
        return False

    log = logging.getLogger("jax._src.xla_bridge")
    log.addFilter(collect)
    try:
        yield errors
    finally:
        log.removeFilter(collect)


def start_devices(timeout_s: float) -> bool:
    """Whether JAX's devices start, or fail to start, before the timeout; a driver may hang."""
    thread = threading.Thread(target=_start, name="jaxche-devices", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return not thread.is_alive()


def _start() -> None:
    from jaxche.sharding import local_devices

    with contextlib.suppress(RuntimeError):  # device_finding() reports it
        local_devices()


def not_started(timeout_s: float) -> Finding:
    """The finding for devices that did not start."""
    return Finding(
        "devices",
        f"JAX has not started them in {timeout_s:g} s; the driver hangs, or another process uses them",
        "JAX_PLATFORMS=cpu jaxche doctor, and look at nvidia-smi",
    )


def device_finding() -> Finding:
    """The devices of JAX, compared with those of the driver."""
    from jaxche.cluster import default_gpus, has_cuda
    from jaxche.sharding import local_devices

    try:
        local = local_devices()
    except RuntimeError as error:
        return Finding(
            "devices", f"JAX does not start: {str(error).splitlines()[0]}", "JAX_PLATFORMS=cpu jaxche doctor"
        )
    kinds = [device.device_kind for device in local]
    text = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
    limits = [(device.memory_stats() or {}).get("bytes_limit", 0) for device in local]
    if all(limits):
        text += f", {min(limits) / 2**30:.1f} GiB each"
    gpus = len(default_gpus(os.environ))
    if gpus and local[0].platform != "gpu":
        what = "and cannot use them" if has_cuda() else "but JAX is installed without CUDA"
        fix = "JAX_PLATFORMS=cuda jaxche doctor, which shows the error of JAX" if has_cuda() else install_line()
        return Finding("devices", f"{text}; the driver shows {gpus} GPU(s), {what}", fix)
    return Finding("devices", text)
