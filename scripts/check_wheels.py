#!/usr/bin/env python
"""Whether the extras cuda12 and cuda13 resolve in a fresh environment; needs PyPI, and no card.

  python scripts/check_wheels.py                               with this Python
  python scripts/check_wheels.py --python python3.11 python3.12

pip resolves with `--dry-run`: it reads the metadata of wheels and downloads none of CUDA. Exit code 77 without PyPI.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("cuda12", "cuda13")
NO_PYPI = 77


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="+", default=[sys.executable], help="Pythons to resolve with")
    parser.add_argument("--extra", nargs="+", choices=EXTRAS, default=EXTRAS)
    args = parser.parse_args()
    if not has_pypi():
        print("PyPI does not answer: nothing was checked")
        return NO_PYPI
    failed = False
    for python in args.python:
        with tempfile.TemporaryDirectory() as folder:
            pip = fresh(python, Path(folder))
            for extra in args.extra:
                versions, error = resolve(pip, extra, Path(folder))
                error = error or misfit(extra, versions)
                failed |= bool(error)
                shown = error or ", ".join(f"{name} {versions[name]}" for name in sorted(versions) if told(name))
                print(f"{python} {extra}: {'FAILED' if error else 'resolves'}: {shown}", flush=True)
    return int(failed)


def has_pypi() -> bool:
    """Whether the index of pip answers."""
    try:
        urllib.request.urlopen("https://pypi.org/simple/jax/", timeout=10).close()
    except (urllib.error.URLError, TimeoutError):
        return False
    return True


def fresh(python: str, folder: Path) -> list[str]:
    """The pip of a new environment; a version that reads metadata without downloading wheels."""
    subprocess.run([python, "-m", "venv", folder / "venv"], check=True)
    pip = [str(folder / "venv" / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "pip>=24"], check=True)
    return pip


def resolve(pip: list[str], extra: str, folder: Path) -> tuple[dict[str, str], str]:
    """The versions that pip would install, or its error."""
    report = folder / f"{extra}.json"
    command = [*pip, "install", "--dry-run", "--quiet", "--report", report, f"{ROOT}[{extra}]"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {}, done.stderr.strip().splitlines()[-1]
    found = json.loads(report.read_text(encoding="utf8"))["install"]
    return {one["metadata"]["name"].lower(): one["metadata"]["version"] for one in found}, ""


def misfit(extra: str, versions: Mapping[str, str]) -> str:
    """What is wrong with resolved versions: a plugin that is missing or of another version than jaxlib."""
    major = extra.removeprefix("cuda")
    for package in (f"jax-{extra}-plugin", f"jax-{extra}-pjrt", f"nvidia-cudnn-cu{major}"):
        if package not in versions:
            return f"without {package}"
    plugin, jaxlib = versions[f"jax-{extra}-plugin"], versions.get("jaxlib", "none")
    return "" if plugin == jaxlib else f"jax-{extra}-plugin {plugin} beside jaxlib {jaxlib}"


def told(name: str) -> bool:
    """Whether the version of a package is printed."""
    return name in ("jax", "jaxlib", "flax", "optax") or name.startswith(("jax-cuda", "nvidia-cudnn"))


if __name__ == "__main__":
    sys.exit(main())
