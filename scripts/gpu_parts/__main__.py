"""Runs the parts one after the other, each in a process of its own, and keeps their lines in gpu.json.

docs/gpu.md says what each line means.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from gpu_parts.context import Context, is_out_of_memory, read_lines
from gpu_parts.table import Line, cells, render

ROOT = Path(__file__).resolve().parents[2]


class Part(NamedTuple):
    """A part: what it measures, and the seconds it plans for, in full and with --quick."""

    about: str
    seconds: float
    quick: float


PARTS = {
    "step": Part("the trainer with one replica against a raw jitted loop", 420, 50),
    "sharded": Part("the sharded step on a mesh of one, its memory, and the largest batch", 300, 30),
    "merge": Part("merges on the device and on the host against bare all-reduces, and beside steps", 260, 40),
    "fleet": Part("two processes on one card, and a card beside its CPU", 300, 40),
    "noise": Part("the cost of measuring the noise scale", 240, 25),
    "stages": Part("a pipeline on one card, and stages through a folder", 150, 20),
    "checkpoint": Part("the stall of training for a save", 150, 20),
    "tests": Part("the tests marked gpu, and the fast tests on the card", 600, 0),
}
# A part is ended when it takes this many times its planned seconds.
PATIENCE = 2.0
# The same on CPU cores, which may be slow.
CPU_PATIENCE = 10.0
QUICK_MINUTES = 3.75


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu",
        description="Measures jaxche on the GPUs of this machine.",
        epilog="parts:\n" + "\n".join(f"  {name:<12}{part.about}" for name, part in PARTS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="smaller sizes and fewer turns, under 4 minutes")
    parser.add_argument("--cpu", action="store_true", help="CPU devices in the place of the card, small sizes")
    parser.add_argument("--only", type=chosen, metavar="PART,...", help="only these parts")
    parser.add_argument("--minutes", type=float, help=f"time for all parts (default: no limit; {QUICK_MINUTES} quick)")
    parser.add_argument("--json", type=Path, default=ROOT / "runs" / "gpu.json", help="results (default: %(default)s)")
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE", help="only print the table of these results")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--context", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        return run_here(args.part, json.loads(args.context))
    if args.table:
        return show(args.table)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the part in progress ends too
    names = args.only or [name for name, part in PARTS.items() if part.quick or not args.quick]
    minutes = args.minutes or (QUICK_MINUTES if args.quick and not args.cpu else None)
    return run_all(names, args.quick, args.cpu, args.json, minutes and time.time() + 60 * minutes)


def chosen(text: str) -> list[str]:
    """The parts of a list of names, in the order in which they run."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in PARTS]
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"{text!r}: no part {', '.join(unknown)}; write some of {','.join(PARTS)}")
    return [name for name in PARTS if name in names]


def run_here(name: str, settings: dict[str, Any]) -> int:
    """A part, in this process."""
    paths = {key: Path(settings.pop(key)) for key in ("folder", "lines")}
    context = Context(**settings, **paths)
    try:
        importlib.import_module(f"gpu_parts.{name}").run(context)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        context.add(Line(f"{name}: the rest", None, note="the memory of this card is too small for it"))
    return 0


def run_all(names: list[str], quick: bool, cpu: bool, path: Path, until: float | None) -> int:
    """Run these parts until a time; 1 if a goal was missed or a part failed."""
    env = environment(cpu)
    about = describe(env) | {"quick": quick, "cpu": cpu}
    if not cpu and about["platform"] != "gpu":
        for check in about["checks"]:
            print(f"{check['name']}: {check['text']}" + (f"; write: {check['fix']}" if check["fix"] else ""))
        if about.get("error"):
            print(f"JAX: {about['error']}")
        print("JAX finds no GPU here. To prove the command without one, write: scripts/gpu --cpu")
        return 2
    results = opened(path, about)
    print(heading(about))
    for name in names:
        part = PARTS[name]
        left = None if until is None else until - time.time()
        if left is not None and left < 5:
            # The lines of an earlier run stay.
            results["parts"].setdefault(name, {"status": "not run", "seconds": 0.0, "lines": []})
            print(f"\n{name}: not run, the time is up")
            continue
        print(f"\n{name}: {part.about}", flush=True)
        seconds = part.quick or part.seconds if quick else part.seconds
        limit = (CPU_PATIENCE if cpu else PATIENCE) * max(seconds, 40)
        limit = limit if left is None else min(limit, left)
        run_part(name, min(seconds, limit), limit, env, results, path)
    save(results, path)
    shown = {name: results["parts"][name] for name in PARTS if name in results["parts"]}
    print(f"\n{heading(about)}\n{render(shown)}\n\n{path}")
    bad = any(part["status"] not in ("done", "not run") for part in shown.values())
    missed = any(line["met"] is False for part in shown.values() for line in part["lines"])
    return int(bad or (missed and not cpu))


def environment(cpu: bool) -> dict[str, str]:
    """The variables of the parts."""
    env = dict(os.environ)
    env["JAX_PLATFORMS"] = "cpu" if cpu else "cuda,cpu"
    # Programs that an earlier part has compiled are not compiled again.
    env.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "gpu"))
    env.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
    env.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    env["PYTHONUNBUFFERED"] = "1"
    return env


