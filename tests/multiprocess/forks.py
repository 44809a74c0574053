"""A launcher whose processes are forks of one that has imported what they import, which takes longest of a start.

Each message on the socket that it is given is a call of ``launch``, with the files for its output; the answer is the
exit code. Or it is a program to run beside the tests, whose answer is the number of the process, or the question for
how it ended. It uses no device itself: a process with the threads of JAX's runtime cannot fork.
"""

import atexit
import gc
import importlib
import inspect
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
import warnings
import weakref
from pathlib import Path

from jax._src.xla_bridge import backends_are_initialized

from jaxche.cluster import _worker_group, launch
from jaxche.distributed import _coordinator

HERE = Path(__file__).parent
COMMAND = ["-m", "jaxche"]
Popen = subprocess.Popen
PARAMETERS = inspect.signature(subprocess.Popen._execute_child)
CORES = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()


class Fork(subprocess.Popen):
    """A file, ``jaxche`` or a coordinator, in a fork of this process; anything else is started as ever."""

    def _execute_child(self, args, *rest):
        given = PARAMETERS.bind(self, args, *rest).arguments
        pipes = [given[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        words = forked_words(args, given["env"])
        if not words:
            super()._execute_child(args, *rest)
            return
        self.pid = os.fork()
        if not self.pid:
            become(words, given["env"] or dict(os.environ), pipes[0], pipes[3], pipes[5])
        self._child_created = True
        self._close_pipe_fds(*pipes)


def forked_words(args, env):
    """The program and its arguments; none for other programs, and where Python or JAX read other values first.

    Nor for any where this process has started JAX's runtime, with whose threads it cannot fork.
    """
    if args[0] != sys.executable or early(env or os.environ) != early(os.environ) or backends_are_initialized():
        return None
    if args[1:4] == ["-P", "-m", _coordinator.__name__]:  # its PYTHONPATH has the folders of this process
        return [_coordinator.__file__, *args[4:]]
    known = {*sys.path, str(HERE / "plugins")}.issuperset((env or {}).get("PYTHONPATH", "").split(os.pathsep))
    return args[1:] if known and (args[1:3] == COMMAND or args[1].endswith(".py")) else None


def customize():
    """What Python and JAX do first where a folder on the path asks for it."""
    import jax

    for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        if (file := Path(folder, "sitecustomize.py")).exists():
            sys.path.append(folder)
            runpy.run_path(str(file))
    if "STANDIN_RANKS" in os.environ and str(HERE / "plugins") in sys.path:  # not for a coordinator
        jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
        importlib.import_module("jax_plugins.standin").initialize()


def early(variables):
    """What JAX reads when it is imported."""
    return {name: value for name, value in variables.items() if name.startswith("JAX_")}


def become(words, env, *files):
    """Run a program in this process, which was just forked, and end with it."""
    # A rank has the threads of JAX's runtime, and with them a process cannot fork.
    code, subprocess.Popen = 1, Popen if "JAXCHE_PROCESS_ID" in env else Fork
    weakref.finalize._registry.clear()  # which deletes the temporary folders of the process that forked
    try:
        os.setsid()
        if CORES:  # a rank pinned to a core waits for tests that run beside it
            os.sched_setaffinity(0, CORES)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, file in enumerate(files):
            if file != -1:  # else that of this process
                os.dup2(file, number)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        # Another thread may have been writing to the old ones, which close no file when they go.
        sys.stdout, sys.stderr = (
            open(number, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
            for number in (1, 2)
        )
        os.environ.clear()
        os.environ.update(env)
        if "PYTHONWARNINGS" in env:
            warnings.simplefilter(env["PYTHONWARNINGS"])
        customize()
        if words[0] == "-m":
            sys.argv, sys.path[0] = words[1:], os.getcwd()
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif words[0] == "-c":
            exec(words[1], {"__name__": "__main__"})
        else:
            sys.argv, sys.path[0] = words, os.path.dirname(words[0])
            runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        os._exit(code)


def answer(calls, call, files):
    """Launch in this process, which was just forked, and end with the exit code, or when the tests end."""

    def end():
        calls.recv(1)
        os.kill(os.getpid(), signal.SIGKILL)  # the reaper ends the ranks

    code = 1
    try:
        for number, file in enumerate(files, start=1):
            os.dup2(file, number)
            os.close(file)
        os.environ.clear()
        os.environ.update(call.pop("environ"))
        _worker_group._ERROR_OUTPUT_S = call.pop("error_output_s")
        threading.Thread(target=end, daemon=True).start()
        subprocess.Popen = Fork
        code = launch(**call)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def main(number):
    import jaxlib.mlir.dialects.mhlo  # noqa: F401, of the first program that JAX lowers
    import orbax.checkpoint  # noqa: F401

    import jaxche

    assert jaxche.Trainer  # is imported by its first use, and so is the next
    assert jaxche.initialize
    runpy.run_path(str(Path(__file__).parents[1] / "compilation.py"))["share"]()
    # What is imported stays: the garbage collector of a fork does not visit it.
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)
    with socket.socket(fileno=int(number)) as calls:
        while True:
            text, files, *_ = socket.recv_fds(calls, 1 << 20, 2)
            if not text:
                return
            call = json.loads(text)
            if "ended" in call:
                pid, status = os.waitpid(call["ended"], os.WNOHANG)
                calls.send(str(status).encode() if pid else b"no")
                continue
            if "train" in call.get("program", ()):
                importlib.import_module("jaxche.cli._tasks")  # only for those who need it: flax takes long
            pid = os.fork()
            if not pid and "program" in call:
                os.chdir(call["folder"])
                become(call["program"], call["environ"], os.open(os.devnull, os.O_RDONLY), *files)
            elif not pid:
                answer(calls, call, files)
            for file in files:
                os.close(file)
            if "program" in call:
                calls.send(str(pid).encode())
                continue
            _, status = os.waitpid(pid, 0)
            calls.send(str(os.waitstatus_to_exitcode(status)).encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
