"""The checks of `jaxche doctor` for devices: the NVIDIA driver, the CUDA of JAX that fits it, and JAX's devices."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import logging
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jaxche
from jaxche.cli._doctor_checks import Finding

# The oldest driver of each CUDA, newest first; scripts/environment.sh has the same numbers.
_OLDEST_DRIVER = {13: 580, 12: 525}
_FIELDS = ("name", "driver_version", "memory.total", "memory.used", "compute_mode")
_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_NO_DRIVER = "sudo modprobe nvidia, or restart the machine; in a container: docker run --gpus all"


class Gpu(NamedTuple):
    """A GPU as the driver lists it; memory in MiB."""

    name: str
    memory: float
    used: float
    mode: str


class Driver(NamedTuple):
    """The driver of this machine; ``error`` if it does not answer, ``cuda`` the newest CUDA that it runs."""

    version: str = ""
    cuda: str = ""
    gpus: tuple[Gpu, ...] = ()
    error: str = ""


class Runtime(NamedTuple):
    """The CUDA and cuDNN that a plugin of JAX loads, and those it was built for; ``error`` names a missing library."""

    cuda: int = 0
    cudnn: int = 0
    built_cuda: int = 0
    built_cudnn: int = 0
    error: str = ""


def gpu_findings(environ: Mapping[str, str], errors: Sequence[str]) -> list[Finding]:
    """The lines ``driver`` and ``cuda``, with the :func:`plugin_errors`; none without GPU, driver and plugin."""
    driver, plugins = read_driver(), jaxche.cluster.cuda_plugins()
    if not jaxche.cluster.wants_gpus(environ) or (driver == Driver() and not plugins):
        return []
    if driver == Driver():
        return [Finding("driver", "no nvidia-smi and no /proc/driver/nvidia: no GPU of NVIDIA, although JAX has CUDA")]
    return [driver_finding(driver), cuda_finding(driver, plugins, environ, errors)]


def extra_for(driver: str) -> str:
    """The extra of jaxche whose CUDA a driver of this version runs, or "" if it is too old for any."""
    major = _major(driver)
    return next((f"cuda{cuda}" for cuda, oldest in _OLDEST_DRIVER.items() if major >= oldest), "")


def install_line() -> str:
    """The line that installs JAX with the CUDA that the driver of this machine runs."""
    return _install(extra_for(read_driver().version))


def _install(extra: str) -> str:
    return f"pip install 'jaxche[{extra}]'" if extra else "pip install 'jaxche[cuda13]' (or cuda12)"


def driver_finding(driver: Driver) -> Finding:
    """Version of the driver, and the GPUs with their memory."""
    if driver.error:
        return Finding("driver", f"nvidia-smi fails: {driver.error}", _NO_DRIVER)
    text = f"NVIDIA {driver.version}" + (f", for CUDA up to {driver.cuda}" if driver.cuda else "")
    for gpu in driver.gpus:
        text += f"; {gpu.name}, {gpu.memory / 1024:.1f} GiB, {gpu.used / 1024:.1f} GiB of it in use"
        if gpu.mode not in ("Default", "[N/A]", ""):
            text += f", compute mode {gpu.mode}"
    if not extra_for(driver.version):
        oldest = min(_OLDEST_DRIVER.values())
        return Finding("driver", f"{text}; JAX needs {oldest} or newer", f"install driver {oldest} or newer")
    return Finding("driver", text)


def cuda_finding(driver: Driver, plugins: list[int], environ: Mapping[str, str], errors: Sequence[str]) -> Finding:
    """CUDA and cuDNN of JAX, compared with the driver and with those that JAX was built for."""
    fitting = extra_for(driver.version)
    if not plugins:
        hint = f"; the extra for this driver is {fitting}" if fitting else ""
        return Finding("cuda", f"JAX is installed without CUDA{hint}", _install(fitting))
    if len(plugins) > 1:
        wrong = plugins[1] if fitting in ("", f"cuda{plugins[0]}") else plugins[0]
        text = f"the plugins for CUDA {' and '.join(map(str, plugins))} are both installed"
        return Finding("cuda", text, f"pip uninstall -y jax-cuda{wrong}-plugin jax-cuda{wrong}-pjrt")
    major = plugins[0]
    runtime = read_runtime(major)
    name = f"jax-cuda{major}-plugin"
    if driver.version and _major(driver.version) < _OLDEST_DRIVER[major]:
        text = f"{name} needs driver {_OLDEST_DRIVER[major]} or newer, and this is {driver.version}"
        if not fitting:
            return Finding("cuda", text, f"install driver {_OLDEST_DRIVER[major]} or newer")
        return Finding("cuda", text, f"pip uninstall -y {name} jax-cuda{major}-pjrt; {_install(fitting)}")

    def fix(pip: str) -> str:
        own = "LD_LIBRARY_PATH" in environ
        return "unset LD_LIBRARY_PATH, which comes before the libraries of pip" if own else f"pip install {pip}"

    again = f"--force-reinstall 'jax[cuda{major}]=={importlib.metadata.version('jax')}'"
    if runtime.error:
        return Finding("cuda", f"{name} cannot load {runtime.error}", fix(again))
    text = f"CUDA {show_cuda(runtime.cuda)}, cuDNN {show_cudnn(runtime.cudnn)} ({name} was built for "
    text += f"{show_cuda(runtime.built_cuda)} and {show_cudnn(runtime.built_cudnn)}); extra cuda{major}"
    if runtime.cudnn // 100 < runtime.built_cudnn // 100:
        return Finding("cuda", text, fix(f"-U nvidia-cudnn-cu{major}"))
    if runtime.cuda // 1000 < runtime.built_cuda // 1000:
        return Finding("cuda", text, fix(f"-U 'jax[cuda{major}]'"))
    if errors:
        # The library of the driver, which no package of pip has.
        driverless = "cuInit" in errors[0] or "libcuda" in errors[0]
        return Finding("cuda", f"{name} does not start: {errors[0]}; {text}", _NO_DRIVER if driverless else fix(again))
    return Finding("cuda", text)


def read_driver() -> Driver:
    """The driver as ``nvidia-smi`` describes it, else as ``/proc/driver/nvidia`` does."""
    code, output = jaxche.cluster.nvidia_smi(f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits")
    if code is None:  # a container may lack nvidia-smi
        text = _DRIVER_FILE.read_text(encoding="utf8") if _DRIVER_FILE.exists() else ""
        found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)\s", text)
        return Driver(found[1]) if found else Driver()
    gpus, version = [], ""
    for line in output.strip().splitlines():
        fields = [word.strip() for word in line.rsplit(",", len(_FIELDS) - 1)]
        if len(fields) == len(_FIELDS):  # else a warning, as of a corrupted infoROM
            name, version, memory, used, mode = fields
            gpus.append(Gpu(name, _number(memory), _number(used), mode))
    if code and not gpus:
        return Driver(error=(output.strip().splitlines() or [f"exit code {code}"])[0])
    cuda = re.search(r"CUDA(?: UMD)? Version\s*:\s*([\d.]+)", jaxche.cluster.nvidia_smi()[1])
    return Driver(version, cuda[1] if cuda else "", tuple(gpus))


def read_runtime(major: int) -> Runtime:
    """The versions that the plugin of JAX finds, after JAX has loaded the libraries."""
    try:
        versions: Any = importlib.import_module(f"jax_cuda{major}_plugin._versions")
    except ImportError as error:
        return Runtime(error=f"its own library ({error})")
    found = {}
    for name, function, label in (("cuda", "cuda_runtime", "the CUDA runtime"), ("cudnn", "cudnn", "cuDNN")):
        try:
            found[name] = int(getattr(versions, f"{function}_get_version")())
            found[f"built_{name}"] = int(getattr(versions, f"{function}_build_version")())
        except Exception as error:  # a version function of jaxlib raises whatever the missing library makes it raise
            return Runtime(**found, error=f"{label} ({(str(error).splitlines() or ['no reason given'])[0]})")
    return Runtime(**found)


def show_cuda(version: int) -> str:
    """12090 as "12.9"."""
    return f"{version // 1000}.{version % 1000 // 10}"


def show_cudnn(version: int) -> str:
    """91002 as "9.10.2"."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


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

    def start() -> None:
        with contextlib.suppress(RuntimeError):  # device_finding() reports it
            jaxche.sharding.local_devices()

    thread = threading.Thread(target=start, name="jaxche-devices", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return not thread.is_alive()


def not_started(timeout_s: float) -> Finding:
    """The finding for devices that did not start."""
    return Finding(
        "devices",
        f"JAX has not started them in {timeout_s:g} s; the driver hangs, or another process uses them",
        "JAX_PLATFORMS=cpu jaxche doctor, and look at nvidia-smi",
    )


def device_finding() -> Finding:
    """The devices of JAX, compared with those of the driver."""
    try:
        local = jaxche.sharding.local_devices()
    except RuntimeError as error:
        return Finding(
            "devices", f"JAX does not start: {str(error).splitlines()[0]}", "JAX_PLATFORMS=cpu jaxche doctor"
        )
    kinds = [device.device_kind for device in local]
    text = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
    limits = [(device.memory_stats() or {}).get("bytes_limit", 0) for device in local]
    if all(limits):
        text += f", {min(limits) / 2**30:.1f} GiB each"
    gpus = len(jaxche.cluster.default_gpus(os.environ))
    if gpus and local[0].platform != "gpu":
        text += f"; the driver shows {gpus} GPU(s), "
        if not jaxche.cluster.has_cuda():
            return Finding("devices", f"{text}but JAX is installed without CUDA", install_line())
        fix = "JAX_PLATFORMS=cuda jaxche doctor, which shows the error of JAX"
        return Finding("devices", f"{text}and cannot use them", fix)
    return Finding("devices", text)


def _major(version: str) -> int:
    found = re.match(r"\d+", version)
    return int(found[0]) if found else 0


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:  # "[N/A]" on devices that share the memory of the machine
        return 0.0
