"""Bytes of a merge and final loss of each ``wire=`` on a virtual clock, after the same number of batches.

Adam on the text task of ``jaxche train``, with a learning rate that falls to zero. The clock gives all wires the same
cost of a merge, so that their rounds are alike and only the rounding differs. Prints a Markdown table.

    python scripts/bench_wire.py
    python scripts/bench_wire.py --fleet 20/20/40/80 --seeds 0 1 --wires float32 int4
"""

from __future__ import annotations

import argparse
import os
import statistics

# One core a run: before jax starts.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import jax
import optax

import jaxche
from jaxche.cli import _tasks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fleet", default="20/50", help="ms a batch of each device (default 20/50)")
    parser.add_argument("--sync-ms", type=float, default=30.0, help="ms of a merge (default 30)")
    parser.add_argument("--batches", type=int, default=1000, help="of all devices (default 1000)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--wires", nargs="+", default=["float32", "bfloat16", "int8", "int4", "float32/local"])
    args = parser.parse_args()
    speeds = tuple(map(float, args.fleet.split("/")))
    jax.config.update("jax_num_cpu_devices", len(speeds))
    task = _tasks.load("text")
    tx = optax.adam(optax.cosine_decay_schedule(args.lr, args.batches))
    print(f"{args.fleet} ms a batch, {args.sync_ms:g} ms a merge, {args.batches} batches, seeds {args.seeds}\n")
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
            fleet=jaxche.VirtualFleet(speeds, sync_ms=args.sync_ms),
        )
        losses, rounds, sent = [], [], 0
        for seed in args.seeds:
            data = jaxche.Batches(task.data.arrays, task.data.batch_size, 1000 * seed)
            state = trainer.init(task.init(seed)[0])
            state, history = trainer.fit(state, data, max_steps=args.batches, progress=False)
            losses.append(task.evaluate(trainer.params(state), None)["loss"])
            rounds.append(len(history))
            sent = history[-1].merge_bytes
        baseline, baseline_bytes = baseline or losses, baseline_bytes or sent
        differences = [loss - one for loss, one in zip(losses, baseline, strict=True)]
        shown = f"`{wire}`" + (f', `opt_state="{opt_state}"`' if opt_state else "")
        error = statistics.stdev(losses) / len(losses) ** 0.5 if len(losses) > 1 else float("nan")
        print(
            f"| {shown} | {sent:,} "
            f"| 1/{baseline_bytes / sent:.2f} | {statistics.mean(rounds):.0f} | {statistics.mean(losses):.4f} "
            f"| {error:.4f} | {statistics.mean(differences):+.4f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
