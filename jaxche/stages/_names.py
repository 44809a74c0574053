"""Names of the objects of a run.

What lies under the name of a run, and who takes it away:

- ``plan``: how the batch is cut, so that processes started differently notice.
- ``stage-001-hello``: what the process of stage 1 tells the others until they agree on the run's identity. It takes it
  away when it ends.
- ``<identity>/``: all that is of one run and of no other of the same name. The next run clears it, if it saved nothing.

What lies in there:

- ``stage-001-receives/...``: activations, gradients and losses. Their reader takes them away, but only once its own
  state after their step is saved: a reader that dies before finds them again.
- ``stage-001-state/step-...``: what stage 1 goes on from, the newest two. Stages are never more than one save apart,
  so two are enough for a step that all of them have.
- ``stage-001-finished``: the step stage 1 would go on from, for writers that come back.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from jaxche.stages._base import Tag

PLAN = "plan"
IDENTITY = re.compile(r"[0-9a-f]{32}")
_STEP = re.compile(r"/step-(\d+)")
_STATE = re.compile(r"(^|/)stage-\d+-state/step-")


def hello_key(stage: int) -> str:
    """Of what the process whose first stage this is tells the others."""
    return f"stage-{stage:03d}-hello"


def state_folder(stage: int) -> str:
    """Where the process whose first stage this is saves what it goes on from."""
    return f"stage-{stage:03d}-state"


def is_state(key: str) -> bool:
    """Whether a key is of a saved state."""
    return _STATE.search(key) is not None


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


def is_written_by(key: str, stages: Sequence[int]) -> bool:
    """Whether nobody but the process of these stages writes an object of this name."""
    ends = tuple(f".from-stage-{stage:03d}" for stage in stages)
    return key.endswith(ends) or key.startswith((f"{state_folder(stages[0])}/", *map(finished_key, stages)))
