"""The checks of `jaxche doctor` for one process, but not its devices."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
import tempfile
import time
from collections.abc import Mapping
from typing import NamedTuple

import jaxche

_PREFIXES = ("JAX_", "JAXCHE_", "XLA_", "NCCL_", "CUDA_", "LIBTPU_", "TPU_")
_STORE_BYTES = 8 * 1024 * 1024


class Finding(NamedTuple):
    """The result of one check; a problem if it has a ``fix``, the line to write."""

    name: str
    text: str
    fix: str = ""


def versions() -> Finding:
    """Versions of the packages; the CUDA plugin must fit jaxlib."""
    found = jaxche.cluster.versions() | {"python": platform.python_version()}
    text = ", ".join(f"{package} {version}" for package, version in found.items())
    for cuda in (12, 13):
        try:
            plugin = importlib.metadata.version(f"jax-cuda{cuda}-plugin")
        except importlib.metadata.PackageNotFoundError:
            continue
        text += f", jax-cuda{cuda}-plugin {plugin}"
        if plugin != found["jaxlib"]:
            return Finding("versions", text, f"pip install 'jax[cuda{cuda}]=={found['jax']}'")
    return Finding("versions", text)


def machine() -> Finding:
    """Name, cores and memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    text = f"{socket.gethostname()}, {platform.system()} {platform.machine()}, {cores} core(s) for this process"
    free = free_memory_gib()
    return Finding("machine", text + (f", {free:.1f} GiB of memory free" if free else ""))


def free_memory_gib() -> float | None:
    """Available memory of this machine; None where the system has no such number (macOS)."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            lines = dict(line.split(":") for line in file)
        return int(lines["MemAvailable"].split()[0]) / 2**20
    except (OSError, KeyError):
        return None


def variables(environ: Mapping[str, str]) -> Finding:
    """Environment variables that change what JAX does."""
    found = [f"{name}={environ[name]}" for name in sorted(environ) if name.startswith(_PREFIXES)]
    return Finding("variables", "  ".join(found) or "none that JAX reads")


def allocation(environ: Mapping[str, str]) -> Finding:
    """Whether a process keeps the memory of its steps."""
    if platform.libc_ver()[0] != "glibc":
        return Finding("memory", "the C library decides whether processes keep it")
    name = jaxche.cluster.TUNABLES
    current = environ.get(name, "")
    if jaxche.cluster.with_tunables(current) == current:
        return Finding("memory", f"kept or returned as {name} says")
    text = f"returned to Linux after each step, which takes longer on a CPU; jaxche launch keeps it by {name}"
    return Finding("memory", f"{text}; for other processes: export {name}={jaxche.cluster.with_tunables('')}")


def proxies(environ: Mapping[str, str]) -> Finding:
    """Names of proxy variables; their values may contain passwords."""
    found = [name for name in sorted(environ) if name.lower() in jaxche.cluster.PROXIES]
    if not found:
        return Finding("proxies", "none")
    return Finding(
        "proxies",
        f"{', '.join(found)}: jaxche.initialize() bypasses them (no_proxy, no_grpc_proxy); jax.distributed alone "
        "can hang",
    )


def ports() -> Finding:
    """Whether this machine can open a port and connect to it by its host name."""
    from jaxche.distributed import is_loopback

    host = socket.gethostname()
    try:
        # IPv4 if there is any: its number is the smallest.
        family, *_, place = min(socket.getaddrinfo(host, None), key=lambda found: found[0])
        address = str(place[0])
        with socket.create_server((address, 0), family=family) as server:
            socket.create_connection(server.getsockname()[:2], timeout=3.0).close()
    except OSError as error:
        return Finding(
            "ports",
            f"this machine cannot reach itself as {host!r} ({error}), which Slurm gives as its address",
            f"a line in /etc/hosts: <address of this machine> {host}",
        )
    known = " (on this machine alone)" if is_loopback(address) else ""
    return Finding("ports", f"open; {host} is {address}{known}")


def compilation() -> Finding:
    """Compare a compiled gradient on each device with NumPy."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    x = np.linspace(-1, 1, 64 * 64, dtype=np.float32).reshape(64, 64)
    expected = x.T @ (1 - np.tanh(x @ x) ** 2)
    gradient = jax.jit(jax.grad(lambda w, x: jnp.tanh(x @ w).sum()))
    began = time.perf_counter()
    devices = jaxche.sharding.local_devices()
    for device in devices:
        # Loose, because matrix units may round to few bits.
        if not np.allclose(gradient(*jax.device_put((x, x), device)), expected, atol=0.3, rtol=0.05):
            return Finding(
                "compile", f"a gradient on {device} is wrong", f"leave {device} out: CUDA_VISIBLE_DEVICES=..."
            )
    seconds = time.perf_counter() - began
    return Finding("compile", f"a gradient is right on each of {len(devices)} device(s), {seconds:.1f} s")


def cache() -> Finding:
    """Whether there is a compilation cache, and whether it is writable."""
    import jax

    folder = jax.config.values["jax_compilation_cache_dir"]
    if not folder:
        return Finding(
            "cache", "none: every start compiles again; JAX_COMPILATION_CACHE_DIR=~/.cache/jax keeps programs"
        )
    if "://" in folder:
        return Finding("cache", folder)
    try:
        os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return Finding(
            "cache", f"{folder} cannot be written: {error.strerror}", "JAX_COMPILATION_CACHE_DIR=~/.cache/jax"
        )
    return Finding("cache", f"{folder}, writable")


def store(url: str) -> Finding:
    """Whether ``DataStore`` can use a store, and how fast it is."""
    try:
        (put, get), (big_put, big_get) = jaxche.stages.probe(url, {}, "jaxche-doctor", (4 * 1024, _STORE_BYTES))
    except ImportError:
        return Finding("store", "obstore or xxhash is not installed", "pip install 'jaxche[store]'")
    except (OSError, ValueError) as error:
        return Finding("store", str(error), "check the URL and credentials")
    return Finding(
        "store",
        f"{url}: 4 KiB written in {1e3 * put:.1f} ms, read in {1e3 * get:.1f} ms; "
        f"8 MiB at {_STORE_BYTES / big_put / 1e6:.0f} and {_STORE_BYTES / big_get / 1e6:.0f} MB/s",
    )
