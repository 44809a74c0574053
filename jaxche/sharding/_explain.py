"""The cost of a sharded step: bytes that a device keeps and sends, read from the compiled program."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxche.averaging import sum_dtype
from jaxche.messages import aligned, html_table
from jaxche.sharding._hlo import Collective, collectives
from jaxche.sharding._strategy import REPLICA, SHARD, Layout, Leaf

_SHOWN_LEAVES = 12
_UNITS = {"": 1, "B": 1} | {f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)}
_UNITS |= {f"{p}IB": 1024**i for i, p in enumerate("KMGT", 1)}
_HEAD = ("", "whole", "a device", "share")
_NAMES = {
    "params": "parameters",
    "gradients": "gradients",
    "opt_state": "optimizer state",
    "inputs": "batch and model state",
    "temporaries": "activations, other temporaries",
    "peak": "in all, as XLA plans it",
}


@dataclass(frozen=True, eq=False, repr=False)
class Explanation:
    """The cost of a sharded step for each device; its ``repr`` is a table.

    Attributes:
      strategy: the strategy.
      axes: devices along each axis of the mesh.
      whole: bytes on one device without sharding: ``params``, ``gradients``, ``opt_state``, ``inputs`` (batch and
        model state).
      per_device: bytes of the same on each device, and ``temporaries``: activations, gathered parameters and other
        arrays that XLA allocates during a step, without the gradients.
      peak: all bytes that a device needs, by ``memory_analysis()``: arguments, results that do not reuse the buffer of
        an argument, and temporaries.
      collectives: the collectives of the compiled step.
      theory: bytes that a device sends in a step by the formula of the strategy, for sliced and whole parameters.
      leaves: the layout of each parameter.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from jaxche.sharding import FullShard, sharded_step
      >>> step = sharded_step(
      ...     lambda p, x: jnp.mean((x @ p) ** 2), optax.sgd(0.1), FullShard(), FullShard().mesh(jax.devices()[:2]))
      >>> costs = step.explain(jnp.zeros((8, 4)), jnp.zeros((2, 8)))
      >>> costs.whole["params"], costs.per_device["params"]
      (128, 64)
    """

    strategy: Any
    axes: dict[str, int]
    whole: dict[str, int]
    per_device: dict[str, int]
    peak: int
    collectives: tuple[Collective, ...]
    theory: float
    leaves: tuple[Leaf, ...]

    @property
    def sent(self) -> float:
        """Bytes each device sends in a step, counted in the compiled program."""
        return sum(c.sent for c in self.collectives)

    @property
    def replicated(self) -> tuple[Leaf, ...]:
        """The leaves that stay whole on every device although the strategy cuts others."""
        return tuple(leaf for leaf in self.leaves if leaf.why)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The table as data: ``what``, ``whole`` and ``per_device`` bytes; ``whole`` is None if not known."""
        rows = [{"what": w, "whole": self.whole.get(w), "per_device": size} for w, size in self.per_device.items()]
        return [*rows, {"what": "peak", "whole": None, "per_device": self.peak}]

    def __repr__(self) -> str:
        return "\n".join([self._title(), aligned([_HEAD, *self._cells()], left=1), *self._notes()])

    def _repr_html_(self) -> str:
        notes = "<br>".join(map(html.escape, self._notes()))
        return f"<b>{html.escape(self._title())}</b>{html_table(_HEAD, self._cells())}{notes}"

    def _title(self) -> str:
        axes = " x ".join(f"{name} {size}" for name, size in self.axes.items())
        return f"{self.strategy} on {math.prod(self.axes.values())} devices: {axes}"

    def _cells(self) -> list[list[str]]:
        cells = []
        for row in self.rows:
            whole, size = row["whole"], row["per_device"]
            share = f"{size / whole:.3f}" if whole else ""
            cells.append([_NAMES[row["what"]], "" if whole is None else show_bytes(whole), show_bytes(size), share])
        return cells

    def _notes(self) -> Iterator[str]:
        yield f"each device sends {show_bytes(self.sent)} a step, in theory {show_bytes(self.theory)}"
        by_kind = dict.fromkeys((c.kind for c in self.collectives), 0.0)
        for collective in self.collectives:
            by_kind[collective.kind] += collective.sent
        if by_kind:
            yield "  " + ", ".join(f"{kind} {show_bytes(sent)}" for kind, sent in sorted(by_kind.items()))
        kept = self.replicated
        if kept:
            size = show_bytes(nbytes([jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in kept]))
            yield f"{len(kept)} of {len(self.leaves)} parameters stay whole on every device, {size}:"
        for leaf in kept[:_SHOWN_LEAVES]:
            line = f"  {'/'.join(leaf.path)}: {leaf.why}"
            yield line if len(line) <= 100 else f"{line[:97]}..."
        if len(kept) > _SHOWN_LEAVES:
            yield f"  and {len(kept) - _SHOWN_LEAVES} more"


