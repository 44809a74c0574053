"""`jaxche plan`: what each sharding strategy would cost a device, on fake devices."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

from jaxche.cli._arguments import flag, given, whole
from jaxche.cli._command import Command
from jaxche.cli._tasks import TASKS, load
from jaxche.cluster import fake_devices

_EXAMPLES = """\
examples:
  jaxche plan                                        the text task on 8 fake devices
  jaxche plan --memory 2MiB                          and the cheapest that fits 2 MiB a device
  jaxche plan --devices 16 --intra-node-size 8       nodes of 8 for the hybrid strategies
  jaxche plan --batch-size 256 --accumulate 4 --compute-dtype bfloat16

exit codes:
  0     planned, and with --memory some strategy fits
  1     nothing fits --memory
  2     the arguments make no sense
"""


def _arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--task", choices=tuple(TASKS), default="text", help="what is trained (default: %(default)s)")
    add("--devices", type=whole("--devices 8"), default=8, help="how many (default: %(default)s)")
    add(
        "--intra-node-size",
        type=whole("--intra-node-size 4", 2),
        help="devices in a node (default: half of an even number)",
    )
    add("--memory", metavar="SIZE", help="what a device has, e.g. 16GiB; names the cheapest strategy that fits")
    add("--batch-size", type=whole("--batch-size 64"), default=64, help="of all devices (default: %(default)s)")
    add("--accumulate", type=whole("--accumulate 1"), default=1, help="micro-batches (default: %(default)s)")
    add("--compute-dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="default: %(default)s")
    add("--details", action="store_true", help="the whole table of each strategy, and which parameters stay whole")


def _run(args: argparse.Namespace) -> int:
    """Compiles a step of the task under every strategy and prints what it costs."""
    devices = _devices(args.devices)
    import jax.numpy as jnp

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
        as_bytes(args.memory)  # before anything is compiled
    task = load(args.task, batch_size=args.batch_size)
    params, model_state = task.init(0)
    strategies: list[Any] = [NoShard(), ShardGradOp(), FullShard()]
    node = args.intra_node_size or (len(devices) // 2 if len(devices) % 2 == 0 else 1)
    if node > 1:  # a node of one device has nothing to shard over
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
    try:
        return fake_devices(count)
    except RuntimeError as error:
        raise ValueError(f"--devices {count}: {error}") from error


def _smaller(args: argparse.Namespace) -> str:
    """The same command with less on a device: half the rows at once where they divide, else half the parameters."""
    devices, accumulate, rows = args.devices, args.accumulate, args.batch_size
    if rows % (2 * devices * accumulate) == 0:
        return _line(args, accumulate=2 * accumulate)
    if rows % (2 * devices) == 0:
        fewer = max(n for n in range(1, accumulate + 1) if rows % (2 * devices * n) == 0)
        return _line(args, devices=2 * devices, accumulate=fewer)
    return _line(args, devices=2 * devices, batch_size=2 * rows)


def _line(args: argparse.Namespace, **changed: int) -> str:
    """What to write for these arguments, with some of them changed."""
    words = ["jaxche", "plan"]
    for name, value in given(_arguments, argparse.Namespace(**vars(args) | changed)).items():
        words += [flag(name)] if value is True else [flag(name), str(value)]
    return shlex.join(words)


COMMAND = Command(
    "plan",
    "bytes a device keeps and sends under every sharding strategy",
    _EXAMPLES,
    _arguments,
    _run,
)
