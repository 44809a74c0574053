"""Advice on the batch as a value that shows itself."""

from __future__ import annotations

import html
from dataclasses import asdict, dataclass
from typing import Any

from jaxche.drawing import aligned, html_table, per_rank


@dataclass(frozen=True)
class Choice:
    """One way to spend a round.

    Attributes:
      counts: local steps per replica between two merges; 0 for one left out.
      batch: examples that an update is worth: those of the round when gradients are averaged, else one local batch
        times the merge's effective replicas.
      ms: length of the round.
      examples_per_second: throughput.
      efficiency: what an example is worth against one in a base batch.
      goodput: throughput times efficiency.
    """

    counts: tuple[int, ...]
    batch: float
    ms: float
    examples_per_second: float
    efficiency: float
    goodput: float


@dataclass(frozen=True, repr=False)
class Advice:
    """What :func:`~jaxche.training.advise` found; shows itself as a table.

    Attributes:
      average: what is averaged, ``"gradients"`` or ``"parameters"``.
      noise: critical batch size in examples.
      base_batch_size: examples in the batch the learning rate was tuned for.
      now: the counts of the run.
      best: the shortest round whose goodput lies within 1 % of the largest.
      choices: everything compared, by replicas and counts.

    Example:
      >>> from jaxche.training import advise
      >>> advice = advise(noise=960, base_batch_size=32, batch_size=32, ms_per_batch=[10.0, 20.0], sync_ms=5.0,
      ...                 average="gradients", now=(1, 1), max_anchor=8)
      >>> advice.best.counts, round(advice.speedup, 2)
      ((4, 2), 1.48)
    """

    average: str
    noise: float
    base_batch_size: float
    now: Choice
    best: Choice
    choices: tuple[Choice, ...]

    @property
    def speedup(self) -> float:
        """How many times as soon as now the best choice reaches a target."""
        return self.best.goodput / self.now.goodput

    @property
    def line(self) -> str:
        """The trainer's arguments for the best choice; empty where nothing is to be changed."""
        ranks = [rank for rank, n in enumerate(self.best.counts) if n]
        if self.best.counts == self.now.counts:
            return ""
        if len(ranks) == 1:
            return f"replicas=[devices[{ranks[0]}]]"
        part = "" if len(ranks) == len(self.best.counts) else f"replicas=[devices[r] for r in {ranks}], "
        if self.average == "gradients" and max(self.best.counts) == 1:
            return part + 'policy="sync"'
        anchor = min(n for n in self.best.counts if n)
        che = f"che=jaxche.ElChe(world_size={len(ranks)}, anchor={anchor}, max_anchor={anchor})"
        return f'{part}average="{self.average}", {che}'

    @property
    def summary(self) -> str:
        """One sentence."""
        text = f"gradient noise scale {_short(self.noise)} examples: "
        if len(self.best.counts) == 1:
            return (
                text + f"no multiple of the batch of {_short(self.now.batch)} is better at the same examples a second"
            )
        ranks = [rank for rank, n in enumerate(self.best.counts) if n]
        alone = len(ranks) == 1
        text += f"rank {ranks[0]} alone " if alone else f"{per_rank(self.best.counts)} steps between merges "
        if not self.line:
            return text + "(as now) reach a target as soon as any"
        return text + f"should reach a target {self.speedup:.2f} times as soon as {per_rank(self.now.counts)}"

    def rows(self) -> list[dict[str, Any]]:
        """A readable part of the choices as flat dicts: counts that double, the best of fewer replicas, now, best."""
        whole = max(_used(choice) for choice in self.choices)
        shown, least = [], 0
        for choice in self.choices:
            if _used(choice) == whole and min(n for n in choice.counts if n) >= least:
                least = 2 * min(n for n in choice.counts if n)
                shown.append(choice)
        for used in sorted({_used(choice) for choice in self.choices} - {whole}):
            shown.append(max((c for c in self.choices if _used(c) == used), key=lambda c: c.goodput))
        order = {choice.counts: choice for choice in (*shown, self.now, self.best)}
        ordered = sorted(order.values(), key=lambda c: (-_used(c), sum(c.counts)))
        notes = {self.now.counts: "now"}
        notes[self.best.counts] = ", ".join(filter(None, [notes.get(self.best.counts), "soonest"]))
        return [asdict(choice) | {"note": notes.get(choice.counts, "")} for choice in ordered]

    def table(self) -> str:
        """The rows as text, what to write, and what is not in them."""
        return "\n".join([self.summary, aligned(self._cells()), *self._remarks()])

    def __repr__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        head, *body = self._cells()
        remarks = "".join(f"<p>{html.escape(remark)}</p>" for remark in self._remarks())
        return html_table(head, body, self.summary) + remarks

    def _remarks(self) -> list[str]:
        write = [f"write: {self.line}"] if self.line else []
        if self.average == "parameters" and len(self.best.counts) > 1:
            write.append("not in these numbers: what longer rounds lose by drift")
        return write

    def _cells(self) -> list[list[str]]:
        cells = [["steps", "batch", "ms a round", "examples/s", "efficiency", "goodput/s", ""]]
        for row in self.rows():
            numbers = (f"{row['examples_per_second']:,.0f}", f"{row['efficiency']:.1%}", f"{row['goodput']:,.0f}")
            cells.append([per_rank(row["counts"]), _short(row["batch"]), f"{row['ms']:.1f}", *numbers, row["note"]])
        return cells


def _used(choice: Choice) -> int:
    return sum(n > 0 for n in choice.counts)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
