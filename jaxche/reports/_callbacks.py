"""Callbacks of fit that show or log rounds: a live plot, TensorBoard, Weights & Biases, the profiler."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxche.reports._history import History
from jaxche.reports._round_info import RoundInfo


class LivePlot:
    """A callback that redraws the picture of a run in a notebook while it trains.

    Drawing takes about half a second, in which nobody trains and no round is on the clock.

    Args:
      every_s: seconds from one drawing to the next.

    Raises:
      ImportError: IPython is not installed; the message says what to do then.
      ValueError: ``every_s`` that is not above 0.

    Example:
      >>> import jax.numpy as jnp, numpy as np, optax
      >>> import jaxche
      >>> data = jaxche.Batches(np.ones((12, 2), np.float32), batch_size=2)
      >>> trainer = jaxche.Trainer(lambda w, x: jnp.mean((x @ w - 1.0) ** 2), optax.sgd(0.1))
      >>> live = jaxche.LivePlot()
      >>> state, history = trainer.fit(trainer.init(jnp.zeros(2)), data, callbacks=[live], progress=False)
      Figure(...)
      >>> live.draw()  # with the rounds since the last drawing; a notebook replaces the first picture
      Figure(...)
    """

    def __init__(self, every_s: float = 2.0):
        try:
            from IPython import display
        except ImportError as error:
            raise ImportError(
                "LivePlot draws in notebooks, and IPython is missing; write: pip install ipykernel, or draw at the "
                "end: history.plot().savefig('history.png')"
            ) from error
        self._display = display.display
        if not every_s > 0:
            raise ValueError(f"every_s={every_s!r} must be above 0; write e.g. every_s=2.0")
        self._every_s = every_s
        self._handle: Any = None
        self._drawn = float("-inf")
        self._history = History()

    def __call__(self, state: Any, info: RoundInfo) -> None:
        """Takes a round; draws when it is time."""
        self._history.append(info)
        if time.perf_counter() - self._drawn >= self._every_s:
            self.draw()

    def draw(self) -> None:
        """Draw what there is now, in the place of the last picture."""
        figure = self._history.plot()
        if self._handle is None:
            self._handle = self._display(figure, display_id=True)
        else:
            self._handle.update(figure)
        self._drawn = time.perf_counter()


_RANKS = 16


def scalars(info: RoundInfo) -> dict[str, float]:
    """A round as named numbers, those that are not finite left out.

    Args:
      info: the round.

    Returns:
      What loggers write: ``loss``, the loss function's metrics, and what the round cost, as ``round/...``; steps and
      waits of each rank, of up to sixteen.
    """
    found = {"loss": info.loss, **info.metrics}
    names = ("efficiency", "sync_ms", "period_ms", "drift", "drift_dir", "anchor", "examples")
    found |= {f"round/{name}": getattr(info, name) for name in names}
    if math.isfinite(info.progress):
        scaling = ("noise", "gain", "lr_factor", "progress", "effective_batch")
        found |= {f"scaling/{name}": getattr(info, name) for name in scaling}
    for rank in range(min(len(info.counts), _RANKS)):
        found |= {f"steps/rank{rank}": info.counts[rank], f"wait_ms/rank{rank}": info.wait_ms[rank]}
    return {name: float(value) for name, value in found.items() if math.isfinite(value)}


class TensorBoardLogger:
    """A callback that writes every round for TensorBoard, on rank 0.

    The step is the number of examples trained on, so that runs of different batches can be compared; times of day are
    written too.

    Args:
      folder: for the event files; ``tensorboard --logdir`` reads them.

    Raises:
      ImportError: tensorboardX is missing: ``pip install 'jaxche[tensorboard]'``.

    Example:
      >>> import tempfile
      >>> import jax.numpy as jnp, numpy as np, optax
      >>> import jaxche
      >>> data = jaxche.Batches(np.ones((64, 2), np.float32), batch_size=2)
      >>> trainer = jaxche.Trainer(lambda w, x: jnp.mean((x @ w - 1.0) ** 2), optax.sgd(0.1), policy="sync")
      >>> folder = Path(tempfile.mkdtemp())
      >>> logger = jaxche.reports.TensorBoardLogger(folder)
      >>> state, _ = trainer.fit(trainer.init(jnp.zeros(2)), data, callbacks=[logger], progress=False)
      >>> len(list(folder.glob("events.*")))
      1
    """

    def __init__(self, folder: str | Path):
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise ImportError("tensorboardX is missing; write: pip install 'jaxche[tensorboard]'") from error
        self._writer = SummaryWriter(str(folder)) if jax.process_index() == 0 else None

    def __call__(self, state: Any, info: RoundInfo) -> None:
        """Takes a round."""
        if self._writer is not None:
            for name, value in scalars(info).items():
                self._writer.add_scalar(name, value, state.examples)
            self._writer.flush()


class WandbLogger:
    """A callback that writes every round to Weights & Biases, on rank 0.

    Args:
      options: for ``wandb.init``, e.g. ``project="digits"`` or ``mode="offline"``.

    Raises:
      ImportError: wandb is missing: ``pip install 'jaxche[wandb]'``.

    Example:
      >>> import tempfile
      >>> import jax.numpy as jnp, numpy as np, optax
      >>> import jaxche
      >>> data = jaxche.Batches(np.ones((64, 2), np.float32), batch_size=2)
      >>> trainer = jaxche.Trainer(lambda w, x: jnp.mean((x @ w - 1.0) ** 2), optax.sgd(0.1), policy="sync")
      >>> logger = jaxche.reports.WandbLogger(project="digits", mode="offline", dir=tempfile.mkdtemp())
      >>> state, _ = trainer.fit(trainer.init(jnp.zeros(2)), data, callbacks=[logger], progress=False)
      >>> import wandb
      >>> wandb.run.summary["epoch"]
      0
      >>> wandb.finish()
    """

    def __init__(self, **options: Any):
        try:
            import wandb
        except ImportError as error:
            raise ImportError("wandb is missing; write: pip install 'jaxche[wandb]'") from error
        self._run = wandb.init(**options) if jax.process_index() == 0 else None

    def __call__(self, state: Any, info: RoundInfo) -> None:
        """Takes a round."""
        if self._run is not None:
            line = scalars(info) | {"round": info.round, "epoch": info.epoch}
            # Otherwise a line waits for the next one, and the last is lost with the process.
            self._run.log(line, step=state.examples, commit=True)


class profile:
    """A callback that records some rounds as a Perfetto trace: what each device did, microsecond by microsecond.

    The first rounds compile and find the cadence, so later ones tell more. Every process writes the trace of its own
    devices into a folder of its own. Where training may end before the last of the rounds, or fail, train inside
    ``with jaxche.reports.profile(...) as recorder:``, which ends the recording too.

    Args:
      folder: for the trace; open ``perfetto_trace.json.gz`` in it at https://ui.perfetto.dev, or point ``tensorboard
        --logdir`` with its profile plugin at the folder.
      rounds: the rounds to record, one after another, e.g. ``range(5, 8)``; from 1, because a callback first hears of
        round 0 when it is over.

    Raises:
      ValueError: rounds that are not one after another, or round 0.

    Example:
      >>> import tempfile
      >>> import jax.numpy as jnp, numpy as np, optax
      >>> import jaxche
      >>> data = jaxche.Batches(np.ones((64, 2), np.float32), batch_size=2)
      >>> trainer = jaxche.Trainer(lambda w, x: jnp.mean((x @ w - 1.0) ** 2), optax.sgd(0.1), policy="sync")
      >>> recorder = jaxche.reports.profile(tempfile.mkdtemp(), rounds=range(1, 3))
      >>> state, _ = trainer.fit(trainer.init(jnp.zeros(2)), data, callbacks=[recorder], progress=False)
      >>> recorder.path.name
      'perfetto_trace.json.gz'
    """

    def __init__(self, folder: str | Path, rounds: Sequence[int] = range(5, 8)):
        numbers = list(rounds)
        if not numbers or numbers != list(range(numbers[0], numbers[-1] + 1)) or numbers[0] < 1:
            raise ValueError(f"rounds={rounds!r} must be rounds from 1, one after another; write rounds=range(5, 8)")
        process = f"process{jax.process_index()}" if jax.process_count() > 1 else ""
        self._folder, self._first, self._last = Path(folder) / process, numbers[0], numbers[-1]
        self._recording = False

    @property
    def path(self) -> Path | None:
        """The trace, or None as long as there is none."""
        return max(self._folder.glob("**/perfetto_trace.json.gz"), default=None)

    def __call__(self, state: Any, info: RoundInfo) -> None:
        """Starts before the first of the rounds and stops after the last."""
        if not self._recording and self._first - 1 <= info.round < self._last:
            jax.profiler.start_trace(str(self._folder), create_perfetto_trace=True)
            self._recording = True
        elif info.round >= self._last:
            self._stop()

    def __enter__(self) -> profile:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._recording:
            jax.profiler.stop_trace()
            self._recording = False
