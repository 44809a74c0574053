"""`jaxche coordinator`: the coordinator of an elastic run whose processes a scheduler starts."""

from __future__ import annotations

import argparse
import contextlib
import json
import os

import jaxche
from jaxche.cli._command import Command
from jaxche.distributed import COORDINATOR, LIVENESS, NUM_PROCESSES, PROCESS_ID

_ABOUT = """\
The processes of an elastic run meet at its coordinator, which also detects deaths. jaxche launch
starts it for its own processes; the files of jaxche launch --emit --elastic start this command."""

_EPILOG = """\
It reads the variables that the processes have:
  JAXCHE_COORDINATOR         host:port where they reach it
  JAXCHE_NUM_PROCESSES       their number at the start
  JAXCHE_LIVENESS            ["host", port, null, "token"] where it detects deaths: another port,
                             and a token of 32 characters
  JAXCHE_HEARTBEAT_TIMEOUT   seconds without a heartbeat until a process counts as dead (default 15)
It ends some seconds after the last process, but not before its standard input is closed, unless
that is a terminal. It ignores SIGTERM and Ctrl-C.

examples:
  export JAXCHE_ELASTIC=1 JAXCHE_COORDINATOR=node1:61234 JAXCHE_NUM_PROCESSES=8
  export JAXCHE_LIVENESS='["node1", 61235, null, "0123456789abcdef0123456789abcdef"]'
  jaxche coordinator

exit codes:
  0     all processes have ended
  1     the run is lost: a process came to replace another when all had died
  2     invalid variables
"""
_VARIABLES = (COORDINATOR, NUM_PROCESSES, LIVENESS)
_TOKEN_LETTERS = 32
_EXPORT = (
    "JAXCHE_COORDINATOR=node1:61234 JAXCHE_NUM_PROCESSES=8 "
    f"""JAXCHE_LIVENESS='["node1", 61235, null, "{2 * "0123456789abcdef"}"]'"""
)


def _run(args: argparse.Namespace) -> int:
    from jaxche.distributed import coordinator_bind, serve_coordinator

    if missing := [name for name in _VARIABLES if not os.environ.get(name)]:
        raise ValueError(f"{' and '.join(missing)} must be set. Write: {_EXPORT} jaxche coordinator")
    found = jaxche.cluster.detect({**os.environ, PROCESS_ID: "0"})  # refuses invalid values
    if not found.address:
        raise ValueError("JAXCHE_NUM_PROCESSES=1: a single process needs no coordinator. Start it alone")
    bind, liveness = coordinator_bind(found.address, os.environ), os.environ[LIVENESS]
    if not _is_liveness(liveness):
        raise ValueError(f"JAXCHE_LIVENESS={liveness!r} is no address. Write: {_EXPORT} jaxche coordinator")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # jaxlib logs what it does
    serve_coordinator(found.address, bind, found.num_processes, liveness=liveness)


def _is_liveness(text: str) -> bool:
    with contextlib.suppress(ValueError, TypeError):
        _, port, _, token = json.loads(text)
        return 0 < port < 65536 and len(token) == _TOKEN_LETTERS
    return False


COMMAND = Command(
    "coordinator",
    "coordinate an elastic run whose processes a scheduler starts",
    _EPILOG,
    lambda parser: None,
    _run,
    usage="%(prog)s [-h]",
    about=_ABOUT,
)
