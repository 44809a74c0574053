"""A launcher whose ranks are forks of a process that has imported what they import, which takes longest of a start.

Each message on the socket that it is given is a call of ``launch``, with the files for its output; the answer is the
exit code. It uses no device itself: a process with the threads of JAX's runtime cannot fork.
"""

import atexit
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
from pathlib import Path

from jaxche.cluster import _worker_group, launch

PARAMETERS = inspect.signature(subprocess.Popen._execute_child)


class Fork(subprocess.Popen):
    """A program of this folder in a fork of this process; anything else is started as ever."""

    def _execute_child(self, args, *rest):
        given = PARAMETERS.bind(self, args, *rest).arguments
        pipes = [given[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        if not can_fork(args, given["env"]):
            super()._execute_child(args, *rest)
            return
        self.pid = os.fork()
        if not self.pid:
            become(args[1:], given["env"], pipes[0], pipes[3], pipes[5])
        self._child_created = True
        self._close_pipe_fds(*pipes)


def can_fork(args, env):
    """Whether it is a program of this folder, with the same value of what Python and JAX read before it starts."""
    early = [
        {name: value for name, value in variables.items() if name == "PYTHONPATH" or name.startswith("JAX_")}
        for variables in (env or {}, os.environ)
    ]
    return args[0] == sys.executable and Path(args[1]).parent == Path(__file__).parent and early[0] == early[1]


def become(words, env, *files):
    """Run a program in this process, which was just forked, and end with it."""
    code = 1
    try:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, file in enumerate(files):
            os.dup2(file, number)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        # Another thread may have been writing to the old ones.
        sys.stdout, sys.stderr = (
            open(number, "w", buffering=1, errors="backslashreplace")  # noqa: SIM115
            for number in (1, 2)
        )
        os.environ.clear()
        os.environ.update(env)
        if "PYTHONWARNINGS" in env:
            warnings.simplefilter(env["PYTHONWARNINGS"])
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
    import orbax.checkpoint  # noqa: F401

    import jaxche

    assert jaxche.Trainer  # is imported by its first use
    with socket.socket(fileno=int(number)) as calls:
        while True:
            text, files, *_ = socket.recv_fds(calls, 1 << 20, 2)
            if not text:
                return
            pid = os.fork()
            if not pid:
                answer(calls, json.loads(text), files)
            for file in files:
                os.close(file)
            _, status = os.waitpid(pid, 0)
            calls.send(str(os.waitstatus_to_exitcode(status)).encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
