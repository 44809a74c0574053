"""`jaxche plan`: memory and traffic of a device under each sharding strategy, compiled for fake devices."""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
from typing import Any

import jaxche
from jaxche.cli._command import Command, write_text
from jaxche.cli._options import Options, flag, non_default_options
from jaxche.cli._settings import TASKS

# Rows of a batch of a task.
_ROWS = 64

_ABOUT = """\
Computes before a run the memory and the traffic of each device under every sharding strategy, and
which strategy to use. Under a strategy each device stores the whole model (NoShard), or a slice of
parameters, gradients or optimizer state, which costs traffic. Nothing is trained: each step is
compiled for fake CPU devices."""

_EPILOG = """\
your model:
  jaxche plan train.py:make_model imports train.py and calls make_model() for its shapes. It returns
    model, x                        a linen or nnx model and example inputs; with an optimizer
                                    like Adam, and the mean square of the outputs as loss
    loss_fn, tx, params, batch      a whole step, as jaxche.sharded_step takes it
    params                          parameters or an nnx model; without activations
  What the file runs as a script belongs under if __name__ == "__main__":
  In Python: jaxche.sharding.plan(make_model)

examples:
  jaxche plan train.py:make_model --memory 16GiB     your model on 8 devices of 16 GiB
  jaxche plan train.py:make_model --batch-size 256 --accumulate 4 --compute-dtype bfloat16
  jaxche plan my_package.models:make -o plan.json    a function of a module, and the table as data
  jaxche plan --devices 16 --intra-node-size 8       the text task of jaxche train on two nodes of 8

The table has bytes of a device: parameters, gradients, optimizer state, and other (activations,
gathered parameters). "in all" is what XLA plans for a step; devices of other kinds differ there.
"counted" is what a device sends in a step by the compiled program, "theory" by the formula.

exit codes:
  0     planned, and with --memory some strategy fits
  1     nothing fits --memory
  2     invalid arguments, or an error in your file
"""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="FILE.py:FUNCTION",
        help="a function without arguments that makes your model, see below; default: a model of jaxche train",
    )
    group = Options(parser, "devices")
    group.add_integer("--devices 8", "number of devices (default: %(default)s)", most=10_000, default=8)
    group.add("--memory", metavar="SIZE", help="memory of one device, e.g. 16GiB; the plan then says what fits")
    group.add_integer(
        "--intra-node-size 4",
        "devices of a node, in which links are fast; the hybrid strategies cut within nodes only (default: half "
        "of an even number)",
        least=2,
    )
    group = Options(parser, "model and step")
    group.add(
        "--task",
        choices=tuple(TASKS),
        default="text",
        help="plan the model of this task, without FILE.py (default: %(default)s)",
    )
    group.add_integer(
        "--batch-size 64",
        "examples in a step, on all devices together (default: 64; with FILE.py those of the example inputs)",
    )
    group.add_integer(
        "--accumulate 1",
        "micro-batches of a step, computed one after the other, which needs less memory (default: %(default)s)",
        default=1,
    )
    group.add(
        "--compute-dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="dtype of computations; parameters keep theirs (default: %(default)s)",
    )
    group = Options(parser, "output")
    group.add(
        "--details",
        action="store_true",
        help="also a table of each strategy, with the parameters that stay whole on every device and why",
    )
    group.add_out("what is printed, or with the ending .json the table as data (default: only the screen)")


def _run(args: argparse.Namespace) -> int:
    """Compile a training step under each strategy, and print its costs."""
    if args.model is not None and args.task != "text":
        raise ValueError(f"{args.model} and --task {args.task} are two models; leave one of them out")
    devices = _devices(args.devices)
    import jax.numpy as jnp

    if (node := args.intra_node_size) and len(devices) % node:
        fits = max(n for n in range(1, node) if len(devices) % n == 0)
        advice = f"write --intra-node-size {fits}" if fits > 1 else "leave it out"
        raise ValueError(f"--intra-node-size {node} does not divide the {len(devices)} devices; {advice}")
    options = {
        "strategies": jaxche.sharding.default_strategies(devices, node),
        "devices": devices,
        "memory": args.memory,
        "accumulate": args.accumulate,
        "compute_dtype": None if args.compute_dtype == "float32" else jnp.dtype(args.compute_dtype),
    }
    costs = _costs(args, options)
    lines = [f"{_name(args, costs)}, batches of {costs.batch_size} on {len(devices)} devices, compiled for cpu\n"]
    lines += [f"{explanation}\n" for explanation in costs.explanations if args.details]
    lines += [f"{costs}\n", f"next: {_next(args, costs)}"]
    text = "\n".join(lines)
    print(text)
    if args.out is not None:
        write_text(args.out, json.dumps(costs.rows, indent=2) if args.out.endswith(".json") else text + "\n")
    return 0 if costs.cheapest else 1


