"""The configuration of checkpoints."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Checkpoints:
    """Where and how often a run is saved; ``trainer.fit(..., checkpoints=...)`` goes on from the newest complete one.

    A checkpoint holds the merged parameters and model state, every replica's optimizer state, the outer optimizer's,
    noise and progress, the cadence, and the place in the data. Saving copies the arrays and writes while training goes
    on, and the next one waits for it: what a run can lose is the round it is in and the one before; with ``durable``
    the round it is in. A file that is damaged later costs one checkpoint more. One that was not finished does not
    count. In a run of many processes all of them write, into one folder that all see.

    Training goes on bit for bit where there are as many replicas as before. With another number, each starts with the
    mean of the saved optimizer states (of what is not a float, the first replica's), and the cadence measures anew
    from the saved anchor; the noise scale goes on, and where there is but one replica before or after, its next
    gradient is not compared with an earlier one. No batch is trained on twice or left out: the place in the data does
    not depend on who reads.

    Plain Orbax opens the parameters: ``ocp.StandardCheckpointer().restore(folder / "12" / "params")``. The record of
    the rounds is beside them, in ``history.jsonl``.

    Args:
      folder: for the checkpoints of one run.
      every: rounds between two of them. The last round, and one that a stop was asked for in, is always saved.
      keep: how many of the newest to keep.
      durable: whether training waits until each is written. Not in an elastic run, which waits for nobody who dies.

    Raises:
      ValueError: ``every`` or ``keep`` below 1; and in ``trainer.fit``, ``durable`` in an elastic run.

    References:
      Orbax, ``CheckpointManager``.

    Example:
      >>> import tempfile, jaxche, jax.numpy as jnp, numpy as np, optax
      >>> data = jaxche.Batches(np.ones((12, 2), np.float32), batch_size=2)
      >>> def train(folder):
      ...     trainer = jaxche.Trainer(lambda w, x: jnp.mean((x @ w - 1.0) ** 2), optax.adam(0.1), policy="sync")
      ...     state = trainer.init(jnp.zeros(2))
      ...     return trainer.fit(state, data, epochs=2, progress=False, checkpoints=jaxche.Checkpoints(folder, every=3))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     state, history = train(folder)
      ...     again, record = train(folder)  # finds all done
      >>> again.epoch, len(record) == len(history), bool(jnp.all(again.params == state.params))
      (2, True, True)
    """

    folder: str | os.PathLike[str]
    every: int = 1
    keep: int = 3
    durable: bool = False

    def __post_init__(self) -> None:
        if "://" in os.fspath(self.folder):
            raise ValueError(
                f"folder={os.fspath(self.folder)!r} is not a folder of this system; mount the bucket on every machine "
                "and give the folder where it is, e.g. folder='/mnt/bucket/run'"
            )
        for name in ("every", "keep"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number of at least 1; write {name}=3")
