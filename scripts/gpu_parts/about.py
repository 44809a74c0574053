"""Prints the machine and the versions of a run as JSON: one process that starts the devices and ends."""

from __future__ import annotations

import json
import os
import platform

import jax

from jaxche.cli import _doctor_checks as checks
from jaxche.cli import _doctor_devices as device_checks
from jaxche.cluster import versions


def main() -> None:
    """Device, memory, cores, versions, and what `jaxche doctor` finds about driver and CUDA."""
    with device_checks.plugin_errors() as errors:
        devices = jax.devices()
    findings = [checks.versions(), *device_checks.gpu_findings(os.environ, errors), device_checks.device_finding()]
    memory = (devices[0].memory_stats() or {}).get("bytes_limit")
    found = {
        "platform": devices[0].platform,
        "device": devices[0].device_kind,
        "devices": len(devices),
        "memory_gib": memory and round(memory / 2**30, 1),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "host_memory_gib": round(checks.free_memory_gib() or 0, 1),
        "versions": versions() | {"python": platform.python_version()},
        "checks": [finding._asdict() for finding in findings],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
