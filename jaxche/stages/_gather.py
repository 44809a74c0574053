"""Many buffers written by few system calls, to a file or to a socket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

_MOST_PARTS = 512  # a system takes 1024 at most


def write_all(write: Callable[[Sequence[memoryview]], int], parts: Sequence[Any]) -> None:
    """Write buffers one after the other, the small ones with what follows them.

    In a socket a packet of its own would wake the reader once more; in a file a call of its own ends on a page that the
    next one has to find again, and what follows lies in smaller pieces.

    Args:
      write: writes the beginning of what it is given and says how many bytes, such as ``socket.sendmsg``.
      parts: contiguous buffers.
    """
    left = [memoryview(part).cast("B") for part in parts if len(part)]
    while left:
        written = write(left[:_MOST_PARTS])
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if left:
            left[0] = left[0][written:]
