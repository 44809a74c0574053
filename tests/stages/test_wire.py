"""The mailbox of wires: each tree arrives once, and an error ends all waits."""

import pytest

from jaxche.stages import Tag
from jaxche.stages._wire import Mailbox

TAG = Tag(0, 0, "forward", 0)


def test_a_tree_is_taken_once_also_after_an_error():
    mailbox = Mailbox()
    mailbox.put(TAG, "tree")
    mailbox.fail(ConnectionError("lost"))
    assert mailbox.take(TAG) == "tree"
    with pytest.raises(ConnectionError, match="lost"):
        mailbox.take(TAG)


def test_the_first_error_is_the_one_that_is_raised():
    """The later ones are its consequences: a stage that failed closes the wire, which closes all connections."""
    mailbox = Mailbox()
    for error in (ConnectionError("the first"), ConnectionError("the second")):
        mailbox.fail(error)
    with pytest.raises(ConnectionError, match="the first"):
        mailbox.take(TAG)


def test_a_timeout_names_the_tag():
    with pytest.raises(TimeoutError, match=r"stage 1 waited 0\.01 s for the activation of micro-batch 0 in step 0"):
        Mailbox().take(TAG, timeout_s=0.01)
