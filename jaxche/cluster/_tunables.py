"""Tunables of the C library, so that ranks on CPUs keep their memory; those of the user take precedence."""

from __future__ import annotations

from collections.abc import Mapping

TUNABLES = "GLIBC_TUNABLES"
# How the C library of Linux allocates: in pages of 2 MB, and a process keeps the memory that it once had. XLA allocates
# the buffers of a program again in each run, and each page that is new to the process costs a page fault, in a virtual
# machine more. Without this, steps and merges on a CPU take 1.3 to 2.5 times as long.
ALLOCATION: Mapping[str, str] = {
    "glibc.malloc.hugetlb": "1",
    "glibc.malloc.mmap_max": "0",
    "glibc.malloc.trim_threshold": str(1 << 40),
    "glibc.malloc.top_pad": str(64 << 20),
    "glibc.malloc.arena_max": "1",  # the others return their memory
}


def with_tunables(current: str) -> str:
    """The value of ``GLIBC_TUNABLES`` with :data:`ALLOCATION`, except for what it sets itself."""
    given = [word for word in current.split(":") if word]
    taken = {word.partition("=")[0] for word in given}
    return ":".join(given + [f"{name}={value}" for name, value in ALLOCATION.items() if name not in taken])


# For a shell: those of the user are last, and the C library takes the last value of each.
SET_TUNABLES = f"{TUNABLES}={with_tunables('')}${{{TUNABLES}:+:${TUNABLES}}}"
