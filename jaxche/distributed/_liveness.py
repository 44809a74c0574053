"""Which processes of an elastic run live, and waiting for one that may not."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax

# The store in which the processes of a run met. jax has no public name for it.
from jax._src import distributed as _jax_distributed

from jaxche.distributed._liveness_connections import declare_ended, ended, keep_line
from jaxche.distributed._watchdog import beat_again

# Between two looks at who lives.
_LOOK_S = 0.2
# How often a process shows that it lives, and how long a silence means that it does not. A process that is stopped for
# less holds the others up, and no more: a swap storm, a machine that is moved to another host.
_BEAT_S, _SILENT_S = 1.0, 15.0
# How long a thread may take to see that the run is over.
_JOIN_S = 10.0
# How often each process has begun, and how often it was heard of.
_LIVES, _BEATS = "jaxche/lives/", "jaxche/beats/"
# How long to wait for a key before asking whether its writer lives.
_SLICE_MS = 500


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


@contextlib.contextmanager
def merging() -> Iterator[None]:
    """What processes compute together breaks off where one of them dies.

    Raises:
      PeerLostError: instead of the many errors of the libraries in between.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        # Gloo's failures come as either.
        if jax.process_count() == 1 or not (isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error)):
            raise
        raise PeerLostError(f"the merge with the other processes broke off; did one of them die? {error}") from error


class TakenForDeadError(PeerLostError):
    """The others went on without this process, which was stopped for too long."""


class _Watch:
    """Shows that this process lives; on process 0 also looks whether the others do.

    jaxlib has a heartbeat of its own, but one that it takes for dead is ended by it as soon as it moves again.
    """

    def __init__(self) -> None:
        self._run = _jax_distributed.global_state
        self._client: Any = self._run.client
        self._begin()
        # Of each process: its life, how often it was heard of, and when a change of either was seen.
        self._heard: dict[int, tuple[int, str, float]] = {}
        self._looked, self._over = time.monotonic(), threading.Event()
        self._thread = threading.Thread(target=self._beat, name="jaxche-lives", daemon=True)
        self._thread.start()

    def _begin(self) -> None:
        own = self._run.process_id
        self.life = self._client.key_value_increment(f"{_LIVES}{own}", 1)
        self._line = keep_line(self._client, own, self.life, self._run.coordinator_address or "")

    def begin_again(self) -> None:
        """Live anew, as another, where the others take this life for over."""
        self._line.end()
        self._begin()

    def _beat(self) -> None:
        while not self._over.is_set():
            # What fails is seen where somebody waits for it.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._client.key_value_increment(f"{_BEATS}{self._run.process_id}", 1)
                if self._run.process_id == 0:
                    self._look()
            self._over.wait(_BEAT_S)

    def _look(self) -> None:
        now = time.monotonic()
        paused = now - self._looked if now - self._looked > 3 * _BEAT_S else 0.0
        self._looked = now
        # Read first: whoever beats has begun to live, and may have done so just now.
        beats = _told(self._client, _BEATS)
        counts = _told(self._client, _LIVES)
        for process, text in beats.items():
            life, known = int(counts[process]), self._heard.get(process)
            if known is None or known[:2] != (life, text):
                self._heard[process] = life, text, now
            elif paused:  # process 0 itself was stopped, and could hear nobody
                self._heard[process] = life, text, known[2] + paused
            elif now - known[2] > _SILENT_S:
                declare_ended(self._client, process, life)

    def end(self) -> None:
        """Leave the run. A thread that is in the store's client when Python ends takes the process down with it."""
        self._over.set()
        self._thread.join(_JOIN_S)
        if lives():  # jaxlib ends a process that takes leave of a store that is gone
            jax.distributed.shutdown()
        self._line.end()


_watch: _Watch | None = None


def watch_lives() -> int:
    """Begin to live, as the others see it; each process of an elastic run does so right after joining.

    Returns:
      Which life this is in the place of this process, from 1.

    Example:
      >>> import jax
      >>> if jax.process_count() > 1 and jax.config.values["jax_enable_recoverability"]:
      ...     life = watch_lives()
    """
    global _watch
    if _watch is None:
        _watch = _Watch()
    return _watch.life


def live_again() -> int:
    """A new life for this process, which others took for dead."""
    assert _watch is not None, "who was taken for dead lived"
    _watch.begin_again()
    return _watch.life


def part() -> None:
    """Leave the run, at the end of the process."""
    if _watch is not None:
        _watch.end()


def lives() -> dict[int, int]:
    """The processes that live, each with a number that changes when another takes its place; none if there is no store.

    A life is over when its line ends, or after a long silence: then it is stopped, or its machine is lost.
    """
    client: Any = _jax_distributed.global_state.client
    try:
        over = ended(client)
        counts = {process: int(text) for process, text in _told(client, _LIVES).items()}
    except jax.errors.JaxRuntimeError:
        return {}
    return {process: life for process, life in counts.items() if (process, life) not in over}


def lost(expected: Mapping[int, int]) -> list[int]:
    """Which of these lives have ended."""
    now = lives()
    return [process for process, life in expected.items() if now.get(process) != life]


def _told(client: Any, place: str) -> dict[int, str]:
    return {int(key.rpartition("/")[2]): text for key, text in client.key_value_dir_get(place)}


def await_loss(expected: Mapping[int, int], place: str) -> list[int]:
    """Which of these lives have ended, once all others are in a folder of the store.

    A broken connection is seen before a death, and where all are still there it is none.
    """
    client: Any = _jax_distributed.global_state.client
    while True:
        # Looked at first: the death of one that came in before is detected later, by the others.
        gone = lost(expected)
        here = {int(key.rpartition("/")[2]) for key, _ in client.key_value_dir_get(place)}
        if here.issuperset(expected.keys() - gone):
            return gone
        beat_again()
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
        with _unless_late():
            return client.blocking_key_value_get(key, _SLICE_MS)
        if gone := lost(expected):
            # What somebody wrote before its death counts, for all that wait.
            with _unless_late():
                return client.blocking_key_value_get(key, 1)
            raise PeerLostError(f"process {', '.join(map(str, gone))} died while others waited for it")
        if unless is not None and client.key_value_dir_get(unless):
            raise PeerLostError("a merge broke off in another process")
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody wrote {key} within {patience_ms / 1e3:g} s")
        beat_again()  # who waits does not hang


@contextlib.contextmanager
def _unless_late() -> Iterator[None]:
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
