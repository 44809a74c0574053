"""Real processes, on CPU devices: how they are started, and whether they have ended."""

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from jaxche.cluster import _worker_group

HERE = Path(__file__).parent
# What processes run is not collected: programs import each other, and a module of `card` would be this process's plugin
# of CUDA.
collect_ignore = ["card", "plugins", *(path.name for path in HERE.glob("*.py") if not path.name.startswith("test_"))]
# Every script knows these.
START = """
import os, signal, sys, time
rank, restart = (int(os.environ["JAXCHE_" + name]) for name in ("PROCESS_ID", "RESTART"))
"""


@pytest.fixture(scope="module", autouse=True)
def _on_cpu():
    """For all processes that a test starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_PLATFORMS", "cpu")
        patch.setenv("PYTHONPATH", str(HERE.parents[1]))
        yield


@pytest.fixture(scope="session")
def launch_forks(_asked):
    """``launch`` in a process that has imported what ranks import."""

    def launch(command, processes, **options):
        # Ranks pinned to cores wait for tests that run beside them; test_launch.py has what pinning does.
        call = {"pin": False} | options | {"command": command, "processes": processes, "environ": dict(os.environ)}
        call["error_output_s"] = _worker_group._ERROR_OUTPUT_S  # which a test may have patched
        return int(_asked(call, [1, 2]))

    return launch


@pytest.fixture(scope="module")
def forked(request, launch_forks):
    """The ranks that this module launches are forks: they import nothing that takes long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request.module, "launch", launch_forks, raising=False)
        yield


@pytest.fixture(scope="session")
def stand_ins():
    """Makes the variables for ranks that train on a stand-in for an accelerator, next to others on the CPU."""

    def variables(*ranks, devices=1):
        if not ranks:
            return {}
        path = os.pathsep.join([str(HERE.parents[1]), str(HERE / "plugins")])
        return {"PYTHONPATH": path, "STANDIN_RANKS": ",".join(map(str, ranks)), "STANDIN_DEVICES": str(devices)}

    return variables


@pytest.fixture(scope="session")
def load():
    """Imports a program of this folder, to compute in the test what its processes do."""

    def loading(name):
        spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(HERE)  # programs import each other, as they do in their processes
            spec.loader.exec_module(module)
        return module

    return loading


@pytest.fixture
def script(tmp_path):
    """Writes what every rank runs, and gives its command."""

    def write(text, *options):
        path = tmp_path / "script.py"
        path.write_text(START + textwrap.dedent(text))
        return [sys.executable, *options, str(path)]

    return write


@pytest.fixture(scope="session")
def json_lines():
    """Reads a file of events."""
    return lambda path: [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def launcher(request):
    """Starts two ranks under a launcher that is a process of its own; forks in a module whose ranks are."""
    started = []
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}

    def start(ranks, *arguments):
        call = f"launch({ranks!r}, 2, {', '.join(arguments)})"
        # In the background of a shell that is no terminal Ctrl-C is ignored, and what ignores it passes that on.
        heard = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)"
        command = ["-c", f"{heard}; from jaxche.cluster import launch; sys.exit({call})"]
        if "forked" in request.fixturenames:
            started.append(request.getfixturevalue("fork")(*command, **options))
        else:
            started.append(subprocess.Popen([sys.executable, *command], **options))
        return started[-1]

    yield start
    for process in started:
        with process:
            process.kill()


@pytest.fixture
def gone():
    """Whether a process ends in time; a zombie, which its parent has not waited for, has ended."""

    def ended(pid, within_s=5.0):
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            try:
                os.kill(pid, 0)
                stat = Path(f"/proc/{pid}/stat")
                if stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z":
                    return True
            except (ProcessLookupError, FileNotFoundError):
                return True
            time.sleep(0.05)
        return False

    return ended
