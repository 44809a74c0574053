"""Runs notebooks written as jupytext scripts, and keeps their outputs in the .ipynb beside each."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

_TIMEOUT_S = 120


def main(names: list[str]) -> int:
    folder = Path(__file__).parent.parent / "notebooks"
    for path in [Path(name) for name in names] or sorted(folder.glob("*.py")):
        notebook = jupytext.read(path)
        for number, cell in enumerate(notebook.cells):
            cell["id"] = f"cell-{number}"  # the same in every run, so that a commit shows what changed
        began = time.perf_counter()
        NotebookClient(
            notebook, timeout=_TIMEOUT_S, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
        ).execute()
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)  # times of day
        nbformat.write(notebook, path.with_suffix(".ipynb"))
        print(f"{path.name}: {time.perf_counter() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
