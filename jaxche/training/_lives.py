"""Which processes of an elastic run live, as the coordination service has it, and waiting for one that may not."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax

# The store in which the processes of a run met. jax has no public name for it.
from jax._src import distributed as _jax_distributed

from jaxche.training._watched import beat

# Between two looks at who lives. A look waits for all that live, so all have the same answer.
_LOOK_S = 0.5
# How long to wait for a key before asking whether its writer lives.
_SLICE_MS = 1000


class PeerLostError(RuntimeError):
    """A merge between processes broke off, as it does when one of them dies.

    The state from before the round is intact. In an elastic run ``Trainer.fit`` goes on by itself, and this is raised
    only where what is left cannot train.

    Example:
      >>> try:
      ...     raise PeerLostError("the merge of all processes broke off; did one of them die?")
      ... except PeerLostError as error:
      ...     print(error)
      the merge of all processes broke off; did one of them die?
    """


class _Watch:
    """Asks who lives, again and again, on a thread of its own.

    The service answers when all processes that live have asked, so each of them has to, from the moment it is
    connected: also one that has not begun to train.
    """

    def __init__(self) -> None:
        self._client: Any = _jax_distributed.global_state.client
        self._everyone = list(range(_jax_distributed.global_state.num_processes))
        self.lives: dict[int, int] = {}
        self.looked = threading.Event()
        threading.Thread(target=self._look, name="jaxche-lives", daemon=True).start()

    def _look(self) -> None:
        while True:
            try:
                self.lives = self._client.get_live_nodes(self._everyone)
            except jax.errors.JaxRuntimeError:
                # Taken for dead, or the run is over.
                self.lives = {}
            self.looked.set()
            if not self.lives:
                return
            time.sleep(_LOOK_S)


_watch: _Watch | None = None


def watch_lives() -> None:
    """Begin to ask who lives; each process of an elastic run does so right after joining.

    Example:
      >>> import jax
      >>> if jax.process_count() > 1 and jax.config.values["jax_enable_recoverability"]:
      ...     watch_lives()
    """
    global _watch
    if _watch is None:
        _watch = _Watch()


def lives() -> dict[int, int]:
    """The processes that live, each with a number that changes when another takes its place."""
    watch_lives()
    assert _watch is not None
    _watch.looked.wait()
    return _watch.lives


def lost(expected: Mapping[int, int]) -> list[int]:
    """Which of these lives have ended."""
    now = lives()
    return [process for process, life in expected.items() if now.get(process) != life]


def await_loss(expected: Mapping[int, int], place: str) -> list[int]:
    """Which of these lives have ended, once all others are in a folder of the store.

    A broken connection is seen before a death, and where all are still there it is none.
    """
    client: Any = _jax_distributed.global_state.client
    while True:
        # Looked at first: one that came in and then died is missed later, by the others.
        gone = lost(expected)
        here = {int(key.rpartition("/")[2]) for key, _ in client.key_value_dir_get(place)}
        if here.issuperset(expected.keys() - gone):
            return gone
        beat()
        time.sleep(_LOOK_S)


def awaited(key: str, expected: Mapping[int, int], patience_ms: float = float("inf"), unless: str | None = None) -> str:
    """The value of a key of the store, once it is there.

    Args:
      key: to wait for.
      expected: lives without which it will not come.
      patience_ms: how long to wait.
      unless: folder of the store; as soon as something is in it, the key will not come.

    Raises:
      PeerLostError: one of them ended without writing it, or something is in the folder.
      TimeoutError: it did not come in time.
    """
    client: Any = _jax_distributed.global_state.client
    deadline = time.monotonic() + patience_ms / 1e3
    while True:
        # Looked at first: what somebody wrote before its death counts, for all that wait.
        gone = lost(expected)
        with _unless_late():
            return client.blocking_key_value_get(key, 1 if gone else _SLICE_MS)
        if gone:
            raise PeerLostError(f"process {', '.join(map(str, gone))} died while others waited for it")
        if unless is not None and client.key_value_dir_get(unless):
            raise PeerLostError("a merge broke off in another process")
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody wrote {key} within {patience_ms / 1e3:g} s")
        beat()  # who waits does not hang


@contextlib.contextmanager
def _unless_late() -> Iterator[None]:
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
