"""`jaxche train --protocol`: a model in stages on several devices or in several processes."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

import jaxche
from jaxche.cli._command import join
from jaxche.cli._options import flag

_STAGES = 2
# Default number of micro-batches under `pipeline`.
_MICRO_BATCHES = 4
_PRINT_EVERY_S = 5.0
_TEST_CHUNK = 64
# The options for a model in stages.
_OPTIONS = ("task", "protocol", "stages", "micro_batch_size", "store")
_OPTIONS += ("batch_size", "learning_rate", "epochs", "seed", "dry_run")


def check_stages(args: argparse.Namespace, given: Iterable[str]) -> None:
    """Refuse options that exclude each other; ``given`` are the names of the options on the command line."""
    if args.protocol is None:
        idle = [name for name in ("stages", "store", "micro_batch_size") if name in given]
        if idle:
            raise ValueError(f"{flag(idle[0])} is for a model in stages; add --task text --protocol pipeline")
        return
    if args.task != "text":
        raise ValueError(f"--protocol {args.protocol} is for --task text; write --task text --protocol {args.protocol}")
    idle = [name for name in given if name not in _OPTIONS]
    if idle:
        raise ValueError(
            f"{flag(idle[0])} is for replicas, and --protocol trains one model in stages; leave one of them out"
        )
    if (args.store is None) == (args.protocol == "store"):
        raise ValueError("--protocol store and --store URL go together, e.g. --protocol store --store /shared/run")
    if args.protocol == "direct" and args.micro_batch_size is not None:
        raise ValueError("--protocol direct sends whole batches; leave --micro-batch-size out or write pipeline")


def run_stages(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Train, or start the processes that train, with the variables ``env`` added, and return the exit code."""
    n_stages = args.stages or _STAGES
    if args.protocol == "store":
        found = jaxche.cluster.detect(os.environ)
        if found.launcher == "none":
            command = [sys.executable, "-m", "jaxche", *args.words]
            return jaxche.cluster.launch(command, n_stages, env=env, prefix=False)
        # Stages that exchange objects in a store need only their number. JAX reads it from schedulers when it joins.
        member = found if found.num_processes else join()
    else:
        import jax

        member = join()
        if member.num_processes == 1:
            # One CPU device for each stage. Accelerators stay the default devices; `fake_devices` would hide them.
            jax.config.update("jax_num_cpu_devices", n_stages)
            return train(args, n_stages, None)
    if (count := member.num_processes) != n_stages:
        raise ValueError(f"{count} processes for {n_stages} stages; start one a stage, or write --stages {count}")
    return train(args, n_stages, [member.process_id])


def _protocol(args: argparse.Namespace, batch_size: int, batches: int) -> Any:
    if args.protocol == "direct":
        return jaxche.Direct()
    if args.protocol == "store":
        # The step of a saved state is a place in this data.
        settings = {"batch_size": batch_size, "batches": batches, "seed": args.seed}
        return jaxche.DataStore(args.store, micro_batch_size=args.micro_batch_size, settings=settings)
    return jaxche.Pipeline(args.micro_batch_size or max(1, batch_size // _MICRO_BATCHES))


def train(args: argparse.Namespace, n_stages: int, local: list[int] | None) -> int:
    """Train the stages ``local`` of this process (None: all) and return the exit code."""
    import jax

    from jaxche.cli._tasks import EPOCHS, adam, text_stages

    task = text_stages(n_stages, args.batch_size, args.seed)
    # Skip the smaller last batch of an epoch: micro-batches may not divide it.
    batches = sum(len(batch) == task.data.batch_size for batch in task.data.epoch(0))
    protocol = _protocol(args, task.data.batch_size, batches)
    model = jaxche.Partitioned(task.stages, task.loss, protocol, local_stages=local, seed=args.seed)
    state = model.init(task.params, adam(args.learning_rate))
    prints = local is None or n_stages - 1 in local
    epochs = args.epochs or EPOCHS
    if prints:
        sizes = ", ".join(f"{sum(leaf.size for leaf in jax.tree.leaves(p)):,}" for p in task.params)
        print(f"task text in {n_stages} stages of {sizes} parameters, {protocol}", flush=True)
        if state.step:
            print(f"resumed at step {state.step}", flush=True)
    steps = state.step + 1 if args.dry_run else epochs * batches
    began = printed = time.perf_counter()
    losses: list[float] = []
    while state.step < steps:
        epoch, index = divmod(state.step, batches)
        batch = task.data.epoch(epoch)[index]
        if args.dry_run:  # a step would save a state in the store, from which a later run resumes
            loss, _ = model.value_and_grad(state.params, batch, step=state.step)
            state = state._replace(step=steps)
        else:
            state, loss = model.step(state, batch)
        losses.append(float(loss))
        now = time.perf_counter()
        if prints and (now - printed >= _PRINT_EVERY_S or state.step == steps):
            mean = sum(losses) / len(losses)
            print(f"step {state.step} of {epochs * batches}: loss {mean:.3f} after {now - began:.1f} s", flush=True)
            losses, printed = [], now
    if local is None and not args.dry_run:
        loss, accuracy = _evaluate(model, state, task)
        print(f"test loss {loss:.3f} (nats a character), test accuracy {100 * accuracy:.1f} %")
    model.close()
    return 0


def _evaluate(model: Any, state: Any, task: Any) -> tuple[float, float]:
    import numpy as np

    total, right = 0.0, 0
    for i in range(0, len(task.test), _TEST_CHUNK):
        window = task.test[i : i + _TEST_CHUNK]
        logits = np.asarray(model.apply(state.params, window))
        total += float(task.loss(logits, window)) * len(window)
        right += int((logits.argmax(-1) == window[:, 1:]).sum())
    return total / len(task.test), right / (len(task.test) * (task.test.shape[1] - 1))
