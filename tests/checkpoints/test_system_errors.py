"""Errors of the system and of libraries: of a full disk, and of a process that cannot read now."""

import errno

import pytest

from jaxche.checkpoints._system_errors import is_of_process, no_space

TENSORSTORE = (
    'OUT_OF_RANGE: Error writing local file "/run/10/_sharding": Failed to write 437 bytes to file 21: {} '
    "[os_error_code='{}']"
)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "whatever"), "No space left on device"),
        (OSError(errno.EDQUOT, "whatever"), "Disk quota exceeded"),
        (OSError(errno.EFBIG, "whatever"), "File too large"),
        (ValueError(TENSORSTORE.format("No space left on device", 28)), "No space left on device"),
        (OSError(errno.EACCES, "os_error_code='28'"), None),
        (OSError("28"), None),
        (ValueError(TENSORSTORE.format("Input/output error", 5)), None),
        (None, None),
    ],
)
def test_errors_that_say_that_the_disk_is_full(error, said):
    assert no_space(error) == said


@pytest.mark.parametrize("link", ["__cause__", "__context__"])
def test_an_error_that_a_full_disk_led_to_counts(link):
    error = RuntimeError("the save failed")
    setattr(error, link, OSError(errno.ENOSPC, "full"))
    assert no_space(error) == "No space left on device"


@pytest.mark.parametrize(
    ("error", "own"),
    [
        (MemoryError(), True),
        (OSError(errno.EMFILE, "Too many open files"), True),
        (PermissionError(errno.EACCES, "Permission denied"), True),
        (ValueError(TENSORSTORE.format("Too many open files", 24)), True),
        (ValueError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes."), True),
        (ValueError(TENSORSTORE.format("Input/output error", 5)), False),
        (FileNotFoundError(errno.ENOENT, "no such file"), False),
        (ValueError("bad checksum"), False),
        (None, False),
    ],
)
def test_errors_of_a_process_that_cannot_read_now(error, own):
    assert is_of_process(error) == own
    wrapped = RuntimeError("the restore failed")
    wrapped.__cause__ = error
    assert is_of_process(wrapped) == own


def test_an_error_that_is_its_own_cause_ends_the_search():
    error = ValueError("bad checksum")
    error.__cause__ = error
    assert no_space(error) is None
    assert not is_of_process(error)
