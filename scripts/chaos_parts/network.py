"""Faults of the network between the processes of an elastic run, each of which has a namespace of its own.

A rank is cut off for ever or for some seconds, or its packets are lost or late for some seconds. Of two halves only
the one with the coordinator goes on, which process 0 has started; no rank may train beside it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import slow_link

from chaos_parts import worker
from chaos_parts.faults import read

# Seconds that packets are lost or late, the share that is lost, and how late.
DISTURBED_S, LOSS, DELAY_MS = 4.0, 0.2, 300.0
LIMIT_S = 240.0
KINDS = ("cut", "short cut", "loss", "delay")


class Unavailable(Exception):
    """This machine has no such networks."""


class Result(NamedTuple):
    """How a run ended: its last round before the fault, when that was, its exit code, and what was wrong."""

    round: int
    hit_at: float
    code: int
    wrong: list[str]


def run(folder: Path, fault: Any, env: dict[str, str], wait_for: Callable[..., int]) -> Result:
    """A run of processes in namespaces, and its fault.

    Raises:
      Unavailable: namespaces cannot be made.
    """
    link = slow_link.Link("none", DELAY_MS if fault.kind == "delay" else 0.0, LOSS if fault.kind == "loss" else 0.0)
    try:
        with slow_link.machines(link, len(fault.paces), is_calm=True) as names, (folder / "output").open("a") as output:
            children = []
            for rank, (name, pace) in enumerate(zip(names, fault.paces, strict=True)):
                own = {"JAXCHE_COORDINATOR": f"{slow_link.address(0)}:{slow_link.PORT}", "JAXCHE_ELASTIC": "1"}
                own |= {"JAXCHE_NUM_PROCESSES": str(len(names)), "JAXCHE_PROCESS_ID": str(rank)}
                own |= {"JAXCHE_PACE_MS": str(pace)}
                command = ["ip", "netns", "exec", name, sys.executable, worker.__file__, str(folder)]
                children.append(subprocess.Popen(command, env=env | own, stdout=output, stderr=output))
            try:
                at = wait_for(fault, folder, children[0])
                hit_at = time.monotonic()
                disturb(fault.kind, names, fault.rank, fault.rng)
                return Result(at, hit_at, *ended(folder, fault, children, hit_at))
            finally:
                for child in children:
                    if child.poll() is None:
                        child.kill()
                    child.wait()
    except subprocess.CalledProcessError as error:
        raise Unavailable(f"{' '.join(error.cmd)}: {error.stderr.strip()}") from None
    except FileNotFoundError as error:
        raise Unavailable(str(error)) from None


def disturb(kind: str, names: list[str], rank: int, rng: Any) -> None:
    """The fault itself, from its begin to its end."""
    if kind in ("cut", "short cut"):
        link = ["ip", "-n", names[rank], "link", "set", "veth0"]
        subprocess.run([*link, "down"], check=True, capture_output=True, text=True)
        if kind == "short cut":
            time.sleep(rng.uniform(0.5, 8.0))
            subprocess.run([*link, "up"], check=True, capture_output=True, text=True)
        return
    relay = slow_link.relay_of(names)
    os.kill(relay, signal.SIGUSR1)
    time.sleep(DISTURBED_S)
    os.kill(relay, signal.SIGUSR1)


def ended(folder: Path, fault: Any, children: list[Any], hit_at: float) -> tuple[int, list[str]]:
    """The exit code of the half that goes on, and what was wrong in the other."""
    ranks = set(range(len(children)))
    # The coordinator is beside process 0.
    cut = set() if fault.kind != "cut" else ({fault.rank} if fault.rank else ranks - {0})
    deadline = time.monotonic() + LIMIT_S
    while any(children[rank].poll() is None for rank in ranks - cut) and time.monotonic() < deadline:
        time.sleep(0.1)
    codes = [children[rank].poll() for rank in ranks - cut]
    wrong = []
    # A round may have been merged before the cut, and written after it.
    if any(line["rank"] in cut and line["t"] > hit_at + 1.0 for line in read(folder / "rounds")):
        wrong.append("a rank that was cut off went on")
    # Of the last round's fault the run's own end may be first.
    if fault.moment != "last" and any((folder / f"parameters-{rank}").exists() for rank in cut):
        wrong.append("a rank that was cut off came to an end of its own")
    return next((1 if code is None else code for code in codes if code != 0), 0), wrong
