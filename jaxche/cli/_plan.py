"""`jaxche plan`: memory and traffic of a device under each sharding strategy, compiled for fake devices."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

from jaxche.cli._command import Command, flag, integer, non_default_options
from jaxche.cli._settings import TASKS

_EPILOG = """\
examples:
  jaxche plan                                        the text task on 8 fake devices
  jaxche plan --memory 2MiB                          also the cheapest that fits 2 MiB a device
  jaxche plan --devices 16 --intra-node-size 8       nodes of 8 for the hybrid strategies
  jaxche plan --batch-size 256 --accumulate 4 --compute-dtype bfloat16

exit codes:
  0     planned, and with --memory some strategy fits
  1     nothing fits --memory
  2     invalid arguments
"""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--task", choices=tuple(TASKS), default="text", help="what to train (default: %(default)s)")
    add("--devices", type=integer("--devices 8"), default=8, help="number of devices (default: %(default)s)")
    add(
        "--intra-node-size",
        type=integer("--intra-node-size 4", 2),
        help="devices in a node (default: half of an even number)",
    )
    add("--memory", metavar="SIZE", help="memory of a device, e.g. 16GiB; names the cheapest strategy that fits")
    add("--batch-size", type=integer("--batch-size 64"), default=64, help="rows on all devices (default: %(default)s)")
    add("--accumulate", type=integer("--accumulate 1"), default=1, help="micro-batches a step (default: %(default)s)")
    add("--compute-dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="default: %(default)s")
    add("--details", action="store_true", help="the full table of each strategy, and which parameters are replicated")


def _run(args: argparse.Namespace) -> int:
    """Compiles a training step of the task under each strategy and prints its costs."""
    devices = _devices(args.devices)
    import jax.numpy as jnp

    from jaxche.cli._tasks import load
    from jaxche.sharding import (
        FullShard,
        HybridShard,
        HybridShardGradOp,
        NoShard,
        ShardGradOp,
        as_bytes,
        compare_strategies,
    )

    if args.memory is not None:
        as_bytes(args.memory)  # refuse a bad value before compiling
    task = load(args.task, batch_size=args.batch_size)
    params, model_state = task.init(0)
    strategies: list[Any] = [NoShard(), ShardGradOp(), FullShard()]
    node = args.intra_node_size or (len(devices) // 2 if len(devices) % 2 == 0 else 1)
    if node > 1:
        strategies += [HybridShardGradOp(node), HybridShard(node)]
    costs = compare_strategies(
        task.loss_fn,
        task.tx,
        params,
        task.data[0],
        strategies=strategies,
        devices=devices,
        memory=args.memory,
        model_state=model_state,
        accumulate=args.accumulate,
        compute_dtype=None if args.compute_dtype == "float32" else jnp.dtype(args.compute_dtype),
    )
    print(f"task {args.task}, batches of {args.batch_size} on {len(devices)} devices, compiled for cpu\n")
    for explanation in costs.explanations if args.details else ():
        print(f"{explanation}\n")
    print(costs)
    cheapest = costs.cheapest
    if cheapest is None:
        print(f"\nnext: {_smaller(args)}")
        return 1
    more = f", accumulate={args.accumulate}" if args.accumulate > 1 else ""
    more += f", compute_dtype=jnp.{args.compute_dtype}" if args.compute_dtype != "float32" else ""
    print(f"\nnext: jaxche.sharded_step(loss_fn, tx, jaxche.{cheapest}{more})")
    print(f"      jaxche.Trainer(loss_fn, tx, strategy=jaxche.{cheapest}) where nodes differ in speed")
    return 0


def _devices(count: int) -> list[Any]:
    from jaxche.cluster import fake_devices

    try:
        return fake_devices(count)
    except RuntimeError as error:
        raise ValueError(f"--devices {count}: {error}") from error


def _smaller(args: argparse.Namespace) -> str:
    """The same command with less on each device: half the rows at once if they divide, else half the parameters."""
    devices, accumulate, rows = args.devices, args.accumulate, args.batch_size
    if rows % (2 * devices * accumulate) == 0:
        return _line(args, accumulate=2 * accumulate)
    if rows % (2 * devices) == 0:
        fewer = max(n for n in range(1, accumulate + 1) if rows % (2 * devices * n) == 0)
        return _line(args, devices=2 * devices, accumulate=fewer)
    return _line(args, devices=2 * devices, batch_size=2 * rows)


def _line(args: argparse.Namespace, **changed: int) -> str:
    """The command line of these arguments with some of them changed."""
    words = ["jaxche", "plan"]
    for name, value in non_default_options(_add_arguments, argparse.Namespace(**vars(args) | changed)).items():
        words += [flag(name)] if value is True else [flag(name), str(value)]
    return shlex.join(words)


COMMAND = Command(
    "plan",
    "memory and traffic of a device under every sharding strategy",
    _EPILOG,
    _add_arguments,
    _run,
)
