"""Lines of the table: what was measured, the peer of the same run, their ratio and the goal. Imports no jax."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

HEAD = ("", "measured", "peer", "ratio", "goal", "met")


@dataclass(frozen=True)
class Line:
    """One line; None where nothing could be measured, with the reason in ``note``.

    ``goal`` is a bound of the ratio: "<= 1.01", ">= 0.95", "0.5 to 2", or "" where the number is all that is said.
    """

    name: str
    measured: float | None
    peer: float | None = None
    unit: str = ""
    goal: str = ""
    against: str = ""
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Measured over peer."""
        if self.measured is None or not self.peer:
            return None
        return self.measured / self.peer

    @property
    def met(self) -> bool | None:
        """Whether the ratio is within the goal; None without a ratio or a goal."""
        if self.ratio is None or not self.goal:
            return None
        low, high = bounds(self.goal)
        return low <= self.ratio <= high

    def to_dict(self) -> dict[str, Any]:
        """Every field, with ratio and verdict."""
        return asdict(self) | {"ratio": self.ratio, "met": self.met}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Line:
        """The line of ``to_dict``; ratio and verdict are computed again."""
        return cls(**{name: value for name, value in saved.items() if name not in ("ratio", "met")})


def bounds(goal: str) -> tuple[float, float]:
    """The lowest and the highest ratio that meets a goal."""
    number = r"(\d+(?:\.\d+)?)"
    if found := re.fullmatch(rf"<= {number}", goal):
        return -math.inf, float(found[1])
    if found := re.fullmatch(rf">= {number}", goal):
        return float(found[1]), math.inf
    if found := re.fullmatch(rf"{number} to {number}", goal):
        return float(found[1]), float(found[2])
    raise ValueError(f'goal={goal!r} must be like "<= 1.01", ">= 0.95" or "0.5 to 2"')


def cells(line: Line) -> tuple[str, ...]:
    """The columns of a line as text."""
    verdict = {True: "yes", False: "NO", None: "-"}[line.met]
    ratio = "-" if line.ratio is None else f"{line.ratio:.3f}"
    return (
        line.name,
        _number(line.measured, line.unit),
        _number(line.peer, line.unit),
        ratio,
        line.goal or "-",
        verdict,
    )


def render(parts: Mapping[str, Mapping[str, Any]]) -> str:
    """The table of all parts, each under its name, with notes below its lines; ``parts`` as in gpu.json."""
    rows = {name: [(cells(line), line) for line in map(Line.from_dict, part["lines"])] for name, part in parts.items()}
    every = [HEAD, *(row for found in rows.values() for row, _ in found)]
    widths = [max(len(row[column]) for row in every) for column in range(len(HEAD))]
    out = [_aligned(HEAD, widths)]
    for name, part in parts.items():
        state = "" if part["status"] == "done" else f": {part['status']}"
        out.append(f"\n{name}{state} ({part['seconds']:.0f} s)")
        for row, line in rows[name]:
            out.append(_aligned(row, widths))
            for text in (line.against and f"peer: {line.against}", line.note):
                if text:
                    out.append(f"      {text}")
        if part["status"] not in ("done", "not run") and part.get("error"):
            out += [f"      {text}" for text in part["error"].splitlines()[-3:]]
    lines = [line for found in rows.values() for _, line in found]
    out.append(f"\n{summary(lines)}")
    return "\n".join(out)


def summary(lines: Iterable[Line]) -> str:
    """How many goals were met, missed and not measured."""
    lines = list(lines)
    goals = [line.met for line in lines if line.goal]
    missed = [line.name for line in lines if line.met is False]
    text = f"{goals.count(True)} of {len(goals)} goals met, {goals.count(None)} not measured"
    return text + (f"; missed: {', '.join(missed)}" if missed else "")


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    # Four digits, and never an exponent: numbers of bytes a second and of steps a second are read side by side.
    digits = max(0, 3 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:,.{min(digits, 4)}f} {unit}".rstrip()


def _aligned(row: tuple[str, ...], widths: list[int]) -> str:
    first = f"  {row[0]:<{widths[0]}}"
    return (first + "".join(f"  {cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))).rstrip()
