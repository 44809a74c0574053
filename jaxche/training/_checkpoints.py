"""``Checkpoints``: the folder and the frequency of checkpoints."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Checkpoints:
    """Where and how often to save a run; ``trainer.fit(..., checkpoints=...)`` continues from the newest checkpoint.

    A checkpoint has the merged parameters and model state, the optimizer state of every replica and of ``outer``, noise
    and progress, the cadence, and the position in the data. A save copies the arrays and writes them while training
    continues; the next save waits for it. So a failure loses at most the current round and the one before, and with
    ``durable`` the current round only. A file that is damaged later loses one checkpoint more. Unfinished checkpoints
    are ignored. In a run of several processes all of them write into one shared folder. A save without space on the
    disk leaves its checkpoint out, with a warning; ``fit`` raises OSError if it is the last one.

    With the same number of replicas, training continues bit for bit. With another number, each replica starts from the
    mean of the saved optimizer states (values other than floats: those of the first replica), and the cadence measures
    again from the saved anchor. The noise scale continues; with a single replica before or after, its next gradient is
    not compared with an earlier one. No batch is repeated or left out, because the position in the data does not depend
    on the number of replicas.

    Plain Orbax opens the parameters: ``ocp.StandardCheckpointer().restore(folder / "12" / "params")``. The record of
    the rounds is beside them, in ``history.jsonl``.

    Args:
      folder: for the checkpoints of one run.
      every: rounds between checkpoints, unless ``fit(checkpoint_every=)`` is given. The last round, and one in which a
        stop is requested, is always saved.
      keep: number of newest checkpoints to keep.
      durable: whether training waits until each checkpoint is written. Not for elastic runs, where processes may die.

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
      ...     again, record = train(folder)  # restores the last checkpoint
      >>> again.epoch, len(record) == len(history), bool(jnp.all(again.params == state.params))
      (2, True, True)
    """

    folder: str | os.PathLike[str]
    every: int = 1
    keep: int = 3
    durable: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.folder, str | os.PathLike):
            raise ValueError(f"checkpoints={self.folder!r} is not a folder; write checkpoints='runs/mine/checkpoints'")
        if "://" in os.fspath(self.folder):
            raise ValueError(
                f"folder={os.fspath(self.folder)!r} is not a folder of this system; mount the bucket on every machine "
                "and give the folder where it is, e.g. folder='/mnt/bucket/run'"
            )
        for name in ("every", "keep"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number of at least 1; write {name}=3")
