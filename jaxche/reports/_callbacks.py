"""Callbacks of ``fit``: a live plot, TensorBoard, Weights & Biases, and the profiler."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxche.messages import positive
from jaxche.reports._history import History
from jaxche.reports._round_info import RoundInfo

_log = logging.getLogger("jaxche")
# The largest share of the time that a live plot may take.
_DRAWING = 0.1
# Loggers get the steps and waits of at most this many ranks.
_RANKS = 16


class LivePlot:
    """A callback that updates the plot of a run in a notebook during training.

    An update takes about half a second, for which training waits; the times of rounds exclude it. Slow updates come
    less often, so that they take at most a tenth of the time. Outside a notebook it draws nothing, and one line in the
    log says so.

    Args:
      every_s: the least number of seconds between updates.

    Raises:
      ValueError: ``every_s`` is not positive.

    Example:
      >>> import jax.numpy as jnp, numpy as np, optax
      >>> import jaxche
      >>> data = jaxche.Batches(np.ones((12, 2), np.float32), batch_size=2)
      >>> trainer = jaxche.Trainer(lambda w, x: jnp.mean((x @ w - 1.0) ** 2), optax.sgd(0.1))
      >>> live = jaxche.LivePlot()
      >>> state, history = trainer.fit(trainer.init(jnp.zeros(2)), data, callbacks=[live], progress=False)
      >>> live.draw()  # with the rounds since the last drawing; a notebook replaces the first picture
    """

    def __init__(self, every_s: float = 2.0):
        self._display = _notebook_display()
        if self._display is None:
            _log.warning(
                "LivePlot draws in notebooks, and this is none; draw at the end: history.plot().savefig('history.png')"
            )
        self._every_s = positive("every_s", every_s, "every_s=2.0", whole=False)
        self._handle: Any = None
        self._due = float("-inf")  # the time of the next update
        self._history = History()

    def __call__(self, state: Any, info: RoundInfo) -> None:
        """Add a round, and draw if an update is due."""
        self._history.append(info)
        if time.perf_counter() >= self._due:
            self.draw()

    def draw(self) -> None:
        """Draw all rounds, in place of the last plot."""
        if self._display is None:
            return
        began = time.perf_counter()
        figure = self._history.plot()
        if self._handle is None:
            self._handle = self._display(figure, display_id=True)
        else:
            self._handle.update(figure)
        now = time.perf_counter()
        self._due = now + max(self._every_s, (now - began) * (1 / _DRAWING - 1))


def _notebook_display() -> Any:
    """The function that displays in the notebook of this process, or None without a notebook."""
    try:
        from IPython import display, get_ipython
    except ImportError:
        return None
    return display.display if hasattr(get_ipython(), "kernel") else None


def scalars(info: RoundInfo) -> dict[str, float]:
    """The finite numbers of a round by name: loss, metrics, validation and costs, steps and waits of up to 16 ranks."""
    # A loss function may return a part of its loss by the same name.
    found = {"loss": info.loss} | {"metric/loss" if name == "loss" else name: x for name, x in info.metrics.items()}
    found |= {f"validation/{name}": value for name, value in info.validation.items()}
    names = ("efficiency", "sync_ms", "period_ms", "drift", "drift_dir", "anchor", "examples")
    found |= {f"round/{name}": getattr(info, name) for name in names}
    if math.isfinite(info.progress):
        scaling = ("noise", "gain", "lr_factor", "progress", "effective_batch")
        found |= {f"scaling/{name}": getattr(info, name) for name in scaling}
    for rank in range(min(len(info.counts), _RANKS)):
        found |= {f"steps/rank{rank}": info.counts[rank], f"wait_ms/rank{rank}": info.wait_ms[rank]}
    return {name: float(value) for name, value in found.items() if math.isfinite(value)}


class Logger:
    """A callback that logs rounds, called as often as ``fit(log_every=)`` says; other callbacks get every round.

    Derive a logger of your own from it.

    Example:
      >>> import jax.numpy as jnp, numpy as np, optax
      >>> import jaxche
      >>> class Printer(jaxche.reports.Logger):
      ...     def __call__(self, state, info):
      ...         print(info.steps_done)
      >>> data = jaxche.Batches(np.ones((24, 2), np.float32), batch_size=2)
      >>> trainer = jaxche.Trainer(lambda w, x: jnp.mean((x @ w - 1.0) ** 2), optax.sgd(0.1), policy="sync")
      >>> state = trainer.init(jnp.zeros(2))
      >>> state, _ = trainer.fit(state, data, callbacks=[Printer()], log_every=12, progress=False)
      12
    """

    def __call__(self, state: Any, info: RoundInfo) -> Any:
        """Log a round; each logger does this in its own way."""
        raise NotImplementedError(f"{type(self).__name__} has no __call__; write def __call__(self, state, info): ...")


class TensorBoardLogger(Logger):
    """A callback that logs rounds to TensorBoard, on rank 0.

    The step is the number of training examples, so that runs with different batch sizes can be compared. Events also
    have their wall time.

    Args:
      folder: directory of the event files, for ``tensorboard --logdir``.

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
        """Log a round."""
        if self._writer is not None:
            for name, value in scalars(info).items():
                self._writer.add_scalar(name, value, state.examples)
            self._writer.flush()


class WandbLogger(Logger):
    """A callback that logs rounds to Weights & Biases, on rank 0.

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
        """Log a round."""
        if self._run is not None:
            line = scalars(info) | {"round": info.round, "epoch": info.epoch}
            # Otherwise wandb holds a line until the next one, and loses the last line when the process ends.
            self._run.log(line, step=state.examples, commit=True)


class profile:
    """A callback that records a Perfetto trace of some rounds, with the operations of each device.

    The first rounds compile and adapt the cadence, so record later ones. Each process writes the trace of its devices
    to its own subdirectory. If training may end or fail before the last of these rounds, train inside
    ``with jaxche.reports.profile(...) as recorder:``, which stops the recording.

    Args:
      folder: directory of the trace. Open its ``perfetto_trace.json.gz`` at https://ui.perfetto.dev, or the directory
        with ``tensorboard --logdir`` and the profile plugin.
      rounds: consecutive rounds to record, e.g. ``range(5, 8)``. Round 0 cannot be recorded, because the first call of
        a callback is at its end.

    Raises:
      ValueError: the rounds are not consecutive, or include round 0.

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
        numbers = list(rounds) if isinstance(rounds, Iterable) else []
        if not numbers or numbers != list(range(numbers[0], numbers[-1] + 1)) or numbers[0] < 1:
            raise ValueError(f"rounds={rounds!r} must be rounds from 1, one after another; write rounds=range(5, 8)")
        process = f"process{jax.process_index()}" if jax.process_count() > 1 else ""
        self._folder, self._first, self._last = Path(folder) / process, numbers[0], numbers[-1]
        self._recording = False

    @property
    def path(self) -> Path | None:
        """The file of the trace, or None before it is written."""
        return max(self._folder.glob("**/perfetto_trace.json.gz"), default=None)

    def __call__(self, state: Any, info: RoundInfo) -> None:
        """Start the trace before the first of the rounds and stop it after the last."""
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
