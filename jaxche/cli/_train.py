"""`jaxche train`: trains a small model on real data, with one command."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import jaxche
from jaxche.cli._command import Command
from jaxche.cli._doctor_devices import install_line
from jaxche.cli._options import Options, directory_path, flag, non_default_options
from jaxche.cli._run_folder import refuse_directory
from jaxche.cli._settings import (
    MERGE_RULES,
    POLICIES,
    SCALING_RULES,
    TASKS,
    TUNERS,
    WIRES,
    pace_argument,
    policies,
    require,
    saves,
    trainers,
)
from jaxche.cli._stages import check_stages, run_stages
from jaxche.distributed import HANG_TIMEOUT, HEARTBEAT

_DEFAULT_PROCESSES = 2
_LONGEST_NAME = 255  # in bytes, of a folder in most file systems

_ABOUT = """\
Shows what jaxche does, on real data, in about a minute. Each process has a replica: a copy of the
model with its own optimizer state, on its own device. In a round every replica takes the training
steps that fit into the time of the round (its count); then a merge averages the replicas.
To train a model of your own, start your script with jaxche launch."""

_EPILOG = f"""\
tasks:
{chr(10).join(f"  {name:8s} {text}" for name, (text, _) in TASKS.items())}

examples:
  jaxche train                                     two processes, one 2.5 times slower
  jaxche train --compare sync,cadence,async        three policies in turn, side by side
  jaxche train -n 4 --ratios 1,1,2,4 --task text   four replicas of these speeds
  jaxche train --pace 20,50 -o /tmp/runs           exactly 20 and 50 ms a step
  jaxche train -n 1                                a plain training loop
  jaxche train --scaling adamscale                 learning rates by gradient noise, and advice
  jaxche train --task text --protocol pipeline     one model in two stages, on two devices
  jaxche train --task text --protocol store --store /tmp/run   in two processes with one folder
  jaxche train --name long --max-restarts 3        saves every round, restarts after a failure
  jaxche train --replay runs/long                  the same run again, bit for bit
  srun -n 8 jaxche train                           as one of the processes of Slurm or mpirun
  srun -n 8 jaxche train --name long --checkpoint-every 10     resumes in a requeued job

Without GPUs each process gets a CPU core, and its steps are padded to a wall time (its pace), so
that equal cores act as devices of different speeds. With GPUs each process gets one and no pace.

exit codes:
  0     success
  1     training failed, e.g. the loss became NaN
  2     invalid arguments, a missing package, a pace that is too short, or --out cannot be
        written; the line says what to write
  124   no process finished a round within --hang-timeout (1 under Slurm or mpirun)
  130   Ctrl-C
  143   SIGTERM; with --checkpoint-every or --max-restarts it saves, and the same command resumes
  128+n signal n ended a process (137: SIGKILL, often out of memory)

