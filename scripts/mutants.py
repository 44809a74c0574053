"""Put each mistake that tests/mutants.toml lists into a copy of the tree, and see whether its test notices.

    .venv/bin/python scripts/mutants.py                        # all of them, in some minutes
    .venv/bin/python scripts/mutants.py scaling/ _learn.py     # those in files whose path contains one of these

The named test must pass on the tree as it is and fail with the mistake. The exit code is 1 if one survives, or if a
line has changed so that it no longer applies. The checkout itself is never changed.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("jaxche", "tests", "scripts", "pyproject.toml")
# Of pytest: all passed, and some failed. Any other code says that no test was run.
PASSED, FAILED = 0, 1


def mutants(words):
    """The entries of the list, of all files or of those whose path contains one of the words."""
    listed = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text(encoding="utf8"))["mutant"]
    return [entry for entry in listed if not words or any(word in entry["file"] for word in words)]


def copy_of_the_tree(folder):
    """Put what the tests need into a folder: as it is here, committed or not."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)


def run(tree, tests, timeout_s):
    """The exit code of pytest on some tests of a tree, or None where they took too long."""
    # No bytecode of a mutant: its source changes back within the same second, which Python would not notice.
    env = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return None, "took too long"
    return done.returncode, done.stdout


def verdict(tree, entry, timeout_s):
    """What became of one mutant, as one word."""
    path = tree / "jaxche" / entry["file"]
    source = path.read_text(encoding="utf8")
    if source.count(entry["before"]) != 1:
        return "does not apply"
    path.write_text(source.replace(entry["before"], entry["after"]), encoding="utf8")
    try:
        code, _ = run(tree, [entry["test"]], timeout_s)
    finally:
        path.write_text(source, encoding="utf8")
    return {PASSED: "survived", FAILED: "killed", None: "took too long"}.get(code, "ran no test")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="parts of the paths of the files to change")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one test")
    args = parser.parse_args()
    chosen, start, counts = mutants(args.words), time.monotonic(), defaultdict(int)
    with tempfile.TemporaryDirectory(prefix="jaxche-mutants-") as folder:
        tree = Path(folder)
        copy_of_the_tree(tree)
        tests = sorted({entry["test"] for entry in chosen})
        code, output = run(tree, tests, args.timeout * len(tests)) if tests else (PASSED, "")
        if code != PASSED:
            print(output, "the tests must pass before anything is changed", sep="\n")
            return 1
        for entry in chosen:
            word = verdict(tree, entry, args.timeout)
            counts[word] += 1
            print(f"{word}: {entry['file']}: {' '.join(entry['before'].split())}", flush=True)
            if word != "killed":
                print(f"    -> {' '.join(entry['after'].split())}\n    {entry['test']}", flush=True)
    summary = ", ".join(f"{count} {word}" for word, count in sorted(counts.items())) or "nothing chosen"
    print(f"{len(chosen)} mutants: {summary}, in {time.monotonic() - start:.0f} s")
    return int(set(counts) != {"killed"})


if __name__ == "__main__":
    sys.exit(main())