def describe(env: dict[str, str]) -> dict[str, Any]:
    """The machine and the versions, from a process that starts the devices."""
    error = ""
    # If CUDA does not start, a process without it describes the machine, and the last line of the error is kept.
    for variables in (env, {name: value for name, value in env.items() if name != "JAX_PLATFORMS"}):
        command = [sys.executable, "-m", "gpu_parts.about"]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
        if not done.returncode:
            return json.loads(done.stdout.splitlines()[-1]) | {"error": error}
        error = error or next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "")
    sys.exit(f"{done.stderr}\nJAX does not start in {sys.executable}")


def opened(path: Path, about: dict[str, Any]) -> dict[str, Any]:
    """The results in a file, if they are of this machine, these versions and these sizes; others are moved aside."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        results = json.loads(path.read_text(encoding="utf8"))
        if same_setting(results["about"], about):
            return results
        aside = path.with_suffix(f".{time.strftime('%Y%m%d-%H%M%S')}.json")
        path.rename(aside)
        print(f"{path.name} has results of another machine, version or size; now in {aside.name}")
    return {"format": 1, "about": about, "parts": {}}


def same_setting(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether results belong in one table."""
    keys = ("device", "devices", "versions", "quick", "cpu")
    return all(one.get(key) == other.get(key) for key in keys)


def run_part(name: str, seconds: float, limit: float, env: dict[str, str], results: dict[str, Any], path: Path) -> None:
    """Run a part in a process group of its own; its lines are saved as they come, and it is ended at the limit."""
    began, about = time.time(), results["about"]
    with tempfile.TemporaryDirectory(prefix=f"jaxche-gpu-{name}-") as folder:
        lines = Path(folder) / "lines.jsonl"
        context = {"quick": about["quick"], "cpu": about["cpu"], "until": began + seconds}
        context |= {"folder": folder, "lines": str(lines)}
        command = [sys.executable, "-m", "gpu_parts", "--part", name, "--context", json.dumps(context)]
        log = path.with_suffix(".log")
        with log.open("ab") as output:
            output.write(f"\n{time.strftime('%Y-%m-%d %H:%M:%S')} {name}\n".encode())
            output.flush()
            begin = output.tell()
            process = subprocess.Popen(command, env=env, stdout=output, stderr=output, start_new_session=True)
            status = "cut off"
            try:
                status = _watch(process, began + limit, lines, name, results, path)
            finally:
                _end(process)
                found = read_lines(lines)
                part = {"status": status, "seconds": time.time() - began, "lines": found}
                part["when"] = time.strftime("%Y-%m-%d %H:%M")
                if status != "done":
                    text = log.read_bytes()[begin:].decode(errors="replace")
                    part["error"] = "\n".join(text.splitlines()[-20:])
                results["parts"][name] = part
                save(results, path)
    if status != "done":
        print(f"  {status}; the end of {log}:")
        print("\n".join(f"    {text}" for text in part["error"].splitlines()[-5:]))


def _watch(
    process: subprocess.Popen, deadline: float, lines: Path, name: str, results: dict[str, Any], path: Path
) -> str:
    """Wait for a part, printing and saving its lines; returns "done", "failed" or "cut off"."""
    seen = 0
    while True:
        running = process.poll() is None
        found = read_lines(lines)
        if len(found) > seen:
            for saved in found[seen:]:
                print("  " + "  ".join(cells(Line.from_dict(saved))), flush=True)
            seen = len(found)
            results["parts"][name] = {"status": "cut off", "seconds": 0.0, "lines": found}
            save(results, path)
        if not running:
            return "done" if process.returncode == 0 else f"failed with {process.returncode}"
        if time.time() > deadline:
            return "cut off"
        time.sleep(0.2)


def _end(process: subprocess.Popen) -> None:
    """End what is left of a part: SIGTERM, which launchers pass on, then SIGKILL."""
    for number, wait_s in ((signal.SIGTERM, 8.0), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        if _has_ended(process, wait_s):
            return


def _has_ended(process: subprocess.Popen, wait_s: float) -> bool:
    """Whether all processes of its group end in so many seconds: one that is left has memory of the card."""
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        process.poll()
        try:
            os.killpg(process.pid, 0)
        except (ProcessLookupError, PermissionError):
            return True
        time.sleep(0.05)
    return False


def save(results: dict[str, Any], path: Path) -> None:
    """Write the results whole, so that a run that is cut off leaves the last ones."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(results, indent=1), encoding="utf8")
    new.replace(path)


def heading(about: dict[str, Any]) -> str:
    """The line above the table: device and versions."""
    memory = f", {about['memory_gib']} GiB" if about.get("memory_gib") else ""
    checks = {check["name"]: check["text"] for check in about.get("checks", ())}
    found = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    out = f"{about['devices']} x {about['device']}{memory}, {about['cores']} CPU cores; {found}"
    out += "".join(f"\n{name}: {checks[name]}" for name in ("driver", "cuda") if name in checks)
    return out + ("\nCPU devices in the place of the card: the command runs, its numbers mean nothing" * about["cpu"])


def show(paths: list[Path]) -> int:
    """Print the table of some results, the parts of later files in the place of those of earlier ones."""
    if missing := [str(path) for path in paths if not path.is_file()]:
        print(f"no results in {', '.join(missing)}; scripts/gpu writes them, or the file of its --json")
        return 2
    every = [json.loads(path.read_text(encoding="utf8")) for path in paths]
    if not all(same_setting(every[0]["about"], one["about"]) for one in every):
        print("these results are of several machines, versions or sizes; give those of one")
        return 2
    parts = {name: part for one in every for name, part in one["parts"].items() if part["status"] != "not run"}
    print(f"{heading(every[0]['about'])}\n{render({name: parts[name] for name in PARTS if name in parts})}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
