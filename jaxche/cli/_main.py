"""The entry point: one parser with a subparser for each command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from jaxche.cli import _completion, _doctor, _launch, _plan, _report, _simulate, _train

_OVERVIEW = """\
jaxche trains one Flax model on whatever mix of devices you have, as fast as all of them together.

  jaxche train                     two processes, one 2.5 times slower, real images; a minute
  jaxche train --compare sync,cadence,async
                                   the same with three policies, side by side
  jaxche report runs/mine          one HTML file with the pictures and tables of a run
  jaxche simulate --ms 20,50       simulate the cadence on devices of these speeds
  jaxche launch -n 2 train.py      run your own script once a device
  jaxche plan --memory 16GiB       memory and traffic of a device under every sharding strategy
  jaxche launch --emit slurm ...   print a file that runs it on a cluster
  jaxche doctor -n 2               check these machines and the links between them

jaxche COMMAND --help lists the options, with examples."""

_EPILOG = """\
exit codes:
  0     success
  1     it ran, and something failed or a check found a problem
  2     invalid arguments, or a missing file or package; the line says what to write
  130   Ctrl-C
  jaxche launch returns the codes of its processes; see jaxche launch --help

tab completion: eval "$(jaxche completion bash)"
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
      argv: the words after ``jaxche``; default: those of this process.

    Returns:
      The exit code.

    Example:
      >>> main(["simulate", "--ms", "20,50", "--rounds", "5"])
      2 ranks, 20 to 50 ms a batch...
      0
    """
    words = list(sys.argv[1:] if argv is None else argv)
    args = make_parser().parse_args(words)
    if args.version:
        import jaxche

        print(f"jaxche {jaxche.__version__}")
        return 0
    command = vars(args).pop("command_object", None)
    if command is None:
        print(_OVERVIEW)
        return 0
    args.words = words
    return command.run(args)


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands; it sets ``args.command_object``."""
    parser = argparse.ArgumentParser(
        prog="jaxche",
        usage="jaxche COMMAND [options]",
        description=_OVERVIEW,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(prog="jaxche", title="commands", metavar="COMMAND")
    for module in (_train, _report, _launch, _doctor, _simulate, _plan, _completion):
        module.COMMAND.register(commands)
    return parser
