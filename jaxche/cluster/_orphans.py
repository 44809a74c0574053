"""Ends the processes of a launch whose launcher is gone, also where it was killed and could do nothing any more."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator

# Reads group numbers until its input ends, which the kernel sees to whatever became of the launcher. It asks
# before it kills, so that ranks can write a checkpoint.
_SCRIPT = """
trap '' INT TERM HUP
groups=
while read -r word; do
  case $word in
    end) exit 0 ;;
    clear) groups= ;;
    *) groups="$groups $word" ;;
  esac
done
# One at a time: of several, kill fails where any one is gone, and the others may still be writing.
signal() {
  reached=1
  for group in $groups; do
    kill -s "$1" -- "-$group" 2>/dev/null && reached=0
  done
  return "$reached"
}
signal TERM
left=$1
while [ "$left" -gt 0 ] && signal 0; do
  sleep 1
  left=$((left - 1))
done
signal KILL
"""


class Orphanage:
    """Knows the process groups of a launch."""

    def __init__(self, keeper: subprocess.Popen[bytes]) -> None:
        self._keeper = keeper

    def add(self, group: int) -> None:
        """A process group to end with the launcher."""
        self._tell(str(group))

    def clear(self) -> None:
        """All groups so far have ended: their numbers may come to mean others."""
        self._tell("clear")

    def _tell(self, word: str) -> None:
        assert self._keeper.stdin is not None
        # Where somebody killed the keeper, the launch goes on without.
        with contextlib.suppress(OSError):
            self._keeper.stdin.write(f"{word}\n".encode())
            self._keeper.stdin.flush()


@contextlib.contextmanager
def orphanage(grace_s: float) -> Iterator[Orphanage]:
    """Starts a small process of its own session that outlives a killed launcher by as long as its ranks take to end.

    A parent-death signal would have to be set between fork and exec, in a process with threads, and would reach the
    ranks but not what they started.

    Args:
      grace_s: seconds between SIGTERM and SIGKILL.
    """
    keeper = subprocess.Popen(
        ["/bin/sh", "-c", _SCRIPT, "jaxche-orphanage", str(round(grace_s))],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    home = Orphanage(keeper)
    try:
        yield home
    finally:
        home._tell("end")
        assert keeper.stdin is not None
        with contextlib.suppress(OSError):
            keeper.stdin.close()
        keeper.wait()
