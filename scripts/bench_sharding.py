#!/usr/bin/env python
"""Step time and bytes sent of the sharded step, against FSDP written by hand: jit with annotations.

  .venv/bin/python scripts/bench_sharding.py                    FullShard and the others on 4 fake devices
  .venv/bin/python scripts/bench_sharding.py --platform gpu     on the available GPUs
  .venv/bin/python scripts/bench_sharding.py --trainer --steps 40    exact sync by the trainer, against jit over a mesh
  .venv/bin/python scripts/bench_sharding.py --stacked --devices 8   layers in one scan and in a Python loop: memory

Both train the same transformer on the same batches in the same process, turn by turn; medians. The step by hand is full
FSDP: parameters and optimizer state in the same slices, donated, in the same dtype. Fake devices share the machine's
cores: the ratio is the overhead of the step itself, not the speed of a network. FullShard gathers parameters a second
time; the step by hand keeps them until the backward pass.

With --trainer the devices share each batch in exact sync: as one replica of the trainer, and as a replica each. With
--stacked nothing runs: the compiler says what a device needs for 16 layers of 704 x 704 parameters and Adam.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from typing import Any

from jaxche.cluster import TUNABLES, with_tunables


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--platform", default="cpu")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32, help="windows of 48 characters, of all devices")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--steps", type=int, default=4, help="a turn, of each system")
    parser.add_argument("--trainer", action="store_true", help="exact sync of the trainer instead of strategies")
    parser.add_argument("--stacked", action="store_true", help="memory of layers in a scan and in a loop")
    args = parser.parse_args()
    if TUNABLES not in os.environ:  # page faults are a tenth of a step, or none, depending on sizes
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {TUNABLES: with_tunables("")})

    import jax

    jax.config.update("jax_platforms", args.platform)
    if args.platform == "cpu":
        jax.config.update("jax_num_cpu_devices", args.devices)

    from jaxche.sharding import FullShard, HybridShard, HybridShardGradOp, NoShard, ShardGradOp

    devices = jax.devices()[: args.devices]
    if args.stacked:
        report_stacked([NoShard(), ShardGradOp(), FullShard()], devices)
        return 0
    problem = Problem(args)
    print(
        f"{problem.count / 1e6:.2f} million parameters, batches of {args.batch_size}, {len(devices)} devices "
        f"({devices[0].device_kind}), {args.turns} turns of {args.steps} steps\n"
    )
    strategies: list[Any] = [FullShard(), ShardGradOp(), NoShard()]
    if len(devices) % 2 == 0 and len(devices) > 2:
        strategies += [HybridShard(len(devices) // 2), HybridShardGradOp(len(devices) // 2)]
    systems: dict[str, Any] = {"by hand": ByHand(problem, NoShard() if args.trainer else FullShard(), devices)}
    if args.trainer:
        systems |= {"one replica": Trained(problem, "process"), "a replica each": Trained(problem, devices)}
    else:
        systems |= {str(strategy): Ours(problem, strategy, devices) for strategy in strategies}
    times: dict[str, list[float]] = {name: [] for name in systems}
    for turn in range(args.turns + 1):  # the first one warms up
        names = list(systems) if turn % 2 else list(reversed(systems))
        for name in names:
            start = time.perf_counter()
            systems[name].run(args.steps)
            if turn:
                times[name].append((time.perf_counter() - start) / args.steps * 1e3)
    report(systems, times, costs=not args.trainer)
    return 0


class Problem:
    """A transformer on characters, and its batches."""

    def __init__(self, args: argparse.Namespace):
        import jax
        import optax

        from jaxche.cli._tasks import Transformer, text

        # The data of the text task, the model at the given size.
        task = text(args.batch_size, None, 0)
        vocabulary = int(task.test.arrays.max()) + 1
        net = Transformer(max(128, vocabulary), width=args.width, blocks=args.blocks)
        self.batches = [task.data[i] for i in range(8)]
        self.params = jax.jit(net.init)(jax.random.key(0), self.batches[0][:1, :-1])["params"]
        self.count = sum(x.size for x in jax.tree.leaves(self.params))
        self.tx = optax.adamw(1e-3)

        def loss_fn(params: Any, window: Any) -> Any:
            logits: Any = net.apply({"params": params}, window[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, window[:, 1:].astype("int32")).mean()

        self.loss_fn = loss_fn


class ByHand:
    """FSDP by hand: annotate parameters and batch, jit, donate; XLA adds the collectives."""

    def __init__(self, problem: Problem, strategy: Any, devices: Any):
        import jax
        import optax
        from jax.sharding import NamedSharding
        from jax.sharding import PartitionSpec as P

        from jaxche.sharding import Layout

        mesh = strategy.mesh(devices)
        self._batches, self._split, self._taken = problem.batches, NamedSharding(mesh, P("shard")), 0
        places = strategy.shardings(problem.params, mesh)
        self.params = jax.device_put(problem.params, places, may_alias=False)  # steps take it
        state_places = Layout(strategy, mesh, problem.params).opt_state(problem.tx)
        self.opt_state = jax.jit(problem.tx.init, out_shardings=state_places)(self.params)

        def step(params: Any, opt_state: Any, batch: Any) -> Any:
            loss, grads = jax.value_and_grad(problem.loss_fn)(params, batch)
            updates, opt_state = problem.tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss

        jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=(places, state_places, NamedSharding(mesh, P())))
        batch = jax.device_put(self._batches[0], self._split)
        self._step = jitted.lower(self.params, self.opt_state, batch).compile()
        self.losses: list[float] = []

    def run(self, steps: int) -> None:
        import jax

        for _ in range(steps):
            batch = jax.device_put(self._batches[self._taken % len(self._batches)], self._split)
            self.params, self.opt_state, loss = self._step(self.params, self.opt_state, batch)
            self._taken += 1
            self.losses.append(float(loss))  # waits: two steps in flight can deadlock fake devices

    def costs(self) -> tuple[Any, float | None, int]:
        """Collectives of a step, and bytes of each device: sent by the formula, and needed in memory."""
        from jaxche.sharding import collectives

        memory = self._step.memory_analysis()
        needed = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        sent = collectives(self._step.as_text(), self._split.mesh.size)
        return sent, None, needed + memory.temp_size_in_bytes


class Ours:
    """The sharded step under one strategy."""

    def __init__(self, problem: Problem, strategy: Any, devices: Any):
        from jaxche.sharding import sharded_step

        self._problem, self._taken = problem, 0
        self._step = sharded_step(problem.loss_fn, problem.tx, strategy, strategy.mesh(devices))
        self._state = self._step.init(problem.params)
        self.losses: list[float] = []

    def run(self, steps: int) -> None:
        for _ in range(steps):
            batch = self._problem.batches[self._taken % len(self._problem.batches)]
            self._state, metrics = self._step(self._state, batch)
            self._taken += 1
            self.losses.append(float(metrics["loss"]))

    def costs(self) -> tuple[Any, float | None, int]:
        explained = self._step.explain(self._problem.params, self._problem.batches[0])
        return explained.collectives, explained.theory, explained.peak


class Trained:
    """Exact sync by the trainer: one update for each batch."""

    def __init__(self, problem: Problem, replicas: Any):
        import jaxche

        joined = {} if replicas == "process" else {"joined_batches": 1}
        self._trainer = jaxche.Trainer(problem.loss_fn, problem.tx, policy="sync", replicas=replicas, **joined)
        self._state, self._batches = self._trainer.init(problem.params), problem.batches
        self.losses: list[float] = []

    def run(self, steps: int) -> None:
        import jax

        batches = [self._batches[i % len(self._batches)] for i in range(steps)]
        self._state, history = self._trainer.fit(self._state, batches, epochs=1, progress=False)
        jax.block_until_ready(self._state.local_states)
        self.losses.append(history[-1].loss)


def report(systems: dict[str, Any], times: dict[str, list[float]], costs: bool) -> None:
    hand, heads = times["by hand"], ["ms a step", "to by hand", "range"]
    found = {name: system.costs() for name, system in systems.items()} if costs else {}
    heads += ["sent MiB", "theory MiB", "memory MiB", "last loss"] if costs else []
    print(f"{'system':<22}" + "".join(f"{head:>14}" for head in heads))
    for name, system in systems.items():
        ratios = [own / other for own, other in zip(times[name], hand, strict=True)]
        cells = [f"{statistics.median(times[name]):.1f}", f"{statistics.median(ratios):.3f}"]
        cells.append(f"{min(ratios):.2f}-{max(ratios):.2f}")
        if costs:
            sent, theory, peak = found[name]
            cells += [f"{sum(c.sent for c in sent) / 2**20:.3f}", "-" if theory is None else f"{theory / 2**20:.3f}"]
            cells += [f"{peak / 2**20:.2f}", f"{system.losses[-1]:.5f}"]
        print(f"{name:<22}" + "".join(f"{cell:>14}" for cell in cells))
    if not costs:
        return
    print("\nMiB a device sends in a step, by kind of collective, and how many there are")
    for name, (sent, _, _) in found.items():
        kinds = {c.kind: [d for d in sent if d.kind == c.kind] for c in sent}
        shown = (f"{k} {sum(c.sent for c in kinds[k]) / 2**20:.3f} ({len(kinds[k])})" for k in sorted(kinds))
        print(f"{name:<22}  {', '.join(shown)}")
    if "reduce-scatter" not in {c.kind for c in found["by hand"][0]}:
        print("by hand: this compiler makes an all-reduce of annotations that ask for a reduce-scatter")


def report_stacked(strategies: list[Any], devices: Any) -> None:
    """What a device needs and sends where layers are one array that a scan reads, and where they are a list."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    from jaxche.sharding import sharded_step

    def layer(x: Any, w: Any) -> Any:
        return x + jnp.tanh(x @ w)

    def of_scan(params: Any, x: Any) -> Any:
        return jnp.mean(jax.lax.scan(lambda x, w: (jax.checkpoint(layer)(x, w), None), x, params)[0] ** 2)

    def of_loop(params: Any, x: Any) -> Any:
        for w in params:
            x = jax.checkpoint(layer)(x, w)
        return jnp.mean(x**2)

    layers, batch = np.zeros((16, 704, 704), np.float32), np.ones((2 * len(devices), 704), np.float32)
    size = f"{layers.nbytes / 2**20:.0f} MiB of parameters"
    print(f"{size}, {len(devices)} devices; the MiB that each device needs, and sends in a step")
    print(f"{'strategy':<16}{'scan':>8}{'loop':>8}{'sent, scan':>12}{'loop':>8}")
    for strategy in strategies:
        found = [
            sharded_step(loss, optax.adam(1e-3), strategy, strategy.mesh(devices)).explain(params, batch)
            for loss, params in ((of_scan, layers), (of_loop, list(layers)))
        ]
        needed, sent = (
            [size / 2**20 for size in sizes] for sizes in ([e.peak for e in found], [e.sent for e in found])
        )
        print(f"{strategy!s:<16}{needed[0]:>8.0f}{needed[1]:>8.0f}{sent[0]:>12.0f}{sent[1]:>8.0f}")


if __name__ == "__main__":
    sys.exit(main())
