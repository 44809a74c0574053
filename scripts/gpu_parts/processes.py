"""Starts the programs of a part: alone, or in two processes by the README's commands. Imports no jax."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_parts.context import Context

ROOT = Path(__file__).resolve().parents[2]
# A platform of CPU devices that JAX finds as it finds CUDA.
STANDIN = ROOT / "tests" / "multiprocess" / "plugins"


def program_parser() -> argparse.ArgumentParser:
    """The parser of a program, with the options that :func:`program` and :func:`pair` add to its words."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cpu", action="store_true")
    return parser


def program(context: Context, module: str, *words: object, env: Mapping[str, str] | None = None) -> Any:
    """The result of ``python -m gpu_parts.<module> --out FILE ...``, which it writes as JSON."""
    (result,) = _results(context, [sys.executable, "-m", f"gpu_parts.{module}"], words, 1, os.environ | (env or {}))
    return result


def pair(
    context: Context, where: str, module: str, *words: object, launch: Sequence[str] = (), card: Sequence[str] = ("0",)
) -> list[Any]:
    """The results of a program in two processes: ``shared``, both on one card, or ``beside``, one on the CPU."""
    command, env = launch_command(where, context.cpu, dict(os.environ), card)
    return _results(context, [*command, *launch, "-m", f"gpu_parts.{module}"], words, 2, env)


def launch_command(where: str, cpu: bool, env: dict[str, str], card: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The README's command for two processes, and its variables.

    With CPU devices in the place of the card, two processes that share it are two on CPU cores, and the one next to
    the CPU trains on the stand-in of the tests.
    """
    command = [sys.executable, "-m", "jaxche", "launch", "-n", "2"]
    env.pop("JAX_PLATFORMS", None)  # as on the command line of the README
    if where == "beside":
        command += ["--on-cpu", "1"]
        if cpu:
            env["JAX_PLATFORMS"] = "standin"
            env["PYTHONPATH"] = os.pathsep.join([env.get("PYTHONPATH", ""), str(STANDIN)])
            return command, env
    if cpu:
        env["JAX_PLATFORMS"] = "cpu"
        return command, env
    first = env.get("CUDA_VISIBLE_DEVICES", card[0]).split(",")[0]
    env["CUDA_VISIBLE_DEVICES"] = first if where == "beside" else f"{first},{first}"
    return command, env


def _results(
    context: Context, command: Sequence[str], words: Sequence[object], count: int, env: Mapping[str, str]
) -> list[Any]:
    with tempfile.TemporaryDirectory(dir=context.folder) as folder:
        whole = [*command, *map(str, words), "--out", folder, *(["--cpu"] if context.cpu else [])]
        # In the process group of the part, which ends with it.
        process = subprocess.run(whole, env=env, check=False)
        if process.returncode:
            raise RuntimeError(f"{' '.join(whole)} failed with {process.returncode}")
        return [json.loads((Path(folder) / f"{rank}.json").read_text(encoding="utf8")) for rank in range(count)]


def write(folder: Path, rank: int, result: Any) -> None:
    """The result of one process, for :func:`program` and :func:`pair`."""
    (folder / f"{rank}.json").write_text(json.dumps(result), encoding="utf8")