def explain(layout: Layout, compiled: Any, state: Any, batch: Any, accumulate: int, compute_dtype: Any) -> Explanation:
    """The cost of a compiled step, from the shapes of its state and batch."""
    memory = compiled.memory_analysis()
    whole = {
        "params": nbytes(state.params),
        "gradients": nbytes(layout.shapes),
        "opt_state": nbytes(state.opt_state),
        "inputs": nbytes((batch, state.model_state)),
    }
    per_device = {
        "params": nbytes_per_device(state.params),
        "gradients": nbytes_per_device(layout.shapes, layout.grads),
        "opt_state": nbytes_per_device(state.opt_state),
        # Each device has an equal part of the batch, and the whole model state.
        "inputs": nbytes(batch) // layout.devices + nbytes(state.model_state),
    }
    # XLA frees some gradients before it allocates others, so the temporaries may be less than all gradients.
    per_device["temporaries"] = max(memory.temp_size_in_bytes - per_device["gradients"], 0)
    return Explanation(
        strategy=layout.strategy,
        axes=dict(layout.mesh.shape),
        whole=whole,
        per_device=per_device,
        peak=(
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
            + memory.temp_size_in_bytes
        ),
        collectives=tuple(collectives(compiled.as_text() or "", layout.devices)),
        theory=bytes_in_theory(layout, accumulate, compute_dtype),
        leaves=layout.leaves,
    )


def bytes_in_theory(layout: Layout, accumulate: int = 1, compute_dtype: Any = None) -> float:
    """Bytes a device sends in a step by ring algorithms, if real parameters are gathered in ``compute_dtype``."""
    nodes, count = layout.mesh.shape.get(REPLICA, 1), layout.mesh.shape[SHARD]
    total = 0.0
    for leaf in layout.leaves:
        elements = math.prod(leaf.shape)
        size, summed = (elements * jnp.dtype(d).itemsize for d in (leaf.dtype, sum_dtype(leaf.dtype)))
        if leaf.axis is None:  # an all-reduce of the whole gradient
            total += 2 * (layout.devices - 1) / layout.devices * summed
            continue
        if layout.strategy.shards_params:  # for the forward and for the backward pass of each micro-batch
            cast = compute_dtype is not None and jnp.issubdtype(leaf.dtype, jnp.floating)
            gathered = 2 * accumulate * elements * jnp.dtype(compute_dtype if cast else leaf.dtype).itemsize
        else:
            gathered = size
        # Gathers and reduce-scatters over shard, and an all-reduce of the slices over replica.
        total += (count - 1) / count * (gathered + accumulate * summed) + 2 * (nodes - 1) / nodes * summed / count
    return total


def nbytes(tree: Any) -> int:
    """Bytes of the arrays or ``jax.ShapeDtypeStruct`` of a tree."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def nbytes_per_device(tree: Any, shardings: Any = None) -> int:
    """Bytes of a tree on one device, under ``shardings`` (None: whole) or under those of its arrays."""
    if shardings is None:
        shardings = jax.tree.map(lambda x: x.sharding, tree)

    def held(x: Any, sharding: Any) -> int:
        return math.prod(x.shape if sharding is None else sharding.shard_shape(x.shape)) * x.dtype.itemsize

    return sum(jax.tree.leaves(jax.tree.map(held, tree, shardings)))


def as_bytes(size: int | float | str) -> int:
    """Bytes of a size, a number or text such as ``"16GiB"`` or ``"500 MB"``; ValueError for anything else."""
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([A-Za-z]*)", str(size).strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or not float(match[1]) > 0:
        raise ValueError(f'memory={size!r} is not a size; write bytes or text such as "16GiB"')
    return int(float(match[1]) * unit)


def show_bytes(size: float) -> str:
    """A size as text, e.g. ``"1.5 KiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
