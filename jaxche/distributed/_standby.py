"""A process that waits to take a place in a run that is under way."""

from __future__ import annotations

import jax

from jaxche.distributed._group import regroup
from jaxche.distributed._liveness import live_again, lives

# The number of this process in its place, from 1, while it waits; None once it takes part.
_incarnation: int | None = None


def stand_by(process: int, life: int) -> None:
    """Take the place of a process that died: alone, until ``Trainer.fit`` joins the others at the end of a round.

    Args:
      process: the number of this process.
      life: which one this is in that place, from 1.

    Example:
      >>> import jax
      >>> life = 1  # as the store of the run counts them
      >>> if life > 1:
      ...     stand_by(jax.process_index(), life)
    """
    global _incarnation
    _incarnation = life
    regroup({process: lives()[process]}, f"waiting/{process}/{life}")


def come_back() -> None:
    """Stand by for this process's own place, which the others go on without; they let it in like any other."""
    stand_by(jax.process_index(), live_again())


def stands_by() -> bool:
    """Whether this process has still to join a run that is under way."""
    return _incarnation is not None


def waiting_as() -> int | None:
    """The incarnation under which this process waits, or None."""
    return _incarnation


def take_part() -> None:
    """This process has joined."""
    global _incarnation
    _incarnation = None
