"""The history of a run: a table, a file, a plot."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from jaxche.messages import aligned, brief, html_table, whole_number
from jaxche.reports._advice import Advice, advise_from
from jaxche.reports._plot import ROUNDS_DRAWN, draw
from jaxche.reports._round_info import RoundInfo, efficiency_of, is_scaled, plain, rounds_svg
from jaxche.reports._round_list import RoundList

_log = logging.getLogger("jaxche")

_TYPES = {field.name: str(field.type) for field in fields(RoundInfo)}
# Fields that have a default may be missing in a file.
_REQUIRED = {field.name for field in fields(RoundInfo) if field.default is MISSING and field.default_factory is MISSING}
# Columns of a table in milliseconds.
_TIMES = ("sync_ms", "wait_ms", "ms")


class History(RoundList):
    """The rounds of a run: a list of :class:`RoundInfo` with tables, plots and files.

    A slice is a history too, and so is a sum: ``history[:20].plot()`` draws the first rounds.

    All but the last 10,000 rounds are kept packed, and reading one makes a copy. To change such a round, put another in
    its place: ``history[0] = dataclasses.replace(history[0], policy="mine")``.

    Args:
      rounds: the rounds, in order.
      memory: bytes that a device needs for a round, one dict for each replica; see :attr:`Trainer.memory`.

    Example:
      >>> history = History()
      >>> len(history), history.efficiency
      (0, 1.0)
    """

    def __init__(self, rounds: Iterable[RoundInfo] = (), memory: Sequence[dict[str, int]] = ()):
        super().__init__(rounds)
        self.memory = tuple(memory)

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        return History(found, self.memory) if isinstance(key, slice) else found

    def __add__(self, other: Any) -> Any:
        return History(super().__add__(other), getattr(other, "memory", ()) or self.memory)

    def copy(self) -> History:
        """The same rounds in another list."""
        return self[:]

    @property
    def efficiency(self) -> float:
        """Number of batches relative to a run of the same duration without waits and merges."""
        return efficiency_of(self)

    @property
    def last_ranks(self) -> History:
        """The rounds since the last change of the number of ranks in an elastic run, else all rounds."""
        world = len(self[-1].counts) if self else 0
        changed = [i for i, info in enumerate(self) if len(info.counts) != world]
        return self[changed[-1] + 1 :] if changed else self

    @property
    def seconds(self) -> float:
        """Total duration of the rounds."""
        return sum(info.period_ms for info in self) / 1e3

    @property
    def scaled(self) -> bool:
        """Whether learning rates were scaled."""
        return is_scaled(self)

    def rows(self) -> list[dict[str, Any]]:
        """One flat dict for each round, e.g. for ``pandas.DataFrame``; nan where a round has no such number."""
        return _rows(self, self)

    def table(self, rows: int = 10) -> str:
        """The last rounds as text.

        Args:
          rows: maximum number of rounds.
        """
        rows = whole_number("rows", rows, 1, "history.table(rows=10)")
        return aligned(text_rows(self, rows)) if self else "no rounds yet"

    def __repr__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        """The last rounds as a timeline and as a table."""
        if not self:
            return "<p>no rounds yet</p>"
        note = f"{len(self)} rounds, {self.seconds:.1f} s, efficiency {self.efficiency:.1%}"
        head, *cells = text_rows(self, 20)
        return rounds_svg(self.last_ranks[-ROUNDS_DRAWN:], note) + html_table(head, cells)

    def to_json(self, path: str | Path | None = None) -> str:
        """Convert the history to JSON lines, one for each round; nan becomes null, infinities "inf" and "-inf".

        Args:
          path: output file; None writes no file.

        Returns:
          The text.
        """
        # Not asdict, which would copy every value and take twice as long as the rest.
        text = "".join(json.dumps(plain(vars(info))) + "\n" for info in self)
        if path is not None:
            Path(path).write_text(text, encoding="utf8")
        return text

    @classmethod
    def from_json(cls, source: str | Path, skip_damaged: bool = False) -> History:
        """Read the JSON lines of :meth:`to_json`.

        Args:
          source: the file, or its text. A string is a text if it is empty, begins with ``{`` or has several lines.
          skip_damaged: whether to skip damaged lines, with a warning that has their number. An incomplete last line
            is skipped without a warning.

        Returns:
          The history; ``trainer.replay(state, data, history)`` repeats the run.

        Raises:
          ValueError: a line is damaged.
          FileNotFoundError: there is no such file.
        """
        if not isinstance(source, str | os.PathLike):
            raise ValueError(f"source={brief(source)} is no file; write History.from_json(Path('history.jsonl'))")
        is_text = isinstance(source, str) and (not source or source.lstrip().startswith("{") or "\n" in source)
        record = read_record(str(source).encode() if is_text else Path(source).read_bytes())
        name = "the text" if is_text else str(source)
        if skip_damaged:
            warn_of_damage(name, record)
        elif bad := sorted({*record.damaged, *record.unfinished}):
            raise ValueError(
                f"line {bad[0]} of {name} is not a round of a jaxche history; to skip damaged lines write "
                "History.from_json(source, skip_damaged=True)"
            )
        return cls(record.rounds)

    def advice(self, max_anchor: int = 200) -> Advice:
        """Find the counts with the largest goodput, from the noise, speeds and merge costs of :attr:`last_ranks`.

        :func:`jaxche.reports.advise` has the equations and their limits. No round has more batches than
        the longest epoch of these rounds.

        Args:
          max_anchor: largest number of steps of the slowest replica between two merges.

        Returns:
          An :class:`~jaxche.reports.Advice`; its ``repr`` is a table.

        Raises:
          ValueError: the history has no noise (a run without ``scaling=``), the noise is infinite, or a replica took
            no step.
        """
        return advise_from(self.last_ranks, max_anchor)

    def plot(self) -> Any:
        """Plot :attr:`last_ranks`.

        The panels are a timeline of the last rounds (compute, wait and merge of each rank), counts and anchor (the
        steps of the slowest rank), efficiency, the two drifts, the loss by examples and by time, the metrics, the
        gradient noise of a run with scaled learning rates, and the memory, if it was measured.

        Returns:
          A matplotlib ``Figure`` with the width of a notebook.

        Raises:
          ImportError: matplotlib is missing: ``pip install 'jaxche[plot]'``.
          ValueError: the history has no rounds.
        """
        return draw(self.last_ranks, self.memory)


class ReadRecord(NamedTuple):
    """The rounds of a file, the numbers of damaged lines, and the number of an incomplete last line."""

    rounds: list[RoundInfo]
    damaged: list[int]
    unfinished: list[int]


def read_record(data: bytes) -> ReadRecord:
    """Read the lines of :meth:`History.to_json`; a damaged line does not affect the others."""
    *lines, rest = data.split(b"\n")
    found = ReadRecord([], [], [])
    for number, line in enumerate([*lines, *filter(None, [rest])], 1):
        try:
            info = _round_info(json.loads(line.decode()))
            # An evaluation at the end of a run writes the last round a second time.
            if found.rounds and _is_evaluated(found.rounds[-1], info):
                del found.rounds[-1]
            found.rounds.append(info)
        except (ValueError, TypeError):
            begun = number > len(lines) and line.startswith(b"{") and b"\0" not in line and line.isascii()
            (found.unfinished if begun else found.damaged).append(number)
    return found


def _is_evaluated(before: RoundInfo, info: RoundInfo) -> bool:
    """Whether the record of a round is that of the line before it, with the results of an evaluation."""
    return info.round == before.round and replace(info, validation=before.validation) == before


def warn_of_damage(name: str, record: ReadRecord) -> None:
    """Log the number of damaged lines in the file ``name``."""
    if lost := len(record.damaged):
        lines = "1 damaged line is" if lost == 1 else f"{lost} damaged lines are"
        _log.warning("%s: %s left out of the record (the first is line %s)", name, lines, record.damaged[0])


def _rows(history: History, rounds: Iterable[RoundInfo]) -> list[dict[str, Any]]:
    """The rows of some of the rounds, with the columns of all."""
    keys = ("round", "epoch", "counts", "loss", "sync_ms", "efficiency", "drift")
    scaled, measured, evaluated = False, dict[str, None](), dict[str, None]()
    for info in history:
        scaled = scaled or is_scaled([info])
        measured |= dict.fromkeys(info.metrics)
        evaluated |= dict.fromkeys(info.validation)
    if scaled:
        keys += ("effective_batch", "noise", "gain", "lr_factor", "progress")
    found = []
    for info in rounds:
        row = {key: getattr(info, key) for key in keys} | {"wait_ms": info.wait_ms, "ms": info.period_ms}
        # A metric may have the name of another column.
        row |= {f"metric {name}" if name in row else name: info.metrics.get(name, math.nan) for name in measured}
        row |= {f"validation_{name}": info.validation.get(name, math.nan) for name in evaluated}
        found.append(row)
    return found


def text_rows(history: History, last: int) -> list[list[str]]:
    """The titles and the last rows of a history as text."""
    rows = _rows(history, history[-last:])
    return [list(rows[0]), *([_text(value, key) for key, value in row.items()] for row in rows)]


def _text(value: Any, key: str) -> str:
    if isinstance(value, tuple):
        return " ".join(_text(v, key) for v in value[:8]) + (" ..." if len(value) > 8 else "")
    if key.startswith("validation_") and math.isnan(value):
        return "-"
    if key in _TIMES:
        return f"{value:.1f}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _round_info(values: Any) -> RoundInfo:
    """A round from the JSON object of its line."""
    if not isinstance(values, dict) or not _REQUIRED <= values.keys() <= _TYPES.keys():
        raise ValueError("not a round")
    if not isinstance(values["round"], int):
        raise ValueError("not the number of a round")
    return RoundInfo(**{name: _read(_TYPES[name], value) for name, value in values.items()})


def _read(kind: str, value: Any) -> Any:
    """The inverse of ``plain`` for a field of this type."""
    if isinstance(value, dict):
        return {k: _read("float", v) for k, v in value.items()}
    if isinstance(value, list):
        return tuple(_read("float" if "float" in kind else kind, v) for v in value)
    return (math.nan if value is None else float(value)) if kind == "float" else value
