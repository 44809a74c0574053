"""Faults of the network between the processes of an elastic run, each of which has a namespace of its own.

A rank is cut off for ever or for some seconds, or its packets are lost or late for some seconds. Of two halves only
the one with the coordinator, which process 0 has started, continues; no rank may train beside it. After that the cut
is mended, and those that were cut off are started again, as nothing replaces them by itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import slow_link

from chaos_parts import worker
from chaos_parts.faults import Lines, Target

# Seconds that packets are lost or late, the share that is lost, and how late.
DISTURBED_S, LOSS, DELAY_MS = 4.0, 0.2, 300.0


class Unavailable(Exception):
    """This machine has no such networks."""


class Machines:
    """The processes of a run, and their networks."""

    restarts = 0  # nothing starts all of them again

    def __init__(self, folder: Path, paces: Sequence[int], env: Mapping[str, str], names: Sequence[str]):
        self.folder, self._paces, self._env, self._names = folder, paces, env, names
        self._children = {rank: self._start(rank) for rank in range(len(names))}
        self.cut_at = 0.0

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        own = {"JAXCHE_COORDINATOR": f"{slow_link.address(0)}:{slow_link.PORT}", "JAXCHE_ELASTIC": "1"}
        own |= {"JAXCHE_NUM_PROCESSES": str(len(self._names)), "JAXCHE_PROCESS_ID": str(rank)}
        own |= {"JAXCHE_PACE_MS": str(self._paces[rank])} if self._paces[rank] else {}
        command = ["ip", "netns", "exec", self._names[rank], sys.executable, worker.__file__, str(self.folder)]
        with (self.folder / "output").open("a") as output:
            return subprocess.Popen(command, env={**self._env, **own}, stdout=output, stderr=output)

    @property
    def pids(self) -> dict[int, int]:
        return {rank: child.pid for rank, child in self._children.items()}

    @property
    def code(self) -> int | None:
        """The exit code of the first that failed; None while all others run."""
        codes = [child.poll() for child in self._children.values()]
        return next(filter(None, codes), None if None in codes else 0)

    def end(self) -> None:
        for child in self._children.values():
            child.kill()
            child.wait()

    def set_link(self, rank: int, to: str) -> None:
        command = ["ip", "-n", self._names[rank], "link", "set", "veth0", to]
        subprocess.run(command, check=True, capture_output=True)

    def disturb(self, number: int) -> None:
        """Packets are lost or late for some seconds, as the signal to the relay says."""
        relay = slow_link.relay_of(self._names)
        os.kill(relay, number)
        time.sleep(DISTURBED_S)
        os.kill(relay, number)

    def cut_off(self, rank: int) -> set[int]:
        """The ranks that a cut keeps from the coordinator, which is beside process 0."""
        return {rank} if rank else self.pids.keys() - {0}

    def start_again(self, ranks: set[int]) -> None:
        for rank in ranks:
            self._children[rank].kill()
            self._children[rank].wait()
            self._children[rank] = self._start(rank)


@contextlib.contextmanager
def machines(folder: Path, paces: Sequence[int], env: Mapping[str, str]) -> Iterator[Machines]:
    """A run of processes in namespaces.

    Raises:
      Unavailable: namespaces cannot be made.
    """
    link = slow_link.Link("none", DELAY_MS, LOSS)
    with contextlib.ExitStack() as stack:
        try:
            names = stack.enter_context(slow_link.machines(link, len(paces), is_calm=True))
        except subprocess.CalledProcessError as error:
            raise Unavailable(f"{' '.join(error.cmd)}: {error.stderr.strip()}") from None
        except FileNotFoundError as error:
            raise Unavailable(str(error)) from None
        run = Machines(folder, paces, env, names)
        stack.callback(run.end)
        yield run


def cut(target: Target) -> None:
    target.run.set_link(target.rank, "down")
    target.run.cut_at = time.monotonic()


def mend_cut(target: Target) -> list[str]:
    """Those that were cut off are started again; they must not have trained meanwhile."""
    run = target.run
    ranks = run.cut_off(target.rank)
    pids = {run.pids[rank] for rank in ranks}
    run.start_again(ranks)
    run.set_link(target.rank, "up")
    # A round may have been merged before the cut, and written after it.
    lines = Lines(run.folder / "rounds").read()
    went_on = any(line["pid"] in pids and line["t"] > run.cut_at + 1.0 for line in lines)
    return ["a rank that was cut off continued"] if went_on else []


def short_cut(target: Target) -> None:
    target.run.set_link(target.rank, "down")
    time.sleep(target.rng.uniform(0.5, 8.0))
    target.run.set_link(target.rank, "up")


def lossy(target: Target) -> None:
    target.run.disturb(signal.SIGUSR2)


def late(target: Target) -> None:
    target.run.disturb(signal.SIGUSR1)
