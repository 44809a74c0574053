"""Names of the objects of a run.

What lies in a run's folder, and who takes it away:

- ``stage-001-receives/...``: activations, gradients and losses. Their reader takes them away, but only once its own
  state after their step is saved: a reader that dies before finds them again.
- ``stage-001-state/step-...``: what stage 1 goes on from, the newest two. Stages are never more than one save apart,
  so two are enough for a step that all of them have.
- ``stage-001-finished``: the step stage 1 would go on from, for writers that come back.
- ``plan``: how the batch is cut, so that processes started differently notice.
"""

from __future__ import annotations

import re

from jaxche.protocols._base import Tag

PLAN = "plan"
_STEP = re.compile(r"/step-(\d+)")


def folder(stage: int) -> str:
    """Where a stage finds what is for it."""
    return f"stage-{stage:03d}-receives"


def key(tag: Tag) -> str:
    """Of an activation or a gradient."""
    name = f"step-{tag.step:010d}.micro-{tag.micro:05d}.{tag.direction}.from-stage-{tag.stage:03d}"
    return f"{folder(tag.target)}/{name}"


def loss_key(step: int, reader: int, writer: int) -> str:
    """Of one reader's copy of a loss."""
    return f"{folder(reader)}/step-{step:010d}.loss.from-stage-{writer:03d}"


def finished_key(stage: int) -> str:
    """Of a stage's mark."""
    return f"stage-{stage:03d}-finished"


def step(key: str) -> int:
    """The step in a key, or -1."""
    found = _STEP.search(key)
    return int(found[1]) if found else -1
