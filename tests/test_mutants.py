"""The list of mistakes that tests are known to notice: each still fits the code, and its test is still there."""

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MUTANTS = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text(encoding="utf8"))["mutant"]
PACKAGES = ("averaging", "cadence", "stages", "scaling", "sharding", "training")


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutant", MUTANTS, ids=lambda mutant: f"{mutant['file']}: {mutant['before'].split(chr(10))[0]}"
)
def test_a_mutant_still_applies_and_its_test_is_there(mutant):
    """Where code has moved, write its line again in tests/mutants.toml, and run scripts/mutants.py on that file."""
    assert set(mutant) == {"file", "before", "after", "test"}
    source = (ROOT / "jaxche" / mutant["file"]).read_text(encoding="utf8")
    assert source.count(mutant["before"]) == 1
    changed = source.replace(mutant["before"], mutant["after"])
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source))
    path, _, name = mutant["test"].partition("::")
    functions = ast.parse((ROOT / path).read_text(encoding="utf8")).body
    assert name.partition("[")[0] in {node.name for node in functions if isinstance(node, ast.FunctionDef)}


def test_every_package_that_computes_has_some():
    for package in PACKAGES:
        assert sum(mutant["file"].startswith(f"{package}/") for mutant in MUTANTS) >= 6, package
    assert len({(mutant["file"], mutant["before"], mutant["after"]) for mutant in MUTANTS}) == len(MUTANTS)
