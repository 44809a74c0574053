"""Ends the ranks of a launch whose launcher was killed."""

from __future__ import annotations

import contextlib
import subprocess

# Reads process groups until the kernel closes its input, whatever ended the launcher. Then sends SIGTERM, so that ranks
# can write a checkpoint, and SIGKILL.
_SCRIPT = """
trap '' INT TERM HUP
groups= folder=
while read -r word rest; do
  case $word in
    end) exit 0 ;;
    remove) kept=; for group in $groups; do [ "$group" = "$rest" ] || kept="$kept $group"; done; groups=$kept ;;
    folder) folder=$rest ;;
    *) groups="$groups $word" ;;
  esac
done
# One at a time: kill with several groups fails if one of them is gone.
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
  sleep 0.1
  left=$((left - 1))
done
signal KILL
[ -z "$folder" ] || rm -rf -- "$folder"
"""


class Reaper:
    """A context that ends process groups with the launcher, ``grace_s`` seconds between SIGTERM and SIGKILL."""

    def __init__(self, grace_s: float) -> None:
        # A parent-death signal is unsafe in a process with threads, and does not reach children of the ranks.
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, "jaxche-reaper", str(round(10 * grace_s))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def __enter__(self) -> Reaper:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate(b"end\n")

    def add(self, group: int) -> None:
        """Add a process group."""
        self._send(str(group))

    def remove(self, group: int) -> None:
        """Remove a process group that has ended, because the system may reuse its number."""
        self._send(f"remove {group}")

    def add_folder(self, path: str) -> None:
        """Add the temporary folder of the launcher, which is removed after the groups have ended."""
        self._send(f"folder {path}")

    def _send(self, word: str) -> None:
        assert self._process.stdin is not None
        # The launch continues if the reaper was killed.
        with contextlib.suppress(OSError):
            self._process.stdin.write(f"{word}\n".encode())
            self._process.stdin.flush()
