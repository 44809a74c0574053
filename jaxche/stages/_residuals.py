"""What the backward of a function needs of its forward, without what is there already."""

from __future__ import annotations

from typing import Any

import jax


class Residuals:
    """Takes apart what ``jax.vjp`` gives, in the forward's program, and puts it together again in the backward's.

    A parameter, the input or the output as an output of its own would be a copy: of these only the place is noted.

    Example:
      >>> import jax.numpy as jnp
      >>> w, x, residuals = jnp.array(3.0), jnp.array(2.0), Residuals()
      >>> y, pull = jax.vjp(lambda w, x: jnp.sin(w * x), w, x)
      >>> kept = residuals.take(pull, params=w, x=x)
      >>> len(kept), residuals.uses("x")
      (1, True)
      >>> [round(float(g), 2) for g in residuals.give(kept, params=w, x=x)(jnp.array(1.0))]
      [1.92, 2.88]
    """

    def __init__(self) -> None:
        self._sources: list[tuple[str, int]] = []
        self._structure: Any = None

    def take(self, pull: Any, **there: Any) -> list[Any]:
        """The leaves of a pullback that are not among the leaves of the named trees."""
        known = {id(leaf): (name, i) for name, tree in there.items() for i, leaf in enumerate(jax.tree.leaves(tree))}
        leaves, self._structure = jax.tree.flatten(pull)
        residuals: list[Any] = []
        self._sources = []
        for leaf in leaves:
            if id(leaf) not in known:
                known[id(leaf)] = ("residuals", len(residuals))
                residuals.append(leaf)
            self._sources.append(known[id(leaf)])
        return residuals

    def give(self, residuals: Any, **there: Any) -> Any:
        """The pullback, from what :meth:`take` gave and the same trees."""
        leaves = {name: jax.tree.leaves(tree) for name, tree in (there | {"residuals": residuals}).items()}
        return jax.tree.unflatten(self._structure, [leaves[name][i] for name, i in self._sources])

    def uses(self, name: str) -> bool:
        """Whether the backward needs a leaf of this tree."""
        return any(source == name for source, _ in self._sources)
