"""What every command is made of, and how it is told to the parser."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from jaxche.cli._paint import complain


@dataclass(frozen=True)
class Command:
    """One word after ``jaxche``.

    Args:
      name: that word.
      summary: what it does, in one line without a full stop.
      examples: what ``--help`` ends with: examples, then exit codes.
      arguments: adds the options to a parser.
      action: does it; takes the parsed arguments and returns the exit code.
      usage: the first line of ``--help``.
      refusals: errors that mean that the arguments make no sense: one line that says what to write, and exit code 2.

    Example:
      >>> greet = Command("greet", "say hello", "", lambda p: p.add_argument("name"), lambda args: print(args.name))
      >>> parser = argparse.ArgumentParser()
      >>> greet.register(parser.add_subparsers())
      >>> parser.parse_args(["greet", "Ada"]).chosen is greet
      True
    """

    name: str
    summary: str
    examples: str
    arguments: Callable[[argparse.ArgumentParser], object]
    action: Callable[[argparse.Namespace], int]
    usage: str = "%(prog)s [options]"
    refusals: tuple[type[Exception], ...] = (ValueError, ImportError)

    def register(self, subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
        """Adds it to what ``ArgumentParser.add_subparsers`` returned; ``args.chosen`` will be this object."""
        parser = subparsers.add_parser(
            self.name,
            usage=self.usage,
            help=self.summary,
            description=f"{self.summary[0].upper()}{self.summary[1:]}.",
            epilog=self.examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.arguments(parser)
        parser.set_defaults(chosen=self)

    def run(self, args: argparse.Namespace) -> int:
        """Does it; a refusal becomes a line on standard error."""
        try:
            return self.action(args)
        except self.refusals as error:
            complain(self.name, error)
            return 2
