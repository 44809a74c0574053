"""Options as values and as words."""

import argparse

from jaxche.cli._options import flag, non_default_options, numbers


def test_options_as_words():
    args = argparse.Namespace(rows=4, columns=2, words=[])
    changed = non_default_options(
        lambda parser: (parser.add_argument("--rows", default=3), parser.add_argument("--columns", default=2)), args
    )
    assert changed == {"rows": 4}
    assert (flag("batch_size"), flag("processes")) == ("--batch-size", "-n")
    assert numbers("--ratios 1,2.5")("1,2.5") == (1.0, 2.5)
