"""The one program in which replicas meet: trees, times, counts and losses in the same all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxche.training._counts import are_schedules, counts_of, with_counts
from jaxche.training._meeting import AXIS, Meeting
from jaxche.training._merging import DIFFERS, HOST_COLUMNS, Merging, Rules
from jaxche.training._programs import Carry, Local
from jaxche.training._scaling import Scaled


class Merged(NamedTuple):
    """Result of a merge: each local replica's next state and the table every host sees alike."""

    locals: tuple[Local, ...]
    table: np.ndarray  # [R, len(HOST_COLUMNS) + 3 + metrics]
    drift: tuple[float, float]
    scaled: Scaled = Scaled()
    squares: tuple[float, ...] = (0.0, 0.0, 0.0)  # what the drift is made of
    finite: bool = True  # whether the merge itself made nothing NaN or infinite
    pending: int = 0  # batches that no update of MultiSteps has counted, where gradients are averaged


class Merge:
    """Merge over the ``replica`` axis, by one ``psum``.

    The program is manual over ``replica`` and automatic within a replica: norms, the outer optimizer and the update on
    merged gradients see whole arrays however they are cut. Only the sum itself runs on pieces.

    Args:
      meeting: the mesh of all replicas and the way there.
      rules: what is averaged, and how.
      local: one replica's :class:`Local`, for its shapes.
    """

    def __init__(self, meeting: Meeting, rules: Rules, local: Local):
        self._meeting, self._compiled = meeting, False
        within = Merging(meeting, rules, local)
        average, opt_state, scaling = rules.average, rules.opt_state, rules.scaling
        # Optimizer states that stay with their replica never enter the global program.
        if average == "parameters":
            self._common = ("params", "model_state", "outer_state")
            self._sent = ("params", "model_state", "opt_state")[: 3 if opt_state == "average" else 2]
            made = ("params", "model_state", "outer_state", *(("opt_state",) if opt_state != "local" else ()))
            schedules = are_schedules(local.opt_state)  # one for each count
            self._merges_counts = bool(schedules) and (any(schedules) or opt_state == "average")
        else:
            self._common = ("params", "model_state", "outer_state", "opt_state")
            self._sent = ("grads", "model_state")
            made, self._merges_counts = self._common, False
        made = (*made, "counts") if self._merges_counts else made
        if scaling is not None:
            compared = ("opt_state",) if average == "parameters" and scaling.preconditioned else ()
            self._common = (*self._common, "noise", "progress", *compared)
            made = (*made, "noise", "progress")
        specs = (P(AXIS), P(AXIS), P(AXIS), P(AXIS))
        mapped = jax.shard_map(
            within.parameters if average == "parameters" else within.gradients,
            mesh=meeting.mesh,
            in_specs=specs,
            out_specs=(P(AXIS), P(), P()),
            axis_names={AXIS},
            check_vma=False,
        )
        trees = local._asdict() | {"counts": counts_of(local.opt_state)}
        merged = {name: meeting.shardings(name, trees[name]) for name in made}
        everywhere = NamedSharding(meeting.mesh, P())
        # A carry's trees have the shapes of the merged ones and give their buffers to them. Gradient accumulators
        # of low-precision parameters do not: they are float32.
        self._program = jax.jit(
            mapped,
            donate_argnums=1 if average == "parameters" else (),
            out_shardings=(merged, everywhere, everywhere),
        )

    def __call__(self, starts: Sequence[Local], carries: Sequence[Carry], rows: np.ndarray) -> Merged:
        """Merge the replicas of this process with all others and wait for the result.

        Args:
          starts: each local replica's :class:`Local` at the start of the round.
          carries: each local replica's carry at its end.
          rows: ``[local replicas, len(HOST_COLUMNS)]`` host numbers.
        """
        arguments = self.arguments(starts, carries, rows)
        if self._meeting.group.elastic and not self._compiled:
            # So that nobody waits in a collective while others compile: its patience is short there.
            self._program.lower(*arguments).compile()
            self._meeting.group.barrier()
            self._compiled = True
        with self._meeting.group.collective():
            merged, table, report = self._program(*arguments)
            # Waiting here is part of the contract: two programs with collectives in flight can deadlock the CPU client.
            table, report = one_row_each(np.asarray(table)), np.asarray(report).tolist()
        parts = self._meeting.unstack(merged)
        locals_ = tuple(_next(carry, part) for carry, part in zip(carries, parts, strict=True))
        scaled, squares = Scaled(*report[7:]), tuple(report[2:5])
        return Merged(locals_, table, (report[0], report[1]), scaled, squares, report[5] == 1, int(report[6]))

    def arguments(self, starts: Sequence[Local], carries: Sequence[Carry], rows: np.ndarray) -> tuple[Any, ...]:
        """What the program is called with."""
        stack = self._meeting.stack
        # Of the same shapes as what is merged, but no result can take its buffers: it is not donated.
        measured = [_present(carry, "sums", "not_finite", "tracked", "scaled") for carry in carries]
        common = [{name: getattr(local, name) for name in self._common} for local in starts]
        if self._merges_counts:
            common = [tree | {"counts": counts_of(start.opt_state)} for tree, start in zip(common, starts, strict=True)]
            if "opt_state" not in self._sent:  # whose buffers are donated: its counts are not passed a second time
                measured = [m | {"counts": counts_of(c.opt_state)} for m, c in zip(measured, carries, strict=True)]
        return (
            stack(common),
            stack([{name: getattr(carry, name) for name in self._sent} for carry in carries]),
            stack(measured),
            self._meeting.rows(rows),
        )


def _present(carry: Carry, *names: str) -> dict[str, Any]:
    found = {name: getattr(carry, name) for name in names}
    return {name: tree for name, tree in found.items() if tree is not None}


def _next(carry: Carry, merged: dict[str, Any]) -> Local:
    """What a replica goes on with: the merged trees, and its own optimizer state where it keeps that."""
    trees = {"opt_state": carry.opt_state} | merged
    counts = trees.pop("counts", None)
    return Local(**trees) if counts is None else Local(**trees | {"opt_state": with_counts(trees["opt_state"], counts)})


def one_row_each(table: np.ndarray) -> np.ndarray:
    """``[R, columns]`` from a row per device: the processes of an island wait for their slowest, and stop together."""
    rows = table.max(axis=1)
    # Processes of one island that planned differently must not look like one that agrees with itself.
    plan = slice(HOST_COLUMNS.index("plan_high"), HOST_COLUMNS.index("plan_low") + 1)
    differ = (table[:, :, plan] != table[:, :1, plan]).any(axis=(1, 2))
    rows[differ, plan] = DIFFERS
    return rows
