"""The entry point: one parser with a subparser for each command, and shell completion."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

import jaxche
from jaxche.cli import _coordinator, _doctor, _launch, _plan, _report, _simulate, _train
from jaxche.cli._command import Command, Parser, exit_code
from jaxche.cli._options import command_word, directory_path, file_path

_OVERVIEW = """\
jaxche trains one JAX model on devices of different speeds, to a given quality in the least time.

  jaxche train                     two processes, one 2.5 times slower, real images; a minute
  jaxche train --compare sync,cadence,async
                                   the same with three policies, side by side
  jaxche report runs/mine          one HTML file with the pictures and tables of a run
  jaxche simulate --ms 20,50       the efficiency of training on devices of 20 and 50 ms a step
  jaxche launch -n 2 train.py      run your own script once a device
  jaxche plan train.py:make_model  memory and traffic of your model on several devices
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

_COMPLETION_EPILOG = """\
examples:
  eval "$(jaxche completion bash)"                      in this shell; put the line into ~/.bashrc
  jaxche completion zsh > ~/.zsh/completions/_jaxche    a folder of $fpath, before compinit
  jaxche completion tcsh > ~/.jaxche.csh                and source it

exit codes:
  0     printed
  2     invalid arguments
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
      argv: the words after ``jaxche``; default: those of this process.

    Returns:
      The exit code.

    Example:
      >>> main(["simulate", "--ms", "20,50", "--rounds", "5"])
      2 ranks, 20 to 50 ms a batch...
      0
    """
    # A stream that the caller closed is None, and another file would get its number.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    words = list(sys.argv[1:] if argv is None else argv)
    args = make_parser().parse_args(words)
    command = vars(args).pop("command_object", None)
    if args.version or command is None:
        text = f"jaxche {jaxche.__version__}" if args.version else _OVERVIEW
        return exit_code("", lambda: print(text) or 0)
    args.words = words
    return command.run(args)


def make_parser() -> Parser:
    """The parser of all commands; it sets ``args.command_object``."""
    parser = Parser(
        prog="jaxche",
        usage="jaxche COMMAND [options]",
        description=_OVERVIEW,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(prog="jaxche", title="commands", metavar="COMMAND")
    for module in (_train, _report, _launch, _coordinator, _doctor, _simulate, _plan):
        module.COMMAND.register(commands)
    _COMPLETION.register(commands)
    return parser


def _print_completion(args: argparse.Namespace) -> int:
    import shtab

    parser = make_parser()
    [commands] = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    kinds: dict[Any, Any] = {directory_path: shtab.DIRECTORY, file_path: shtab.FILE, command_word: shtab.FILE}
    for command in commands.values():
        for action in command._actions:
            if action.type in kinds:
                vars(action).update(complete=kinds[action.type])
    print(shtab.complete(parser, shell=args.shell))
    return 0


_COMPLETION = Command(
    "completion",
    "print a script that completes commands and options in a shell",
    _COMPLETION_EPILOG,
    lambda parser: parser.add_argument("shell", choices=("bash", "zsh", "tcsh")),
    _print_completion,
    usage="%(prog)s SHELL",
)
