"""A run under ``jaxche launch`` of ``worker.py``, which is started again if it is killed."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from chaos_parts import worker
from chaos_parts.faults import Launch, orphans

# Seconds of silence that a start on a busy machine does not reach, with a small state and with a large one.
HANG_S, HANG_S_OF_LARGE = "60", "180"


class Launched(Launch):
    """A run under ``jaxche launch``, which is started again if it is killed."""

    def __init__(self, folder: Path, paces: Sequence[int], env: Mapping[str, str], is_elastic: bool):
        paced = ["--pace", ",".join(map(str, paces))] if all(paces) else []
        words = ["-n", str(len(paces)), *paced, *["--elastic"] * is_elastic, "--max-restarts", "1000", "--grace", "2"]
        words += ["--hang-timeout", HANG_S if paced else HANG_S_OF_LARGE, "--events", str(folder / "events.jsonl")]
        self._command = [sys.executable, "-m", "jaxche", "launch", *words, worker.__file__, str(folder)]
        self._env = env
        self._child = self._start(folder)
        super().__init__(folder, self._child.pid)

    def _start(self, folder: Path) -> subprocess.Popen[bytes]:
        with (folder / "output").open("a") as output:
            return subprocess.Popen(self._command, env=self._env, stdout=output, stderr=output)

    @property
    def code(self) -> int | None:
        """The exit code; None while it runs."""
        return self._child.poll()

    def end(self) -> None:
        if self.code is None:
            self._child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(timeout=60)
            self._child.kill()

    @property
    def restarts(self) -> int:
        """How often all ranks were started again."""
        return sum(event["event"] == "restart" for event in self.events.read())

    def kill_launcher(self) -> list[str]:
        """Returns what it left. If the run has not ended it is started again."""
        self._child.kill()
        if self._child.wait() == 0:
            return []
        wrong = []
        if left := orphans(self.folder, within_s=45.0):
            wrong.append(f"{left} processes left by the launcher that was killed")
        if files := list((self.folder / "tmp").iterdir()):
            wrong.append(f"left by the launcher that was killed: {files[0].name}")
        self._child = self._start(self.folder)
        self.launcher = self._child.pid
        return wrong


@contextlib.contextmanager
def launch(folder: Path, paces: Sequence[int], env: Mapping[str, str], is_elastic: bool = True) -> Iterator[Launched]:
    """A launch, which ends with this context."""
    run = Launched(folder, paces, env, is_elastic)
    try:
        yield run
    finally:
        run.end()
