"""Arrays between stages of one process: each arrives once, and an error reaches whoever waits."""

import pytest

from jaxche.stages import Tag
from jaxche.stages._local import Mailbox

TAG = Tag(0, 0, "forward", 0)


def test_what_arrived_is_taken_once_also_after_an_error():
    mailbox = Mailbox()
    mailbox.put(TAG, "tree")
    mailbox.fail(ConnectionError("lost"))
    assert mailbox.take(TAG) == "tree"
    with pytest.raises(ConnectionError, match="lost"):
        mailbox.take(TAG)


def test_what_comes_between_the_look_without_the_lock_and_the_one_with_it_is_taken_too():
    mailbox = Mailbox()

    class Late(dict):
        def pop(self, tag, *default):
            if default:  # the look without the lock
                mailbox.put(tag, "tree")
                mailbox.fail(ConnectionError("lost"))
                return default[0]
            return super().pop(tag)

    mailbox._arrived = Late()
    assert mailbox.take(TAG) == "tree"


def test_the_first_error_is_the_one_that_is_raised():
    """The others follow from it: a wire that is closed because a stage failed closes the connections of all."""
    mailbox = Mailbox()
    for error in (ConnectionError("the first"), ConnectionError("the second")):
        mailbox.fail(error)
    with pytest.raises(ConnectionError, match="the first"):
        mailbox.take(TAG)


def test_who_waits_in_vain_says_for_what():
    with pytest.raises(TimeoutError, match=r"stage 1 waited 0\.01 s for the activation of micro-batch 0 in step 0"):
        Mailbox().take(TAG, timeout_s=0.01)
