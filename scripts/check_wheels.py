#!/usr/bin/env python
"""Whether the extras cuda12 and cuda13 resolve to wheels for Linux; needs uv and PyPI, and no card.

  python scripts/check_wheels.py                  # for Python 3.11, 3.12 and 3.13
  python scripts/check_wheels.py --python 3.12

uv reads the metadata of wheels and downloads none. Exit code 77 without PyPI.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS, PYTHONS = ("cuda12", "cuda13"), ("3.11", "3.12", "3.13")
NO_PYPI = 77


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="+", default=PYTHONS, help="versions to resolve for")
    parser.add_argument("--extra", nargs="+", choices=EXTRAS, default=EXTRAS)
    args = parser.parse_args()
    if not has_pypi():
        print("PyPI does not answer: nothing was checked")
        return NO_PYPI
    failed = False
    for python in args.python:
        for extra in args.extra:
            versions, error = resolve(python, extra)
            error = error or misfit(extra, versions)
            failed |= bool(error)
            shown = error or ", ".join(f"{name} {versions[name]}" for name in sorted(versions) if is_printed(name))
            print(f"Python {python}, {extra}: {'FAILED' if error else 'resolves'}: {shown}", flush=True)
    return int(failed)


def has_pypi() -> bool:
    """Whether the index of uv answers."""
    try:
        urllib.request.urlopen("https://pypi.org/simple/jax/", timeout=10).close()
    except (urllib.error.URLError, TimeoutError):
        return False
    return True


def resolve(python: str, extra: str) -> tuple[dict[str, str], str]:
    """The versions that a new environment would get, or the error."""
    command = [sys.executable, "-m", "uv", "pip", "compile", ROOT / "pyproject.toml", "--extra", extra]
    command += ["--python-version", python, "--python-platform", "x86_64-manylinux_2_28", "--only-binary", ":all:"]
    done = subprocess.run([*command, "--quiet", "--no-annotate"], capture_output=True, text=True, check=False)
    if done.returncode:
        return {}, done.stderr.strip()
    return dict(re.findall(r"^([\w.-]+)==(\S+)", done.stdout, re.M)), ""


def misfit(extra: str, versions: Mapping[str, str]) -> str:
    """What is wrong with resolved versions: a plugin that is missing or of another version than jaxlib."""
    major = extra.removeprefix("cuda")
    for package in (f"jax-{extra}-plugin", f"jax-{extra}-pjrt", f"nvidia-cudnn-cu{major}"):
        if package not in versions:
            return f"without {package}"
    plugin, jaxlib = versions[f"jax-{extra}-plugin"], versions.get("jaxlib", "none")
    return "" if plugin == jaxlib else f"jax-{extra}-plugin {plugin} beside jaxlib {jaxlib}"


def is_printed(name: str) -> bool:
    """Whether the version of a package is printed."""
    return name in ("jax", "jaxlib", "flax", "optax") or name.startswith(("jax-cuda", "nvidia-cudnn"))


if __name__ == "__main__":
    sys.exit(main())
