"""The picture of a run while it trains, in a notebook."""

from __future__ import annotations

import time
from typing import Any

from jaxche.training._history import History
from jaxche.training._state import ReplicaState, RoundInfo


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

    def __call__(self, state: ReplicaState, info: RoundInfo) -> None:
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
