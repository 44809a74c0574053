"""Runs notebooks written as jupytext scripts, and keeps their outputs in the .ipynb beside each."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

_TIMEOUT_S = 120


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scripts", nargs="*", type=Path, help="of notebooks/; all by default")
    folder = Path(__file__).parent.parent / "notebooks"
    for path in parser.parse_args().scripts or sorted(folder.glob("*.py")):
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


if __name__ == "__main__":
    main()
