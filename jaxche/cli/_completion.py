"""`jaxche completion`: a script for shell completion of commands, options and values."""

from __future__ import annotations

import argparse

from jaxche.cli._command import Command, directory_path, file_path

_EPILOG = """\
examples:
  eval "$(jaxche completion bash)"                      in this shell; put the line into ~/.bashrc
  jaxche completion zsh > ~/.zsh/completions/_jaxche    a folder of $fpath, before compinit
  jaxche completion tcsh > ~/.jaxche.csh                and source it

exit codes:
  0     printed
  2     invalid arguments
"""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"))


def _run(args: argparse.Namespace) -> int:
    import shtab

    from jaxche.cli._main import make_parser

    parser = make_parser()
    kinds = {directory_path: shtab.DIRECTORY, file_path: shtab.FILE}
    for command in next(a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction)).values():
        for action in command._actions:
            if action.type in kinds:
                vars(action).update(complete=kinds[action.type])
    print(shtab.complete(parser, shell=args.shell))
    return 0


COMMAND = Command(
    "completion",
    "print a script that completes commands and options in a shell",
    _EPILOG,
    _add_arguments,
    _run,
    usage="%(prog)s SHELL",
)
