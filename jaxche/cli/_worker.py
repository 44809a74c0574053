"""One process of a run, and how it ends when something goes wrong."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import jax

import jaxche
from jaxche.cli._paint import complain

# For the rank that tells what went wrong: a launcher names the first that leaves.
_GRACE_S = 1.0


def work(args: argparse.Namespace, name: str) -> int:
    """Joins the run, trains, and tells failures in one line.

    Args:
      args: the arguments of `jaxche train`.
      name: of the run.

    Returns:
      The exit code. In a run of many processes a failure ends this one here: Python's own exit would wait for the
      others, and they perhaps for this one.
    """
    info = jaxche.initialize()
    from jaxche.cli._run import Refused, train

    try:
        if args.processes not in (None, info.num_processes):
            raise Refused(f"-n {args.processes}, but {info.num_processes} processes were started; leave -n out")
        train(args, Path(args.out) / name)
        return 0
    except (Refused, jaxche.NonFiniteLossError, jaxche.PlanMismatchError) as error:
        return _leave_together(error, speaks=info.process_id == 0)
    except jaxche.RankError as error:
        return _leave_together(error, speaks=False)
    except (ValueError, ImportError, OSError) as error:
        if any(note.startswith("raised on rank") for note in getattr(error, "__notes__", ())):
            return _leave_together(error, speaks=True)
        complain("train", error)
        return _leave(_code(error))
    except KeyboardInterrupt:
        return _leave(130)


def _leave_together(error: Exception, speaks: bool) -> int:
    """After an error that all processes know of: none of them is cut off, so none has more to say."""
    if speaks:
        complain("train", error)
    if jax.process_count() > 1:
        jax.distributed.shutdown()
        if not speaks:
            time.sleep(_GRACE_S)
    return _leave(_code(error))


def _leave(code: int) -> int:
    if jax.process_count() > 1:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
    return code


def _code(error: Exception) -> int:
    return 2 if isinstance(error, (ValueError, ImportError)) else 1
