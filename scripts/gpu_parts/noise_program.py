"""Rounds with and without a scaling rule, in turn; alone, or as one of two processes."""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import jax
import optax

import jaxche
from gpu_parts import workloads
from gpu_parts.processes import program_parser, write

# All of the first rounds are measured, then every second or fourth: only whole cycles are compared.
_FIRST_ROUNDS, _CYCLE = 8, 4


def main() -> None:
    parser = program_parser()
    parser.add_argument("--turns", type=int, required=True)
    parser.add_argument("--makes", type=int, required=True)
    parser.add_argument("--rules", required=True)
    args = parser.parse_args()
    jaxche.initialize()
    several = jax.process_count() > 1
    # A small one beside the CPU, which runs a step of it to warm up.
    workload = workloads.cnn(args.cpu) if several else workloads.transformer(args.cpu)
    rows = [
        row
        for mode in (("parameters", "gradients") if several else ("one replica",))
        for row in compare(workload, mode if several else None, args)
    ]
    write(args.out, jax.process_index(), rows)


def compare(workload: Any, average: str | None, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each rule: milliseconds a step without it, and the median ratio of a step with it."""
    steps = 20 if average or args.cpu else 100
    rules = {name: getattr(jaxche, name)() for name in args.rules.split(",")}
    ratios: dict[str, list[float]] = {name: [] for name in rules}
    plain: list[float] = []
    for _ in range(args.makes):  # equal trainers differ by some percent for as long as they exist
        made = {"plain": Rounds(workload, average, None, steps)}
        made |= {name: Rounds(workload, average, rule, steps) for name, rule in rules.items()}
        for _ in range(args.turns):
            spent = dict.fromkeys(made, 0.0)
            for shift in range(_CYCLE):
                order = list(made)[shift % len(made) :] + list(made)[: shift % len(made)]
                for name in order:
                    spent[name] += made[name].run()
            plain.append(spent["plain"] / _CYCLE / steps)
            for name in rules:
                ratios[name].append(spent[name] / spent["plain"])
    mode = f"average={average}" if average else "one replica"
    row = {"mode": mode, "model": workload.name, "steps": steps, "plain_ms": statistics.median(plain)}
    return [row | {"rule": name, "ratio": statistics.median(found)} for name, found in ratios.items()]


class Rounds:
    """Rounds of a trainer in which the first replica takes all steps."""

    def __init__(self, workload: Any, average: str | None, rule: Any, steps: int):
        where = {"average": average} if average else {"replicas": jax.devices()[:1]}
        # AdamScale needs the second moments.
        self._trainer = jaxche.Trainer(workload.loss_fn, optax.adam(1e-3), scaling=rule, opt_state="local", **where)
        self._state = self._trainer.init(workload.init())
        self._data, self._counts = workload.batches(1_000_000), (steps, 0)[: 2 if average else 1]
        while self._state.round % _CYCLE or self._state.round < _FIRST_ROUNDS:
            few = tuple(min(2, count) for count in self._counts)
            self._state, _ = self._trainer.round(self._state, self._data, counts=few)

    def run(self) -> float:
        """One round; returns the milliseconds of the steps of the first replica."""
        self._state, info = self._trainer.round(self._state, self._data, counts=self._counts)
        return info.wall_ms[0]


if __name__ == "__main__":
    main()
