"""Benchmark of the learning-rate rules, and the cost of measuring the noise.

Training, on 1,440 handwritten digits with a small convolutional network, from scale 1 (batches of 10, the learning rate
the best of a sweep at this scale, by the same test accuracy that is reported) to scales 8 and 16. A run ends when its
progress reaches that of the run at scale 1: AdaScale and AdamScale count what each step is worth by the noise they
measure, LinearScale counts examples. The learning rate falls to zero over the progress. Every figure is over several
seeds (of parameters, order and dropout).

    python scripts/bench_scaling.py                 # both optimizers, a table and runs/scaling.png; some minutes
    python scripts/bench_scaling.py --overhead mnist text     # a step with and without tracking, on one core
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxche.cluster import TUNABLES, with_tunables

BASE = 10  # examples of a base batch; 8 and 16 of them divide an epoch
SCALES = (8, 16)
ROUND = {"one replica": 50, "parameters": 20, "gradients": 20}  # steps of a round for --overhead; 50 is the trainer's
FIRST_ROUNDS, CYCLE = 8, 4  # all of the first are measured, then every second or fourth of this length
MORE = "a tenth more"  # steps in the same round, a control that the measurement must find
MARKS = 24  # evaluations on the test set during a run
SWEEPS = {
    "SGD": (0.025, 0.05, 0.1, 0.2, 0.4, 0.8),
    "Adam": (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 16e-3),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind (default 3)")
    parser.add_argument("--epochs", type=int, default=10, help="epochs at scale 1 (default 10)")
    parser.add_argument("--optimizer", choices=tuple(SWEEPS), help="only this one")
    parser.add_argument("--picture", type=Path, default=Path("runs/scaling.png"), help="default: %(default)s")
    parser.add_argument("--overhead", nargs="+", choices=("mnist", "text"), help="measure the cost of tracking instead")
    parser.add_argument("--makes", type=int, default=8, help="times each trainer is made for --overhead (default 8)")
    parser.add_argument("--turns", type=int, default=6, help=f"times {CYCLE} rounds of each of them (default 6)")
    parser.add_argument("--json", type=Path, help="write all numbers there")
    args = parser.parse_args()
    if args.overhead and TUNABLES not in os.environ:  # page faults cost some percent of a step, depending on addresses
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {TUNABLES: with_tunables("")})
    if args.overhead and hasattr(os, "sched_setaffinity"):
        # Before jax counts the cores: the whole cost of a step, with its dispatch, is then time on one core.
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    import jax

    jax.config.update("jax_num_cpu_devices", 2)
    if args.overhead:
        results = measure_overhead(args.overhead, args.makes, args.turns)
    else:
        results = {name: measure_training(name, args) for name in ([args.optimizer] if args.optimizer else SWEEPS)}
        draw(results, args.picture)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    return 0


class Run(NamedTuple):
    """One training run: points of its curve at equal distances of progress, the last one at its end."""

    steps: list[int]
    accuracy: list[float]
    progress: list[float]
    gain: list[float]


class Digits:
    """The task, with its examples on the device."""

    def __init__(self, epochs: int):
        import jax.numpy as jnp

        from jaxche.cli._tasks import load

        self.task = load("digits", batch_size=1440)
        self.examples = {name: jnp.asarray(x) for name, x in self.task.data[0].items()}
        self.size = len(self.examples["y"])
        self.goal = epochs * self.size / BASE  # base steps

    def train(self, optimizer: str, rule: Any, scale: int, learning_rate: float, seed: int) -> Run:
        """Train until the goal is reached, or the loss is not finite."""
        import jax

        start, advance = _programs(self, optimizer, rule, scale)
        state = start(self.task.init(seed)[0], learning_rate)
        run = Run([], [], [], [])
        for mark in range(1, MARKS + 1):
            before = (int(state["step"]), float(state["tx"].progress))
            # Half a base step of tolerance: sums of gains are rounded.
            state = advance(state, self.examples, learning_rate, seed, self.goal * mark / MARKS - 0.5)
            step, progress = int(state["step"]), float(state["tx"].progress)
            accuracy = self.task.evaluate(jax.device_get(state["params"]))["accuracy"]
            run.steps.append(step)
            run.accuracy.append(accuracy)
            run.progress.append(progress)
            run.gain.append((progress - before[1]) / (step - before[0]) if step > before[0] else float("nan"))
        return run


@functools.cache
def _programs(digits: Digits, optimizer: str, rule: Any, scale: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """``start(params, learning_rate)`` and ``advance(state, examples, learning_rate, seed, until)``, compiled once."""
    import jax
    import jax.numpy as jnp
    import optax
    from jax import lax

    import jaxche

    measured = not isinstance(rule, jaxche.LinearScale)  # it counts examples
    make = {"SGD": optax.sgd, "Adam": optax.adam}[optimizer]
    per_epoch = digits.size // (BASE * scale)

    def scaled(learning_rate: Any) -> Any:
        def falling(progress: Any) -> Any:
            return learning_rate * jnp.maximum(1 - progress / digits.goal, 0)

        follows: Any = jaxche.progress_schedule(falling)
        return jaxche.scale_learning_rate(optax.inject_hyperparams(make)(learning_rate=follows), rule)

    def start(params: Any, learning_rate: Any) -> Any:
        noise = jaxche.noise_scale.init(params, base_batch_size=BASE, differenced=scale == 1)
        return {"params": params, "tx": scaled(learning_rate).init(params), "noise": noise, "step": jnp.int32(0)}

    def step(state: Any, examples: Any, learning_rate: Any, seed: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(seed), state["step"])
        shuffle = jax.random.fold_in(jax.random.key(seed + 1000), state["step"] // per_epoch)
        order = jax.random.permutation(shuffle, digits.size)
        place = state["step"] % per_epoch * BASE * scale
        chosen = lax.dynamic_slice_in_dim(order, place, BASE * scale).reshape(scale, BASE)
        params, noise = state["params"], state["noise"]
        seen = state["tx"].inner_state if isinstance(rule, jaxche.AdamScale) else None

        def one(total: Any, part: Any) -> tuple[Any, None]:
            batch = jax.tree.map(lambda x: x[part[0]], examples)
            grads = jax.grad(lambda p: digits.task.loss_fn(p, batch, rng=part[1])[0])(params)
            sums = jaxche.noise_scale.local_sums(noise, grads, BASE, opt_state=seen)
            return jax.tree.map(jnp.add, total, (grads, sums)), None

        zero = jaxche.noise_scale.Sums(jnp.zeros(1), *(jnp.zeros(()) for _ in range(5)))
        zeros = (jax.tree.map(jnp.zeros_like, params), zero)
        (grads, sums), _ = lax.scan(one, zeros, (chosen, jax.random.split(key, scale)))
        grads = jax.tree.map(lambda g: g / scale, grads)
        if measured:
            noise = jaxche.noise_scale.update_from_sums(noise, sums, grads, opt_state=seen)
        known = {"noise": noise} if measured else {}
        updates, tx = scaled(learning_rate).update(grads, state["tx"], params, scale=scale, **known)
        return {"params": optax.apply_updates(params, updates), "tx": tx, "noise": noise, "step": state["step"] + 1}

    def advance(state: Any, examples: Any, learning_rate: Any, seed: Any, until: Any) -> Any:
        return lax.while_loop(
            lambda s: s["tx"].progress < until, lambda s: step(s, examples, learning_rate, seed), state
        )

    return jax.jit(start), jax.jit(advance)


def measure_training(optimizer: str, args: argparse.Namespace) -> dict[str, Any]:
    """The sweep at scale 1, then every rule at every scale with the best learning rate of the sweep."""
    import jaxche

    digits, seeds = Digits(args.epochs), range(args.seeds)
    ours = jaxche.AdaScale() if optimizer == "SGD" else jaxche.AdamScale()
    print(f"\n{optimizer}: {digits.goal:.0f} base steps of {BASE} examples, {args.seeds} seeds")
    sweep = {}
    for rate in SWEEPS[optimizer]:
        sweep[rate] = [digits.train(optimizer, jaxche.LinearScale(), 1, rate, seed) for seed in seeds]
        shown = " ".join(f"{100 * run.accuracy[-1]:.1f}" for run in sweep[rate])
        print(f"  scale 1, learning rate {rate:g}: {shown} %", flush=True)
    best = max(sweep, key=lambda rate: statistics.mean(run.accuracy[-1] for run in sweep[rate]))
    runs = {f"scale 1, learning rate {best:g}": sweep[best]}
    print(f"{'':<28}{'steps':>14}{'summed gain':>13}{'a step':>8}{'test accuracy (%)':>20}{'of each seed':>22}")
    print_row(*next(iter(runs.items())))
    for rule in (ours, jaxche.LinearScale()):
        for scale in SCALES:
            name = f"{type(rule).__name__} at {scale}"
            runs[name] = [digits.train(optimizer, rule, scale, best, seed) for seed in seeds]
            print_row(name, runs[name])
    return {
        "learning_rate": best,
        "sweep": {str(rate): [run.accuracy[-1] for run in of_rate] for rate, of_rate in sweep.items()},
        "runs": {name: [run._asdict() for run in of_kind] for name, of_kind in runs.items()},
    }


def print_row(name: str, runs: Sequence[Run]) -> None:
    ends = [100 * run.accuracy[-1] for run in runs]
    steps = sorted({run.steps[-1] for run in runs})
    mean = statistics.mean(run.steps[-1] for run in runs)
    gain = statistics.mean(run.progress[-1] for run in runs)
    spread = f"{statistics.mean(ends):.2f} ± {statistics.stdev(ends) if len(ends) > 1 else 0:.2f}"
    shown = f"{steps[0]}" if len(steps) == 1 else f"{steps[0]}-{steps[-1]}"
    each = " ".join(f"{end:.1f}" for end in ends)
    print(f"{name:<28}{shown:>14}{gain:>13.0f}{gain / mean:>8.2f}{spread:>20}{each:>22}", flush=True)


def draw(results: dict[str, Any], path: Path) -> None:
    """Accuracy over steps and gain over progress, a row an optimizer; lines are means, bands the range of all seeds."""
    import numpy as np
    from matplotlib import pyplot as plt

    # Okabe and Ito's colours; a scale is a line style, so that the picture reads in grey too.
    colours = {"scale": "#000000", "AdaScale": "#0072B2", "AdamScale": "#0072B2", "LinearScale": "#D55E00"}
    figure, rows = plt.subplots(len(results), 2, figsize=(11, 4 * len(results)), layout="constrained", squeeze=False)
    plt.close(figure)
    for (optimizer, result), (left, right) in zip(results.items(), rows, strict=True):
        for name, runs in result["runs"].items():
            look = {"color": colours[name.split()[0]], "linestyle": "--" if name.endswith(" 16") else "-"}
            steps, accuracy, gain, progress = (
                np.array([run[key] for run in runs]) for key in ("steps", "accuracy", "gain", "progress")
            )
            # As text too, because a diverged run is below the picture.
            label = f"{name}: {100 * accuracy[:, -1].mean():.1f} % after {steps[:, -1].mean():.0f}"
            left.plot(steps.mean(0), 100 * accuracy.mean(0), label=label, **look)
            band = (100 * accuracy.min(0), 100 * accuracy.max(0))
            left.fill_between(steps.mean(0), *band, alpha=0.15, color=look["color"], linewidth=0)
            if not name.startswith("LinearScale"):
                right.plot(progress.mean(0), np.nanmean(gain, axis=0), **look)
        left.set(
            xscale="log",
            xlabel="steps",
            ylabel="test accuracy (%), from 80 up",
            title=f"{optimizer}: accuracy over steps",
        )
        left.set_ylim(80, 100)
        left.legend(loc="lower right", frameon=False, fontsize="small")
        right.set(
            xlabel="progress (base steps)",
            ylabel="base steps a step is worth",
            title=f"{optimizer}: gain",
        )
        right.set_ylim(bottom=0)
        for axes in (left, right):
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(color="0.9")
            axes.set_axisbelow(True)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"\npicture: {path}")


def measure_overhead(tasks: Sequence[str], makes: int, turns: int) -> dict[str, Any]:
    """A replica's step with and without a scaling rule, in every mode; rounds of all in turn, one replica working.

    Two trainers that are equal differ by some percent, by where their code and their arrays happen to lie, and do so
    for as long as they live. So each is made several times, and it is these that the interval counts. Two controls go
    the same way: a trainer equal to the one without a rule, and the same with a tenth more steps in a round. Some
    rounds are measured and others not, so it is the sum of several that is compared.
    """
    import tempfile

    import jax

    import jaxche
    from jaxche.cli._tasks import load

    rules = {"plain": None, "itself": None, "AdaScale": jaxche.AdaScale(), "AdamScale": jaxche.AdamScale()}
    columns = ("itself", MORE, "AdaScale", "AdamScale")
    results = {}
    print(
        f"ms a step of one replica without a rule, and what is added to it: the mean over {makes} makes of each\n"
        f"trainer and its 95 % interval; of a make the median of {turns} ratios to rounds without a rule beside them"
    )
    print(f"{'task':<7}{'mode':<13}{'steps':>6}{'plain':>7}" + "".join(f"{key:>17}" for key in columns))
    with tempfile.TemporaryDirectory() as cache:
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        for name in tasks:
            task = load(name)
            for mode, steps in ROUND.items():
                several = mode != "one replica"
                where = {"replicas": jax.devices()[: 2 if several else 1], "average": mode if several else None}
                made = [in_turn(task, rules, where, steps, turns, make) for make in range(makes)]
                plain = statistics.median(x for times in made for x in times["plain"])
                row = f"{name:<7}{mode:<13}{steps:>6}{plain:>7.2f}"
                for key in columns:
                    added = [
                        statistics.median(a / b for a, b in zip(times[key], times["plain"], strict=True)) - 1
                        for times in made
                    ]
                    row += f"{f'{statistics.mean(added):+.1%} ± {interval(added):.1%}':>17}"
                print(row, flush=True)
                results[f"{name}, {mode}"] = made
    return results


def in_turn(task: Any, rules: dict[str, Any], where: dict[str, Any], steps: int, turns: int, make: int) -> Any:
    """ms a step of a new trainer for each rule, some rounds at a time."""
    import jaxche

    order = list(rules)
    order = order[make % len(order) :] + order[: make % len(order)]
    trainers = {key: jaxche.Trainer(task.loss_fn, task.tx, scaling=rules[key], **where) for key in order}
    states = {key: trainer.init(*task.init(0)) for key, trainer in trainers.items()}
    order.append(MORE)
    trainers[MORE], states[MORE] = trainers["itself"], states["itself"]
    # An epoch is a round, so that none is cut short.
    lengths = {key: round(1.1 * steps) if key == MORE else steps for key in order}
    batches = [task.data.epoch(0)[i] for i in range(max(lengths.values()))]
    data = {key: batches[:length] for key, length in lengths.items()}
    times: dict[str, list[float]] = {key: [] for key in order}
    replicas = len(where["replicas"])
    for key, trainer in trainers.items():
        while states[key].round % CYCLE or states[key].round < FIRST_ROUNDS:
            states[key], _ = trainer.round(states[key], data[key], counts=(2, 0)[:replicas])
    for turn in range(turns):
        spent = dict.fromkeys(order, 0.0)
        for shift in range(CYCLE):
            first = (turn + shift) % len(order)
            for key in order[first:] + order[:first]:
                states[key], info = trainers[key].round(states[key], data[key], counts=(lengths[key], 0)[:replicas])
                spent[key] += info.wall_ms[0]
        for key in order:
            times[key].append(spent[key] / steps / CYCLE)
    return times


def interval(values: Sequence[float]) -> float:
    """Half the 95 % interval of their mean."""
    if len(values) < 2:
        return math.nan
    from scipy.stats import t

    return float(t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))


if __name__ == "__main__":
    sys.exit(main())