Under Slurm or mpirun the launcher restarts a failed run; see jaxche launch --help.
"""


def _name(text: str) -> str:
    if text in ("", ".", "..") or "/" in text or len(os.fsencode(text)) > _LONGEST_NAME:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no name of a folder in --out; write e.g. --name first, or --out ~/runs --name first"
        )
    return text


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    options = Options(parser)
    options.add("--task", choices=tuple(TASKS), default="mnist", help="what to train, see below (default: %(default)s)")
    options.add(
        "--replay",
        type=directory_path,
        metavar="RUN",
        help="repeat a recorded run, e.g. runs/first, and compare the parameters",
    )
    options.add("--dry-run", action="store_true", help="try one batch on every replica and one merge; writes nothing")

    group = Options(parser, "replicas and their speeds")
    group.add_processes("number of processes, each with one replica (default: one per GPU; 2 without GPUs)")
    group.add_numbers(
        "--ratios 1,2.5",
        "R,R,...",
        "how long a step takes on each replica, relative to the others: with 1,2.5 the second is 2.5 times slower "
        "(default on CPU cores: 1,2.5; with more processes in equal steps from 1 to 2.5)",
    )
    group.add(
        "--pace",
        type=pace_argument,
        metavar="auto|none|MS,MS,...",
        help="time of a step of each replica in milliseconds, e.g. 20,50; shorter steps wait. auto: by --ratios; none: "
        "as fast as each can (default: auto on CPU cores, none on GPUs)",
    )

    group = Options(parser, "merging, which makes the replicas equal again")
    policy = group.exclusive()
    policy.add(
        "--policy",
        choices=POLICIES,
        help="sync: after every step, which is exact; cadence: after a round, in which each replica takes the steps "
        "that fit into it (default); async: the same, with shorter rounds while replicas drift apart; auto: sync or "
        "cadence, as measured times suggest",
    )
    policy.add(
        "--compare",
        type=_compared,
        metavar="P,P,...",
        help="train with each of these policies from the same start, and compare, e.g. sync,cadence",
    )
    group.add(
        "--average",
        choices=("parameters", "gradients"),
        help="what a merge averages: parameters, which each replica has changed, or gradients, for one step that all "
        "take (default: gradients under sync, else parameters)",
    )
    group.add(
        "--merge",
        choices=MERGE_RULES,
        help="weight of a replica in a merge: by its steps (default), by its batch size, or fednova: all alike, "
        "however many their steps",
    )
    group.add(
        "--opt-state",
        choices=("local", "average", "reset"),
        help="what a merge does with optimizer states, e.g. Adam's moments: average them (default), keep them on "
        "each replica, or initialize them again",
    )
    group.add(
        "--wire",
        choices=WIRES,
        help="how a merge sends its numbers: int8 and int4 are codes of 8 and 4 bits, for slow links (default: "
        "float32)",
    )
    group.add_integer(
        "--anchor 4",
        "steps of the slowest replica in the first round; later rounds follow measured times (default: 1, and 2 with "
        "--average gradients)",
        most=200,
    )
    group.add(
        "--tuner",
        choices=TUNERS,
        help="what chooses the length of rounds: progress, the most progress a second (default); steady, the shortest "
        "round that meets --overhead-target (default with --average gradients); seed, the method of flodl",
    )
    group.add_number(
        "--overhead-target 0.02",
        "SHARE",
        "time that merging and waiting may cost, relative to the steps, e.g. 0.015 for 1.5 %%; selects the tuner "
        "steady",
        least=0.01,
        most=0.5,
    )
    group.add_integer(
        "--max-batch-diff 8",
        "how many more steps than the slowest replica any replica may take in a round (default: no limit)",
        least=0,
    )

    group = Options(parser, "optimizer and data")
    group.add_integer("--epochs 3", "passes over the data (default: those of the task)")
    group.add_integer("--batch-size 32", "examples in a step of one replica (default: those of the task)")
    group.add_number("--learning-rate 1e-3", "RATE", "learning rate of Adam (default: that of the task)", above=True)
    group.add(
        "--scaling",
        choices=tuple(SCALING_RULES),
        help="raise the learning rate, because several replicas together train on a larger batch: linear and sqrt by "
        "its size, adascale (for SGD) and adamscale (for Adam) by the measured gradient noise (default: no scaling)",
    )
    group.add_number(
        "--ema 0.05",
        "SHARE",
        "evaluate a moving average of the parameters, whose mean age is this part of the run, e.g. 0.05, in place of "
        "a learning rate that falls; the parameters on file are the last ones (default: no average)",
        least=0.001,
        most=0.5,
    )
    group.add_integer(
        "--seed 0",
        "seed of the initial parameters, the order of the data and dropout (default: 0)",
        least=0,
        most=2**63 - 1,
        default=0,
    )

    group = Options(parser, "files and failures")
    group.add_out("the folder of all runs; this one gets a folder in it (default: %(default)s)", "runs", directory_path)
    group.add(
        "--name",
        type=_name,
        help="name of the run and its folder (default: task-policy-date-time); required for checkpoints under srun or "
        "mpirun",
    )
    group.add_integer(
        "--checkpoint-every 10",
        "save a checkpoint after so many rounds; the same command with the same --name resumes from it (default: "
        "no checkpoints, with --max-restarts after every round, under exact sync once a second)",
        metavar="ROUNDS",
    )
    group.add_integer(
        "--max-restarts 3", "restarts after failures, from the last checkpoint (default: 0)", least=0, default=0
    )
    group.add_number(
        "--hang-timeout 600",
        "S",
        "fail if no process finishes a round in so many seconds, start included (default: no limit)",
        above=True,
    )

    group = Options(parser, "one model cut into stages, instead of replicas (with --task text)")
    group.add(
        "--protocol",
        choices=("direct", "pipeline", "store"),
        help="how a stage sends its output to the next: direct, a whole batch at a time; pipeline, in micro-batches, "
        "so that all stages work at once; store, through a shared folder or bucket",
    )
    group.add_integer("--stages 2", "number of stages, one per device; under store one per process (default: 2)")
    group.add_integer(
        "--micro-batch-size 4",
        "examples that a stage works on at a time (default: a quarter of the batch under pipeline)",
    )
    group.add("--store", type=directory_path, metavar="URL", help="for --protocol store: a folder, or s3://bucket/path")


def _run(args: argparse.Namespace) -> int:
    """Start the processes, or train in this one if a launcher started it."""
    if args.replay:
        _check_replay(args)
        from jaxche.cli._replay import recorded_arguments

        args = recorded_arguments(args)
    name = args.name or f"{args.task}-{'+'.join(policies(args))}-{time.strftime('%Y%m%d-%H%M%S')}"
    check_stages(args, non_default_options(_add_arguments, args))
    if args.protocol is not None:
        return run_stages(args, _gpus()[1])
    require(args.task)
    if args.ratios and args.pace not in (None, "auto"):
        raise ValueError("--ratios are for --pace auto; leave one of them out, e.g. jaxche train --ratios 1,2.5")

    launcher = jaxche.cluster.detect(os.environ).launcher
    if launcher != "none":
        return _work_under(launcher, args, name)
    processes, env = _processes(args)
    if not args.dry_run and not args.replay:
        refuse_directory(Path(args.out) / name, args.out, saves(args))
    trainers(args, processes)  # refuses options that exclude each other
    return _start(args, name, processes, env)


def _work_under(launcher: str, args: argparse.Namespace, name: str) -> int:
    """Train as one of the processes that a launcher started."""
    if saves(args) and not args.name:  # each process, and each start of a job, would generate another one
        option = flag("checkpoint_every" if args.checkpoint_every else "max_restarts")
        raise ValueError(f"{option} needs a name that all {launcher} processes have, in every start; write --name mine")
    if args.hang_timeout and HEARTBEAT not in os.environ:  # else the launcher watches that file
        os.environ[HANG_TIMEOUT] = f"{args.hang_timeout:g}"
    from jaxche.cli._worker import work

    return work(args, name)


def _check_replay(args: argparse.Namespace) -> None:
    others = [flag(name) for name in non_default_options(_add_arguments, args) if name not in ("replay", "name", "out")]
    if others:
        raise ValueError(f"--replay runs with what was recorded; leave {', '.join(others)} out")


def _start(args: argparse.Namespace, name: str, processes: int, env: Mapping[str, str]) -> int:
    # One process needs a launcher only for restarts and heartbeats.
    if processes == 1 and not (args.max_restarts or args.hang_timeout):
        from jaxche.cli._worker import work

        return work(args, name)

    # Defaults that the processes must not choose by themselves.
    words = list(args.words)
    words += [] if args.name else ["--name", name]
    words += [] if args.processes else ["-n", str(processes)]
    command = [sys.executable, "-m", "jaxche", *words]
    return jaxche.cluster.launch(
        command,
        processes,
        env=env,
        prefix=False,
        only_rank0=True,
        # A single replica uses all cores.
        pin=processes > 1,
        max_restarts=args.max_restarts,
        hang_timeout_s=args.hang_timeout,
    )


def _processes(args: argparse.Namespace) -> tuple[int, dict[str, str]]:
    """The number of processes, and the variables to set for them."""
    gpus, env = _gpus()
    given = {"-n": args.processes, "--ratios": args.ratios and len(args.ratios)}
    if isinstance(args.pace, tuple):
        given["--pace"] = len(args.pace)
    counts = {option: count for option, count in given.items() if count}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{option} has {count}" for option, count in counts.items() if option != "-n")
        asked = f" for -n {args.processes}" if args.processes else ""
        raise ValueError(f"{listed}{asked}; give one value a process, e.g. -n 2 --ratios 1,2.5")
    return next(iter(counts.values()), gpus or _DEFAULT_PROCESSES), env


def _gpus() -> tuple[int, dict[str, str]]:
    """The number of GPUs that JAX can use, and the variables to set for the processes."""
    gpus = len(jaxche.cluster.default_gpus(os.environ))
    if gpus and not jaxche.cluster.has_cuda():
        sys.stderr.write(
            f"jaxche train: this machine has {gpus} GPU(s), but JAX is installed without CUDA, so CPU cores are "
            f"used. For the GPUs write: {install_line()}\n"
        )
        return 0, {"JAX_PLATFORMS": "cpu"}
    return gpus, {}


def _compared(text: str) -> tuple[str, ...]:
    names: Sequence[str] = text.split(",")
    if len(set(names)) != len(names) or len(names) < 2 or set(names) - set(POLICIES):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not two or more different policies of {', '.join(POLICIES)}; write --compare sync,cadence"
        )
    return tuple(names)


COMMAND = Command(
    "train",
    "train a small model on real data, on replicas of different speeds",
    _EPILOG,
    _add_arguments,
    _run,
    about=_ABOUT,
)
