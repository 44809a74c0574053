"""`jaxche completion`: the script with which a shell completes commands, options and their values."""

from __future__ import annotations

import argparse

_EXAMPLES = """\
examples:
  eval "$(jaxche completion bash)"                          in this shell; put the line into ~/.bashrc
  jaxche completion zsh > ~/.zsh/completions/_jaxche        a folder of $fpath, before compinit
  jaxche completion tcsh > ~/.jaxche.csh                    and source it

exit codes:
  0     printed
  2     the arguments make no sense
"""
_FOLDERS, _FILES = ("folder", "out", "store"), ("command", "plot", "events")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Registers `completion`.

    Args:
      subparsers: what ``ArgumentParser.add_subparsers`` returned.

    Returns:
      The new parser; its arguments carry ``run``.
    """
    parser = subparsers.add_parser(
        "completion",
        help="print what makes a shell complete jaxche's commands and options",
        description="Print the script with which a shell completes jaxche's commands, options and their values.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"))
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Prints the script.

    Args:
      args: from the parser of ``add_parser``.

    Returns:
      The exit code.
    """
    import shtab

    from jaxche.cli._main import make_parser

    parser = make_parser()
    for command in next(a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction)).values():
        for action in command._actions:
            if action.dest in _FOLDERS + _FILES and not action.choices:
                action.complete = shtab.DIRECTORY if action.dest in _FOLDERS else shtab.FILE  # pyright: ignore
    print(shtab.complete(parser, shell=args.shell))
    return 0
