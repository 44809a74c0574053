"""A barrier for threads of several processes, which one of them can break."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

# How long to wait for a key before checking whether a process has broken the barrier.
_SLICE_MS = 500


class ThreadBarrier:
    """A barrier as ``threading.Barrier``, which threads of all members may use side by side, each with its own keys."""

    def __init__(
        self,
        client: Any,
        place: str,  # in the store, another one for each barrier
        process: int,
        members: Sequence[int],
        receive: Callable[[str, int, float], Any],  # waits for a key of a process, so many ms until TimeoutError
    ):
        self._client, self._place, self._process = client, place, process
        self._members, self._receive = members, receive
        self._uses: collections.Counter[str] = collections.Counter()
        self._own_keys: list[str] = []
        self._broken = False

    @property
    def is_broken(self) -> bool:
        """Whether a member has called :meth:`abort`."""
        if not self._broken and len(self._members) > 1:
            self._broken = bool(self._client.key_value_dir_get(f"{self._place}/aborted/"))
        return self._broken

    def wait(self, key: str, timeout_ms: float) -> None:
        """Wait for all members, which make the same calls with a key; BrokenBarrierError after :meth:`abort`."""
        deadline = time.monotonic() + timeout_ms / 1e3
        self._uses[key] += 1
        key = f"{key}.{self._uses[key]}"
        if not self._broken:
            self._set(key)
        for process in set(self._members) - {self._process}:
            self._wait_for(key, process, deadline)

    def abort(self) -> None:
        """Break the barrier: all present and later waits end with BrokenBarrierError."""
        self._broken = True
        self._set("aborted")

    def close(self) -> None:
        """Delete the keys of this process; no member may wait any more."""
        while self._own_keys:
            self._client.key_value_delete(self._own_keys.pop())

    def _set(self, key: str) -> None:
        if len(self._members) == 1:
            return
        self._own_keys.append(f"{self._place}/{key}/{self._process}")
        self._client.key_value_set(self._own_keys[-1], "", allow_overwrite=True)

    def _wait_for(self, key: str, process: int, deadline: float) -> None:
        while True:
            if self._broken:
                raise threading.BrokenBarrierError(f"{self._place} was aborted before all processes reached {key}")
            try:
                self._receive(f"{self._place}/{key}/{process}", process, _SLICE_MS)
                return
            except TimeoutError:
                if not self.is_broken and time.monotonic() > deadline:
                    raise
