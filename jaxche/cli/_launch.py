"""`jaxche launch`: one process a replica on this machine."""

from __future__ import annotations

import argparse
import os
import sys

from jaxche.cluster import count_gpus, launch

_EXAMPLES = """\
examples:
  jaxche launch -n 2 train.py --epochs 3             one process a GPU, or a CPU core each
  jaxche launch -n 2 --pace 20,50 train.py           act as two devices of 20 and 50 ms a step
  JAX_PLATFORMS=cpu jaxche launch -n 4 train.py      CPU cores, on a machine with GPUs too
  jaxche launch -n 2 -m my_package.train --epochs 3  a module
  jaxche launch -n 2 -- python -O train.py           any command

The script calls jaxche.initialize() before its first array. One process that fails ends them all,
and its exit code is the launcher's.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Registers `launch`.

    Args:
      subparsers: what ``ArgumentParser.add_subparsers`` returned.

    Returns:
      The new parser; its arguments carry ``run``.

    Example:
      >>> import argparse
      >>> parser = argparse.ArgumentParser()
      >>> _ = add_parser(parser.add_subparsers())
      >>> parser.parse_args(["launch", "-n", "2", "--pace", "20,50", "train.py", "--lr", "0.1"]).command
      ['train.py', '--lr', '0.1']
    """
    parser = subparsers.add_parser(
        "launch",
        help="run a training script once a replica on this machine",
        description="Run a training script once a replica on this machine.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-n", "--processes", type=int, help="how many to start (default: one a GPU)")
    parser.add_argument(
        "--pace", type=_paces, metavar="MS,MS,...", help="pad each local step to this wall time, one a process"
    )
    parser.add_argument("--only-rank0", action="store_true", help="show standard output of rank 0 only")
    parser.add_argument("--no-pin", action="store_true", help="let processes without a GPU run on any core")
    parser.add_argument("--no-prefix", action="store_true", help="do not start each line with its rank")
    parser.add_argument(
        "--grace",
        type=float,
        default=5.0,
        metavar="S",
        help="seconds between SIGTERM and SIGKILL (default: %(default)g)",
    )
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, help="run a module, with the arguments that follow"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="a script (*.py) or a program, with its arguments")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Launches what the arguments say.

    Args:
      args: from the parser of ``add_parser``.

    Returns:
      The exit code: the launch's, or 2 if the arguments make no sense.
    """
    try:
        return launch(
            _command(args.module, args.command),
            processes=_one_a_gpu() if args.processes is None else args.processes,
            pace_ms=args.pace,
            prefix=not args.no_prefix,
            only_rank0=args.only_rank0,
            grace_s=args.grace,
            pin=not args.no_pin,
        )
    except ValueError as error:
        sys.stderr.write(f"jaxche launch: error: {error}\n")
        return 2


def _one_a_gpu() -> int:
    gpus = count_gpus()
    if not gpus:
        raise ValueError("there are no GPUs here to count. Write: jaxche launch -n 2 train.py")
    return gpus


def _command(module: list[str] | None, words: list[str]) -> list[str]:
    if module is not None:
        if not module:
            raise ValueError("-m has no module. Write: jaxche launch -n 2 -m my_package.train")
        return [sys.executable, "-m", *module, *words]
    if words[:1] == ["--"]:
        words = words[1:]
    if not words:
        raise ValueError("there is nothing to run. Write: jaxche launch -n 2 train.py")
    if not words[0].endswith(".py"):
        return words
    if not os.path.isfile(words[0]):
        raise ValueError(f"no script {words[0]!r} in {os.getcwd()}")
    return [sys.executable, *words]


def _paces(text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of ms; write --pace 20,50") from None
