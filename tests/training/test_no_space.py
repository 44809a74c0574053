"""Which errors say that a disk is full: those of the system, of what they led to, and TensorStore's texts."""

import errno

import pytest

from jaxche.training._no_space import no_space

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
def test_what_says_so(error, said):
    assert no_space(error) == said


@pytest.mark.parametrize("explicit", [True, False])
def test_what_led_to_an_error_counts(explicit):
    def fail():
        try:
            raise OSError(errno.ENOSPC, "full")
        except OSError as error:
            if explicit:
                raise RuntimeError("the save failed") from error
            raise RuntimeError("the save failed")  # noqa: B904

    with pytest.raises(RuntimeError) as caught:
        fail()
    assert no_space(caught.value) == "No space left on device"
