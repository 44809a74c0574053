"""Checks of one process's surroundings: each says what it found and, where something is wrong, what to write."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxche.cluster import PROXIES
from jaxche.cluster import versions as package_versions
from jaxche.sharding import local_devices

_PREFIXES = ("JAX_", "JAXCHE_", "XLA_", "NCCL_", "CUDA_", "LIBTPU_", "TPU_")
_STORE_SIZES = (4 * 1024, 8 * 1024 * 1024)


class Finding(NamedTuple):
    """One line of the report. ``mend`` says what to write; a finding with it is a problem."""

    name: str
    text: str
    mend: str = ""


def versions() -> Finding:
    """Of all that a run depends on; the CUDA plugin has to fit jaxlib."""
    found = package_versions() | {"python": platform.python_version()}
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
    """What this machine could still give, or None where it does not say (macOS)."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            lines = dict(line.split(":") for line in file)
        return int(lines["MemAvailable"].split()[0]) / 2**20
    except (OSError, KeyError):
        return None


def start_devices(timeout_s: float) -> bool:
    """Whether JAX's devices start, or fail to, in so many seconds; a driver that hangs lets them do neither."""
    thread = threading.Thread(target=_start, name="jaxche-devices", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return not thread.is_alive()


def _start() -> None:
    with contextlib.suppress(RuntimeError):  # said by devices()
        local_devices()


def hung(timeout_s: float) -> Finding:
    """Of devices that did not start."""
    return Finding(
        "devices",
        f"JAX has not started them in {timeout_s:g} s; does the driver hang, or another process hold them?",
        "JAX_PLATFORMS=cpu jaxche doctor, and look at nvidia-smi",
    )


def devices() -> Finding:
    """What JAX found, against what the driver shows."""
    from jaxche.cluster import count_gpus, has_cuda

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
    wanted = os.environ.get("JAX_PLATFORMS", "").lower()
    gpus = count_gpus() if not wanted or "cuda" in wanted or "gpu" in wanted else 0
    if gpus and local[0].platform != "gpu":
        what = "and cannot use them" if has_cuda() else "but JAX is installed without CUDA"
        mend = "nvidia-smi, and compare its CUDA version" if has_cuda() else "pip install 'jaxche[cuda13]' (or cuda12)"
        return Finding("devices", f"{text}; the driver shows {gpus} GPU(s), {what}", mend)
    return Finding("devices", text)


def variables(environ: Mapping[str, str]) -> Finding:
    """Those set that change what JAX does."""
    found = [f"{name}={environ[name]}" for name in sorted(environ) if name.startswith(_PREFIXES)]
    return Finding("variables", "  ".join(found) or "none that JAX reads")


def proxies(environ: Mapping[str, str]) -> Finding:
    """Named without their values, which may hold passwords."""
    found = [name for name in sorted(environ) if name.lower() in PROXIES]
    if not found:
        return Finding("proxies", "none")
    return Finding(
        "proxies",
        f"{', '.join(found)}: jaxche.initialize() goes round them (no_proxy, no_grpc_proxy); jax.distributed alone "
        "can hang",
    )


def ports() -> Finding:
    """Whether a port can be opened and reached under this machine's name."""
    host = socket.gethostname()
    try:
        address = socket.gethostbyname(host)
        with socket.create_server((address, 0)) as server:
            socket.create_connection(server.getsockname(), timeout=3.0).close()
    except OSError as error:
        return Finding(
            "ports",
            f"this machine cannot reach itself as {host!r} ({error}), which Slurm gives as its address",
            f"a line in /etc/hosts: <address of this machine> {host}",
        )
    known = " (on this machine alone)" if address.startswith("127.") else ""
    return Finding("ports", f"open; {host} is {address}{known}")


def compilation() -> Finding:
    """A gradient, compiled and run on each device, compared with NumPy."""
    import jax
    import jax.numpy as jnp

    x = np.linspace(-1, 1, 64 * 64, dtype=np.float32).reshape(64, 64)
    expected = x.T @ (1 - np.tanh(x @ x) ** 2)
    gradient = jax.jit(jax.grad(lambda w, x: jnp.tanh(x @ w).sum()))
    began = time.perf_counter()
    for device in local_devices():
        # Matrix units round to few bits; a broken device is off by far more.
        if not np.allclose(gradient(*jax.device_put((x, x), device)), expected, atol=0.3, rtol=0.05):
            return Finding(
                "compile", f"a gradient on {device} is wrong", f"leave {device} out: CUDA_VISIBLE_DEVICES=..."
            )
    seconds = time.perf_counter() - began
    return Finding("compile", f"a gradient is right on each of {len(local_devices())} device(s), {seconds:.1f} s")


def cache() -> Finding:
    """Whether compiled programs are kept, and can be."""
    import jax

    folder = jax.config.values["jax_compilation_cache_dir"]
    if not folder:
        return Finding(
            "cache", "none: every start compiles anew; JAX_COMPILATION_CACHE_DIR=~/.cache/jax keeps programs"
        )
    if "://" in folder:
        return Finding("cache", folder)
    try:
        os.makedirs(folder, exist_ok=True)
        probe = os.path.join(folder, f".jaxche-doctor-{os.getpid()}")
        with open(probe, "w", encoding="ascii"):
            pass
        os.remove(probe)
    except OSError as error:
        return Finding(
            "cache", f"{folder} cannot be written: {error.strerror}", "JAX_COMPILATION_CACHE_DIR=~/.cache/jax"
        )
    return Finding("cache", f"{folder}, writable")


def store(url: str) -> Finding:
    """Puts, reads back, puts where something is, and deletes, in a store of any kind that obstore knows."""
    try:
        import obstore
        from obstore.exceptions import AlreadyExistsError, BaseError
    except ImportError:
        return Finding("store", "obstore is not installed", "pip install 'jaxche[store]'")
    key = f"jaxche-doctor-{socket.gethostname()}-{os.getpid()}"
    tried, times, place = "opening", [], None
    try:
        place = _open(url)
        for size in _STORE_SIZES:
            data = np.random.default_rng(0).bytes(size)
            tried, began = f"writing {key}", time.perf_counter()
            obstore.put(place, key, data)
            tried, written = f"reading {key}", time.perf_counter()
            if bytes(obstore.get(place, key).bytes()) != data:
                raise OSError("other bytes came back")
            times.append((size, written - began, time.perf_counter() - written))
        tried, conditional = "a conditional write", False
        try:
            obstore.put(place, key, b"", mode="create")
        except AlreadyExistsError:
            conditional = True
        tried = f"deleting {key}"
        obstore.delete(place, key)
        place = None
    except (BaseError, OSError, ValueError, NotImplementedError) as error:
        return Finding("store", f"{url}: {tried} failed: {str(error).splitlines()[0]}", "check the URL and credentials")
    finally:
        if place is not None:
            with contextlib.suppress(BaseError, OSError):  # it may not be there, and what failed is said
                obstore.delete(place, key)
    (_, put, get), (size, big_put, big_get) = times
    text = (
        f"{url}: 4 KiB written in {1e3 * put:.1f} ms, read in {1e3 * get:.1f} ms; "
        f"8 MiB at {size / big_put / 1e6:.0f} and {size / big_get / 1e6:.0f} MB/s"
    )
    if not conditional:
        return Finding(
            "store", f"{text}; it ignores conditional writes", "choose one with conditional writes (S3, GCS)"
        )
    return Finding("store", text)


def _open(url: str) -> Any:
    from obstore.store import LocalStore, from_url

    if "://" not in url:
        return LocalStore(os.path.abspath(os.path.expanduser(url)), mkdir=True)
    return from_url(url)