def _costs(args: argparse.Namespace, options: dict[str, Any]) -> jaxche.sharding.Comparison:
    if args.model is not None:
        from jaxche.cli._target import load_function, user_errors

        make = load_function(args.model)
        with user_errors(args.model):
            return jaxche.sharding.plan(make, batch_size=args.batch_size, **options)
    from jaxche.cli._tasks import load

    task = load(args.task, batch_size=args.batch_size or _ROWS)
    params, model_state = task.init(0)
    return jaxche.sharding.compare_strategies(
        task.loss_fn, task.tx, params, task.data[0], model_state=model_state, **options
    )


def _name(args: argparse.Namespace, costs: jaxche.sharding.Comparison) -> str:
    if args.model is None:
        return f"task {args.task}"
    parameters = sum(math.prod(leaf.shape) for leaf in costs.explanations[0].leaves)
    return f"{args.model} with {parameters:,} parameters"


def _next(args: argparse.Namespace, costs: jaxche.sharding.Comparison) -> str:
    """The line to write for the advised strategy, or the command of a plan that needs less."""
    cheapest = costs.cheapest
    if cheapest is None:
        return _smaller(args, costs.batch_size)
    more = f", accumulate={args.accumulate}" if args.accumulate > 1 else ""
    more += f", compute_dtype=jnp.{args.compute_dtype}" if args.compute_dtype != "float32" else ""
    step = f"jaxche.sharded_step(loss_fn, tx, jaxche.{cheapest}{more})"
    if not (cheapest.shards_params or cheapest.shards_state):
        return f"jaxche.Trainer(loss_fn, tx), in which each device is a replica\n      {step}"
    return f"{step}\n      jaxche.Trainer(loss_fn, tx, strategy=jaxche.{cheapest}) where nodes differ in speed"


def _devices(count: int) -> list[Any]:
    os.environ["XLA_FLAGS"] = jaxche.cluster.with_flags(os.environ.get("XLA_FLAGS", ""), jaxche.cluster.UNRUN_FLAGS)
    try:
        return jaxche.cluster.fake_devices(count)
    except RuntimeError as error:
        raise ValueError(f"--devices {count}: {error}") from error


def _smaller(args: argparse.Namespace, rows: int) -> str:
    """The same command with less on each device: half the rows at once if they divide, else half the parameters."""
    devices, accumulate = args.devices, args.accumulate
    if rows % (2 * devices * accumulate) == 0:
        return _line(args, accumulate=2 * accumulate)
    if rows % (2 * devices) == 0:
        fewer = max(n for n in range(1, accumulate + 1) if rows % (2 * devices * n) == 0)
        return _line(args, devices=2 * devices, accumulate=fewer)
    return _line(args, devices=2 * devices, batch_size=2 * rows)


def _line(args: argparse.Namespace, **changed: int) -> str:
    """The command line of these arguments with some of them changed."""
    words = ["jaxche", "plan", *([args.model] if args.model else [])]
    for name, value in non_default_options(_add_arguments, argparse.Namespace(**vars(args) | changed)).items():
        if name != "model":
            words += [flag(name)] if value is True else [flag(name), str(value)]
    return shlex.join(words)


COMMAND = Command(
    "plan",
    "memory and traffic of a model on several devices, before it is trained",
    _EPILOG,
    _add_arguments,
    _run,
    usage="%(prog)s [FILE.py:FUNCTION] [options]",
    about=_ABOUT,
)
