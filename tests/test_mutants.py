"""The list of mistakes that tests are known to notice: each still fits the code, and its test is still there."""

import ast
import functools
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MUTANTS = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text(encoding="utf8"))["mutant"]
PACKAGES = ("averaging", "cadence", "stages", "scaling", "sharding", "training")


@functools.cache
def read(path):
    """The text of a file of the package, and its syntax tree as text."""
    source = (ROOT / "jaxche" / path).read_text(encoding="utf8")
    return source, ast.dump(ast.parse(source))


@functools.cache
def functions(path):
    """The names of the functions in a file of tests."""
    body = ast.parse((ROOT / path).read_text(encoding="utf8")).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutant", MUTANTS, ids=lambda mutant: f"{mutant['file']}: {mutant['before'].split(chr(10))[0]}"
)
def test_a_mutant_still_applies_and_its_test_is_there(mutant):
    """Where code has moved, write its line again in tests/mutants.toml, and run scripts/mutants.py on that file."""
    assert set(mutant) == {"file", "before", "after", "test"}
    source, seen = read(mutant["file"])
    assert source.count(mutant["before"]) == 1
    assert ast.dump(ast.parse(source.replace(mutant["before"], mutant["after"]))) != seen
    path, _, name = mutant["test"].partition("::")
    assert name.partition("[")[0] in functions(path)


def test_every_package_that_computes_has_some():
    for package in PACKAGES:
        assert sum(mutant["file"].startswith(f"{package}/") for mutant in MUTANTS) >= 6, package
    assert len({(mutant["file"], mutant["before"], mutant["after"]) for mutant in MUTANTS}) == len(MUTANTS)
