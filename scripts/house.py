"""Print the table of modules that CONTRIBUTING.md has: a line for each, from the first sentence of its docstring.

.venv/bin/python scripts/house.py            # print it
.venv/bin/python scripts/house.py --write    # put it into CONTRIBUTING.md
"""

import argparse
import ast
import re
import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- modules: scripts/house.py --write -->", "<!-- end of modules -->"


def sentence(path):
    """The first sentence of a module's docstring, on one line."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text(encoding="utf8"))) or "").split())
    found = re.split(r"(?<=\.)\s|$", text, maxsplit=1)[0].rstrip(".")
    return (found[:1].upper() + found[1:]).replace("``", "`").replace("|", "\\|")


def table(order):
    """The table, packages in the order of their layers."""
    lines = ["| module | contents |", "|---|---|"]
    for package in order:
        folder = ROOT / "jaxche" / package
        lines.append(f"| **`{package}`** | **{sentence(folder / '__init__.py')}** |")
        lines += [
            f"| `{path.stem}` | {sentence(path)} |" for path in sorted(folder.glob("*.py")) if path.stem != "__init__"
        ]
    return "\n".join(lines)


def layers():
    """The packages as tests/test_layers.py orders them."""
    return runpy.run_path(str(ROOT / "tests" / "test_layers.py"))["ORDER"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into CONTRIBUTING.md")
    args, found = parser.parse_args(), table(layers())
    if args.write:
        before, rest = PAGE.read_text(encoding="utf8").split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{found}\n{END}{rest.split(END)[1]}", encoding="utf8")
    else:
        print(found)


if __name__ == "__main__":
    main()
