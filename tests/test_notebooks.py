"""Every notebook is a script with a twin that holds its outputs; running them is `scripts/test`'s business."""

from pathlib import Path

import jupytext
import nbformat
import pytest

FOLDER = Path(__file__).parent.parent / "notebooks"
SCRIPTS = sorted(FOLDER.glob("*.py"))


def test_there_are_five_and_each_has_its_twin():
    assert len(SCRIPTS) == 5
    assert {path.stem for path in SCRIPTS} == {path.stem for path in FOLDER.glob("*.ipynb")}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_twin_shows_what_the_script_says(script):
    notebook = nbformat.read(script.with_suffix(".ipynb"), 4)
    written, kept = ([cell.source for cell in n.cells] for n in (jupytext.read(script), notebook))
    assert kept == written, f"write: scripts/notebooks {script}"
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert outputs
    assert all(output.output_type != "error" for output in outputs)
    assert any("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_top_says_what_it_needs(script):
    first, second = jupytext.read(script).cells[:2]
    assert "**Needs** `pip install '.[" in first.source
    if "fresh kernel" in first.source:
        assert "jaxche.fake_devices(" in second.source
