"""Bytes of a merge and final loss of each ``wire=`` on a virtual clock, after the same number of batches.

Adam on the text task of ``jaxche train``, with a learning rate that falls to zero. The clock gives all wires the same
cost of a merge, so that their rounds are alike and only the rounding differs. Prints a Markdown table.

    python scripts/bench_wire.py
    python scripts/bench_wire.py --fleet 20,20,40,80 --seeds 0 1 --wires float32 int4
    python scripts/bench_wire.py --speed 50     # the arithmetic of a merge, for 50 million parameters

``--speed`` prints the milliseconds of a core that each part takes, and each replica of a whole merge of two.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import time
from typing import Any

# One core a run: before jax starts.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from fleet import fleet, title

import jaxche
from jaxche.averaging._wire import decode, encode, mean_of_rows
from jaxche.cli import _tasks
from jaxche.replicas._coded_merge import agreement
from jaxche.replicas._merge import ToMerge
from jaxche.replicas._table import HOST_COLUMNS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fleet", type=fleet, default="20,50", help="ms a batch of each device (default %(default)s)")
    parser.add_argument("--sync-ms", type=float, default=30.0, help="ms of a merge (default 30)")
    parser.add_argument("--batches", type=int, default=1000, help="of all devices (default 1000)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--wires", nargs="+", default=["float32", "bfloat16", "int8", "int4", "float32/local"])
    parser.add_argument("--speed", type=float, metavar="MILLIONS", help="time merges of as many parameters instead")
    args = parser.parse_args()
    # Runs are compared with each other, and the table is in one piece.
    logging.getLogger("jaxche").setLevel(logging.ERROR)
    if args.speed:
        # The arithmetic of a wire does not depend on what else is averaged.
        speed(round(args.speed * 1e6), [wire for wire in args.wires if "/" not in wire])
        return
    jax.config.update("jax_num_cpu_devices", len(args.fleet))
    task = _tasks.load("text")
    tx = optax.adam(optax.cosine_decay_schedule(args.lr, args.batches))
    print(f"{title(args.fleet)} ms a batch, {args.sync_ms:g} ms a merge, {args.batches} batches, seeds {args.seeds}\n")
    print("| `wire=` | bytes of a merge | of float32 | rounds | final loss | standard error | against float32 |")
    print("|---|---|---|---|---|---|---|", flush=True)
    baseline: list[float] = []
    baseline_bytes = 0
    for name in args.wires:
        wire, _, opt_state = name.partition("/")
        trainer = jaxche.Trainer(
            task.loss_fn,
            tx,
            wire=wire,
            opt_state=opt_state or "auto",
            fleet=jaxche.VirtualFleet(args.fleet, sync_ms=args.sync_ms),
        )
        losses, rounds, sent = [], [], 0
        for seed in args.seeds:
            data = jaxche.Batches(task.data.arrays, task.data.batch_size, 1000 * seed)
            state = trainer.init(task.init(seed)[0])
            state, history = trainer.fit(state, data, max_steps=args.batches, progress=False)
            losses.append(task.evaluate(trainer.params(state))["loss"])
            rounds.append(len(history))
            sent = history[-1].merge_bytes
        baseline, baseline_bytes = baseline or losses, baseline_bytes or sent
        differences = [loss - one for loss, one in zip(losses, baseline, strict=True)]
        shown = f"`{wire}`" + (f', `opt_state="{opt_state}"`' if opt_state else "")
        print(
            f"| {shown} | {sent:,} "
            f"| 1/{baseline_bytes / sent:.2f} | {statistics.mean(rounds):.0f} | {statistics.mean(losses):.4f} "
            f"| {standard_error(losses)} | {statistics.mean(differences):+.4f} |",
            flush=True,
        )


def standard_error(losses: list[float]) -> str:
    """The standard error of the mean of these losses; a dash for a single loss."""
    return f"{statistics.stdev(losses) / len(losses) ** 0.5:.4f}" if len(losses) > 1 else "-"


def speed(size: int, wires: list[str]) -> None:
    """Print what merges of this many parameters take without a link."""
    jax.config.update("jax_num_cpu_devices", 2)
    x, weights = jnp.asarray(np.random.default_rng(0).normal(size=size), jnp.float32), jnp.array([2.0, 1.0])
    print("| part, ms of a core | " + " | ".join(wires) + " |\n|---|" + "---|" * len(wires))
    parts: dict[str, Any] = {
        "codes of changes": lambda wire: core_ms(lambda x: encode(x, wire), x),
        "codes of second moments": lambda wire: core_ms(lambda x: encode(x, wire, cut=True), x * x),
        "from codes": lambda wire: core_ms(lambda data: decode(data, size, wire), encode(x, wire)),
        "mean of two": lambda wire: core_ms(
            lambda data: mean_of_rows(jnp.stack([data, data]), weights, size, wire), encode(x, wire)
        ),
        "checksum of the parameters": lambda wire: core_ms(
            jax.vmap(lambda x: agreement(x, jnp.float32(1), "r"), axis_name="r"), x[None]
        ),
        "a whole merge, SGD": lambda wire: merge_ms(size, wire, optax.sgd(0.1)),
        "a whole merge, Adam": lambda wire: merge_ms(size, wire, optax.adam(1e-3)),
    }
    for name, part in parts.items():
        coded = [wire != "float32" or "merge" in name for wire in wires]
        found = [f"{part(wire):,.0f}" if takes_part else "" for wire, takes_part in zip(wires, coded, strict=True)]
        print(f"| {name} | {' | '.join(found)} |", flush=True)


def core_ms(function: Any, *arguments: Any, times: int = 4) -> float:
    """The least time of a core that a compiled function takes."""
    program, took = jax.jit(function), []
    jax.block_until_ready(program(*arguments))
    for _ in range(times):
        clock = time.process_time()
        jax.block_until_ready(program(*arguments))
        took.append(time.process_time() - clock)
    return 1e3 * min(took)


def merge_ms(size: int, wire: str, tx: optax.GradientTransformation, times: int = 3) -> float:
    """The least time of a core that each of two replicas takes in a merge."""
    params = {"map": np.zeros((32, 32), np.float32), "rest": np.ones(size - 32 * 32, np.float32)}
    trainer = jaxche.Trainer(lambda p, x: jnp.mean((x @ p["map"] - x) ** 2), tx, replicas=jax.devices()[:2], wire=wire)
    batches = jaxche.Batches(np.random.default_rng(0).normal(size=(8, 32)).astype(np.float32), batch_size=1)
    state, _ = trainer.round(trainer.init(params), batches, (1, 1))
    engine, took = trainer._engine, []
    merge, local_states = engine._merge, engine.fitted(state.local_states)
    for _ in range(times):
        carries = [one.idle(local).carry for one, local in zip(engine._replicas, local_states, strict=True)]
        arguments = merge.arguments(ToMerge(local_states, carries, np.ones((2, len(HOST_COLUMNS)), np.float32)))
        jax.block_until_ready(arguments)
        clock = time.process_time()
        jax.block_until_ready(merge._program(*arguments))
        took.append((time.process_time() - clock) / 2)
    return 1e3 * min(took)


if __name__ == "__main__":
    main()
