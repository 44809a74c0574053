"""The entry point: one parser a command, each of which imports what it needs when it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from jaxche.cli import _completion, _doctor, _launch, _page, _plan, _simulate, _train

_START = """\
jaxche trains one Flax model on whatever mix of devices you have, as fast as all of them together.

  jaxche train                     two processes, one 2.5 times slower, real images; a minute
  jaxche train --compare sync,cadence,async
                                   the same, against waiting for the slow one after every batch
  jaxche report runs/mine          one HTML file with the pictures and tables of a run
  jaxche simulate --ms 20,50       what the cadence would do on devices of these speeds
  jaxche launch -n 2 train.py      run your own script once a device
  jaxche plan --memory 16GiB       bytes a device keeps and sends under every sharding strategy
  jaxche launch --emit slurm ...   print a file that runs it on a cluster
  jaxche doctor -n 2               whether these machines and links can train, and how fast they are

jaxche COMMAND --help says more, with examples."""

_CODES = """\
exit codes:
  0     done
  1     it ran, and something went wrong or was found wrong
  2     the arguments make no sense, or something they name is missing; the line says what to write
  130   Ctrl-C
  jaxche launch passes on those of the processes; see jaxche launch --help

tab completion: eval "$(jaxche completion bash)"
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
      argv: the words after ``jaxche``; default: this process's own.

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
    chosen = vars(args).pop("chosen", None)
    if chosen is None:
        print(_START)
        return 0
    args.words = words
    return chosen.run(args)


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands.

    Returns:
      One that leaves the command in ``args.chosen``.
    """
    parser = argparse.ArgumentParser(
        prog="jaxche",
        usage="jaxche COMMAND [options]",
        description=_START,
        epilog=_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(prog="jaxche", title="commands", metavar="COMMAND")
    for module in (_train, _page, _launch, _doctor, _simulate, _plan, _completion):
        module.COMMAND.register(commands)
    return parser
