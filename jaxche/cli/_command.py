"""A command of ``jaxche``: its parser, its error line, and the file that it writes.

Every ``jaxche --help`` imports the modules of all commands. So they import JAX inside their actions, and write
``jaxche.cluster`` and the like for the other packages, each of which is then imported at its first use.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import os
import select
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TextIO

import jaxche

# Errors of the system that a second try may not have: no further process, memory or open file.
_BUSY = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE})
_CODES = {"bad": "1;31", "good": "32"}


class Parser(argparse.ArgumentParser):
    """A parser whose errors say which command has the help."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(
            2, f"{self.prog}: {paint('error', 'bad', sys.stderr)}: {message}\n{self.prog} --help has the options\n"
        )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse words; refuses those that no option takes, with the options that are spelt alike."""
        found, words = super().parse_known_args(args, namespace)
        if words:
            shown = [action for action in self._actions if action.help != argparse.SUPPRESS and action.dest != "help"]
            known = [option for action in shown for option in action.option_strings]
            alike = [one for word in words for one in difflib.get_close_matches(word.partition("=")[0], known, 1, 0.7)]
            meant = f"; did you mean {' or '.join(dict.fromkeys(alike))}?" if alike else ""
            self.error(f"unrecognized arguments: {' '.join(words)}{meant}")
        return found, words


@dataclass(frozen=True)
class Command:
    """One command and its parser."""

    name: str
    # One line without a full stop.
    summary: str
    # The end of ``--help``: examples, then exit codes.
    epilog: str
    add_arguments: Callable[[argparse.ArgumentParser], object]
    # Returns the exit code.
    action: Callable[[argparse.Namespace], int]
    usage: str = "%(prog)s [options]"
    # Lines of ``--help`` after the summary that explain the words of the options.
    about: str = ""

    def register(self, subparsers: argparse._SubParsersAction[Parser]) -> None:
        """Add a parser of this command; it sets ``args.command_object`` to this object."""
        parser = subparsers.add_parser(
            self.name,
            usage=self.usage,
            help=self.summary,
            description=f"{self.summary[0].upper()}{self.summary[1:]}.\n\n{self.about}".rstrip(),
            epilog=self.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.add_arguments(parser)
        parser.set_defaults(command_object=self)

    def run(self, args: argparse.Namespace) -> int:
        """Run the action and return the exit code."""
        return exit_code(self.name, lambda: self.action(args))


def exit_code(command: str, action: Callable[[], int]) -> int:
    """The exit code of an action; an invalid argument is one line on standard error, and code 2."""
    try:
        code = action()
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except (ValueError, ImportError, OSError) as error:
        if isinstance(error, BrokenPipeError) and _has_no_reader(sys.stdout):
            return 141
        print_error(command, error)
        return 1 if isinstance(error, OSError) and error.errno in _BUSY else 2


def _has_no_reader(stream: TextIO) -> bool:
    """Whether the program that reads a stream has ended, as in ``| head``; then it is not written any more."""
    probe = select.poll()
    probe.register(stream, 0)
    has_ended = bool(probe.poll(0))
    if has_ended:  # Python would print the error again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return has_ended


def paint(text: str, style: str, stream: TextIO | None = None) -> str:
    """Colour text for a terminal by its ``style``: "bad" or "good"."""
    out = sys.stdout if stream is None else stream
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not out.isatty()
    return text if plain else f"\033[{_CODES[style]}m{text}\033[0m"


def print_error(command: str, error: object) -> None:
    """Print ``jaxche COMMAND: error: ...`` on standard error."""
    sys.stderr.write(f"{f'jaxche {command}'.rstrip()}: {paint('error', 'bad', sys.stderr)}: {error}\n")
    sys.stderr.flush()


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """A context that writes the file of ``--out``, and prints its path."""
    try:
        yield
    except OSError as error:
        better = path / "file" if path.is_dir() else path.name
        raise ValueError(f"--out {path}: {error.strerror}; write e.g. --out {better}") from None
    print(f"written to {path}")


def write_text(path: str | Path, text: str) -> None:
    """Write the text that ``--out`` asks for, and print its path."""
    with writing(Path(path)):
        Path(path).write_text(text, encoding="utf8")


def join(timeout_s: float = 300.0) -> jaxche.cluster.ClusterInfo:
    """Join the run, if there is one."""
    try:
        return jaxche.cluster.initialize(timeout_s=timeout_s)
    except RuntimeError as error:
        raise ValueError(str(error)) from error


def exit_at_once(code: int) -> NoReturn:
    """Exit without the exit handlers of Python, which may wait for other processes or for devices."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # its reader has ended, or it is closed
            stream.flush()
    os._exit(code)
