"""The ports of examples/ against their originals, at equal examples: the quality of the result, not the time.

The original runs on one device. Its port runs on a virtual fleet of two and of three replicas of unequal speed, by
several sets of words; `batch / n` is the batch size divided by the number of replicas, so that as many examples make as
many updates. A port holds if its median is no worse than the worst seed of the original.

    python scripts/bench_ports.py                            # all, half an hour or more; adds to scripts/ports.jsonl
    python scripts/bench_ports.py mnist --arms sync cadence --seeds 0 1
    python scripts/bench_ports.py --table                    # print the table of scripts/ports.jsonl
    python scripts/bench_ports.py --write                    # and write the tables of docs/examples.md
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib.util
import io
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "scripts/ports.jsonl"
PAGE = ROOT / "docs/examples.md"
# Milliseconds of a batch of the original on each replica, and of a merge.
FLEETS = {2: (20.0, 50.0), 3: (20.0, 30.0, 50.0)}
MERGE_MS = 5.0
BASELINE_SEEDS = 5


class Example(NamedTuple):
    """What a pair shows; the metric of its scripts, whether more of it is better, its batch size, how it is printed."""

    shows: str
    metric: str
    more: bool
    batch_size: int
    form: str


EXAMPLES = {
    "mnist": Example("nnx: a model, an `nnx.Optimizer`, the jitted step that goes", "test accuracy", True, 32, ".2%"),
    "imagenet": Example(
        "linen: batch statistics in a `TrainState`, L2, momentum, warmup and cosine, bfloat16",
        "test accuracy",
        True,
        32,
        ".2%",
    ),
    "lm1b": Example(
        "linen: padding masks, a mean over tokens, warmup and root decay, clip, bfloat16",
        "held-out loss",
        False,
        16,
        ".3f",
    ),
    "nanogpt": Example(
        "nnx: random windows counted in steps, decay of matrices only, validation on the way",
        "validation loss",
        False,
        16,
        ".3f",
    ),
    "scan_remat": Example(
        "linen: `nn.scan` over `nn.remat` layers, dropout with its keys", "test accuracy", True, 32, ".2%"
    ),
}


class Arm(NamedTuple):
    """The arguments of the trainer, and whether the batch is divided by the number of replicas."""

    words: str
    options: dict[str, Any]
    divides: bool = False


ARMS = {
    "sync": Arm('`policy="sync", joined_batches=1`', {"policy": "sync", "joined_batches": 1}),
    "cadence, divided": Arm("`batch_size=` / n", {}, True),
    "auto": Arm('`policy="auto"`', {"policy": "auto"}),
    "cadence": Arm("as it was", {}),
}


def load(name: str, which: str) -> Any:
    """The module of a script in examples/."""
    path = ROOT / "examples" / name / f"{which}.py"
    spec = importlib.util.spec_from_file_location(f"{name}_{which}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sizes(name: str, replicas: int, smaller: dict[str, int]) -> dict[str, int]:
    """The arguments of ``main`` for as many examples in batches divided by the number of replicas."""
    batch = round(EXAMPLES[name].batch_size / replicas)
    found = {**smaller, "batch_size": batch}
    if name == "nanogpt":
        # Counted in steps.
        steps = smaller.get("steps", 600)
        found["steps"] = found["eval_every"] = round(steps * EXAMPLES[name].batch_size / batch)
    return found


def run(name: str, arm: str, replicas: int, seed: int, **smaller: int) -> float:
    """The final metric of one run; ``arm`` is one of ARMS, or "original"."""
    import jaxche

    with contextlib.redirect_stdout(io.StringIO()):
        if arm == "original":
            return load(name, "before").main(seed=seed, **smaller)
        import jax

        options, divides, ms = ARMS[arm].options, ARMS[arm].divides, FLEETS.get(replicas, (20.0,))
        given = sizes(name, replicas, smaller) if divides else smaller
        part = given.get("batch_size", EXAMPLES[name].batch_size) / EXAMPLES[name].batch_size if divides else 1.0
        if replicas == 1:
            return load(name, "after").main(seed=seed, replicas=jax.devices()[:1], **given)
        fleet = jaxche.VirtualFleet(ms_per_batch=[part * one for one in ms], sync_ms=MERGE_MS)
        return load(name, "after").main(seed=seed, replicas=jax.devices()[:replicas], fleet=fleet, **given, **options)


def read() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def table(lines: list[dict[str, Any]]) -> str:
    """A row an example and an arm: the median and the range over seeds, and whether the port holds."""
    rows = ["| example | replicas | words | seeds | median (lowest to highest) | holds |", "|---|---|---|---|---|---|"]
    for name, example in EXAMPLES.items():

        def values(arm: str, replicas: int, name: str = name) -> list[float]:
            found = {
                line["seed"]: line["value"]
                for line in lines
                if (line["example"], line["arm"], line["replicas"]) == (name, arm, replicas)
            }
            return [found[seed] for seed in sorted(found)]

        def text(found: list[float], form: str = example.form) -> str:
            middle, low, high = (format(f(found), form) for f in (statistics.median, min, max))
            return f"{len(found)} | {middle} ({low} to {high})"

        original = values("original", 1)
        if not original:
            continue
        rows.append(f"| {name}, {example.metric} | | the original, one device | {text(original)} | |")
        worst = min(original) if example.more else max(original)
        for arm, (words, _, _) in ARMS.items():
            for replicas in FLEETS:
                if found := values(arm, replicas):
                    middle = statistics.median(found)
                    holds = middle >= worst if example.more else middle <= worst
                    rows.append(f"| | {replicas} | {words} | {text(found)} | {'yes' if holds else 'no'} |")
    return "\n".join(rows)


def changed(name: str) -> tuple[int, int, int, int]:
    """The lines of a pair before and after, and those removed and added."""
    before, after = ((ROOT / f"examples/{name}/{which}.py").read_text().splitlines() for which in ("before", "after"))
    difference = list(difflib.unified_diff(before, after, n=0))[2:]
    removed, added = (sum(line[0] == sign for line in difference) for sign in "-+")
    return len(before), len(after), removed, added


def pairs() -> str:
    """A row a pair: what it shows, and the size of its change."""
    rows = ["| example | what it shows | lines before | after | removed | added |", "|---|---|---|---|---|---|"]
    rows += [f"| {name} | {e.shows} | {' | '.join(map(str, changed(name)))} |" for name, e in EXAMPLES.items()]
    return "\n".join(rows)


def page(text: str) -> str:
    """The page with its tables of now."""
    for name, made in (("pairs", pairs()), ("ports", table(read()))):
        begin, end = f"<!-- {name}: scripts/bench_ports.py --write -->", f"<!-- end of {name} -->"
        head, rest = text.split(begin)
        text = f"{head}{begin}\n\n{made}\n\n{end}{rest.split(end)[1]}"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("examples", nargs="*", help=f"of {', '.join(EXAMPLES)}; all by default")
    arms = ", ".join(f'"{name}"' if " " in name else name for name in ARMS)
    parser.add_argument(
        "--arms", nargs="+", metavar="ARM", choices=ARMS, default=list(ARMS), help=f"of {arms}; all by default"
    )
    parser.add_argument("--replicas", nargs="+", type=int, choices=FLEETS, default=list(FLEETS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="of the ports (default: 0 1 2)")
    parser.add_argument("--table", action="store_true", help="print the table of what was measured")
    parser.add_argument("--write", action="store_true", help="and write it into the page")
    args = parser.parse_args()
    if unknown := [name for name in args.examples if name not in EXAMPLES]:
        parser.error(f"no example {', '.join(unknown)}; write some of {' '.join(EXAMPLES)}")
    if args.write:
        PAGE.write_text(page(PAGE.read_text(encoding="utf8")), encoding="utf8")
    if args.table or args.write:
        print(table(read()))
        return 0
    import jax

    jax.config.update("jax_num_cpu_devices", max(FLEETS))
    jax.config.update("jax_platforms", "cpu")
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache/jax/ports"))
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    known = {(line["example"], line["arm"], line["replicas"], line["seed"]) for line in read()}
    names = args.examples or list(EXAMPLES)
    wanted = [(name, "original", 1, seed) for name in names for seed in range(BASELINE_SEEDS)]
    wanted += [(n, arm, r, seed) for seed in args.seeds for n in names for r in args.replicas for arm in args.arms]
    for name, arm, replicas, seed in [one for one in wanted if one not in known]:
        start = time.perf_counter()
        value = run(name, arm, replicas, seed)
        line = {"example": name, "arm": arm, "replicas": replicas, "seed": seed, "value": round(value, 6)}
        with RESULTS.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), f"{time.perf_counter() - start:.0f} s", file=sys.stderr)
    print(table(read()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
