"""`jaxche train`: see it work on real data, with one command."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from jaxche.averaging import MERGE_RULES
from jaxche.cadence import ApplyPolicy
from jaxche.cli._arguments import flag, folder, given, number, numbers, whole
from jaxche.cli._command import Command
from jaxche.cli._joined import joined, launcher
from jaxche.cli._pace import pace_argument
from jaxche.cli._replay import recorded
from jaxche.cli._settings import SCALING, cadence, policies, trainer_options
from jaxche.cli._stages import check_stages, run_stages
from jaxche.cli._tasks import TASKS, require
from jaxche.distributed import HANG_TIMEOUT, HEARTBEAT

_POLICIES = tuple(policy.value for policy in ApplyPolicy)
_PROCESSES = 2

_EXAMPLES = f"""\
tasks:
{chr(10).join(f"  {name:8s} {text}" for name, (text, _) in TASKS.items())}

examples:
  jaxche train                                     two processes, one 2.5 times slower
  jaxche train --compare sync,cadence,async        three policies in turn, side by side
  jaxche train -n 4 --ratios 1,1,2,4 --task text   four replicas of these speeds
  jaxche train --pace 20,50                        exactly 20 and 50 ms a step
  jaxche train -n 1                                a plain training loop
  jaxche train --scaling adamscale                 learning rates by gradient noise, and advice
  jaxche train --task text --protocol pipeline     one model in two stages, on two devices
  jaxche train --task text --protocol store --store /tmp/run   in two processes with one folder
  jaxche train --name long --max-restarts 3        saved every round, started again if it dies
  jaxche train --replay runs/long                  the same run again, bit for bit
  srun -n 8 jaxche train                           as one of the processes of Slurm or mpirun
  srun -n 8 jaxche train --name long --checkpoint-every 10     goes on where a job was requeued

Without GPUs each process has a CPU core and is paced: its steps are padded to a wall time, so that
equal cores act as devices of different speeds. With GPUs each process has one, at its own speed.

exit codes:
  0     trained, or --dry-run went well
  1     training failed, e.g. the loss became NaN
  2     the arguments make no sense, or a package or a pace they need is missing, or --out cannot be
        written; says what to write
  124   no process came to the end of a round for the --hang-timeout (1 under Slurm or mpirun)
  130   Ctrl-C
  143   SIGTERM; with --checkpoint-every or --max-restarts it saves, and the same command goes on
  128+n a process was ended by signal n (137: SIGKILL, often for want of memory)

Under Slurm or mpirun the launcher starts again what failed; see jaxche launch --help.
"""


def _arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--task", choices=tuple(TASKS), default="mnist", help="what to train (default: %(default)s)")
    add("-n", "--processes", type=whole("-n 2"), help="one a replica (default: one a GPU, 2 without GPUs)")
    add("--pace", type=pace_argument, metavar="auto|none|MS,MS", help="default: auto on CPU cores, none on GPUs")
    add("--ratios", type=numbers("--ratios 1,2.5"), metavar="R,R", help="step times under --pace auto (default: 1,2.5)")

    group = parser.add_argument_group("how replicas meet")
    add = group.add_argument
    add("--policy", choices=_POLICIES, help="when they meet (default: cadence)")
    add("--compare", type=_compared, metavar="P,P,P", help="run these policies in turn from the same start")
    add("--average", choices=("parameters", "gradients"), help="default: gradients under sync, else parameters")
    add("--merge", choices=tuple(MERGE_RULES), help="weights of the replicas in a merge (default: steps)")
    add("--opt-state", choices=("local", "average", "reset"), help="optimizer states at a merge (default: local)")
    add("--anchor", type=whole("--anchor 4", 1, 200), help="first batches of the slowest in a round (default: 2)")
    add("--overhead-target", type=number("--overhead-target 0.02", 0.01, 0.5), help="of sync (default: 0.015)")
    add("--tuner", choices=("seed", "steady"), help="what tunes the anchor (default: steady)")
    add("--max-batch-diff", type=whole("--max-batch-diff 8", 0), help="largest lead of the fastest (default: no limit)")

    group = parser.add_argument_group("a model in stages, instead of replicas")
    add = group.add_argument
    add("--protocol", choices=("direct", "pipeline", "store"), help="how stages communicate; with --task text")
    add("--stages", type=whole("--stages 2", 1), help="one a device, under store one a process (default: 2)")
    add("--micro-batch-size", type=whole("--micro-batch-size 4"), help="default: a quarter of the batch in a pipeline")
    add("--store", type=folder, metavar="URL", help="where stages meet under store: a folder, or s3://bucket/path")

    group = parser.add_argument_group("what is trained")
    add = group.add_argument
    add("--batch-size", type=whole("--batch-size 32"), help="default: the task's own")
    add("--scaling", choices=tuple(SCALING), help="the learning rate follows the batch (default: it stays as it is)")
    add("--learning-rate", type=number("--learning-rate 1e-3", above=True), help="default: the task's own")
    add("--epochs", type=whole("--epochs 3"), help="default: the task's own")
    add("--seed", type=whole("--seed 0", 0), default=0, help="of parameters, order and dropout (default: 0)")
    add("--dry-run", action="store_true", help="one batch on every replica and one merge; writes nothing")

    group = parser.add_argument_group("files")
    add = group.add_argument
    add("--name", help="of the run (default: task-policy-date-time); needed to save one that srun or mpirun starts")
    add("--out", type=folder, default="runs", help="folder of the runs (default: %(default)s)")
    add(
        "--checkpoint-every",
        type=whole("--checkpoint-every 10"),
        metavar="ROUNDS",
        help="save the run so often; the same command with the same --name goes on from there (default: never)",
    )
    add(
        "--max-restarts",
        type=whole("--max-restarts 3", 0),
        default=0,
        help="start again after a failure, from the last checkpoint (default: 0)",
    )
    add(
        "--hang-timeout",
        type=number("--hang-timeout 600", above=True),
        metavar="S",
        help="seconds without a round of any process, from their start on, that are a failure (default: none)",
    )
    add("--replay", type=folder, metavar="RUN", help="make a run again from its record, e.g. runs/first, and compare")


def _run(args: argparse.Namespace) -> int:
    """Starts the processes, or is one of them where a launcher has started it."""
    if args.replay:
        _check_replay(args)
        args = recorded(args)
    name = args.name or f"{args.task}-{'+'.join(policies(args))}-{time.strftime('%Y%m%d-%H%M%S')}"
    check_stages(args, given(_arguments, args))
    if args.protocol is not None:
        return run_stages(args, _gpus()[1])
    require(args.task)
    if launcher() != "none":
        _check_name(args)
        _watch(args)
        joined()
        from jaxche.cli._worker import work

        return work(args, name)
    processes, platform = _processes(args)
    _check(args, processes, Path(args.out) / name)
    return _start(args, name, processes, platform)


def _check_name(args: argparse.Namespace) -> None:
    """Each process of a launcher, and each start of a job, would make up another name from its own clock."""
    saves = [flag(name) for name in ("checkpoint_every", "max_restarts") if getattr(args, name)]
    if saves and not args.name:
        raise ValueError(
            f"{saves[0]} needs a name that all {launcher()} processes have, in every start; write --name mine"
        )


def _watch(args: argparse.Namespace) -> None:
    """Whoever starts the processes hears of their silence, or they watch over themselves.

    ``HEARTBEAT`` is of a launcher that listens.
    """
    if args.hang_timeout and HEARTBEAT not in os.environ:
        os.environ[HANG_TIMEOUT] = f"{args.hang_timeout:g}"


def _check_replay(args: argparse.Namespace) -> None:
    others = [flag(name) for name in given(_arguments, args) if name not in ("replay", "name", "out")]
    if others:
        raise ValueError(f"--replay runs with what was recorded; leave {', '.join(others)} out")


def _start(args: argparse.Namespace, name: str, processes: int, platform: str | None) -> int:
    # Alone it needs nobody, except to be watched.
    if processes == 1 and not (args.max_restarts or args.hang_timeout):
        from jaxche.cli._worker import work

        return work(args, name)
    from jaxche.cluster import launch

    # What was left out is the same in all processes, and in the record.
    words = list(args.words)
    words += [] if args.name else ["--name", name]
    words += [] if args.processes else ["-n", str(processes)]
    command = [sys.executable, "-m", "jaxche", *words]
    env = {"JAX_PLATFORMS": platform} if platform else None
    return launch(
        command,
        processes,
        env=env,
        prefix=False,
        only_rank0=True,
        # Replicas that share a machine keep off each other's cores; one has them all.
        pin=processes > 1,
        max_restarts=args.max_restarts,
        hang_timeout_s=args.hang_timeout,
    )


def _processes(args: argparse.Namespace) -> tuple[int, str | None]:
    """How many processes, and the platform to hold them to, if they must be."""
    gpus, platform = _gpus()
    given = {"-n": args.processes, "--ratios": args.ratios and len(args.ratios)}
    if isinstance(args.pace, tuple):
        given["--pace"] = len(args.pace)
    counts = {flag: count for flag, count in given.items() if count}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{flag} has {count}" for flag, count in counts.items() if flag != "-n")
        raise ValueError(
            f"{listed}"
            + (f" for -n {args.processes}" if args.processes else "")
            + "; give one value a process, e.g. -n 2 --ratios 1,2.5"
        )
    return next(iter(counts.values()), gpus or _PROCESSES), platform


def _gpus() -> tuple[int, str | None]:
    from jaxche.cluster import count_gpus, has_cuda

    wanted = os.environ.get("JAX_PLATFORMS", "").lower()
    if wanted and "cuda" not in wanted and "gpu" not in wanted:
        return 0, None
    gpus = count_gpus()
    if gpus and not has_cuda():
        sys.stderr.write(
            f"jaxche train: this machine has {gpus} GPU(s), but JAX is installed without CUDA, so CPU cores are "
            "used. For the GPUs write: pip install 'jaxche[cuda13]' (or cuda12)\n"
        )
        return 0, "cpu"
    return gpus, None


def _check(args: argparse.Namespace, processes: int, folder: Path) -> None:
    if args.compare and args.policy:
        raise ValueError("--policy and --compare exclude each other; write --compare sync,cadence or --policy async")
    if args.ratios and args.pace not in (None, "auto"):
        raise ValueError("--ratios are for --pace auto; leave one of them out, e.g. jaxche train --ratios 1,2.5")
    if not args.dry_run and not args.replay:
        from jaxche.cli._run import refuse_folder

        refuse_folder(args, folder)
    cadence(args, processes)
    for policy in policies(args):
        trainer_options(args, policy)


def _compared(text: str) -> tuple[str, ...]:
    names: Sequence[str] = text.split(",")
    if len(set(names)) != len(names) or len(names) < 2 or set(names) - set(_POLICIES):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not two or more different policies of {', '.join(_POLICIES)}; write --compare sync,cadence"
        )
    return tuple(names)


COMMAND = Command(
    "train",
    "train a small model on real data, on replicas of different speeds",
    _EXAMPLES,
    _arguments,
    _run,
    refusals=(ValueError, ImportError, TimeoutError, ConnectionError),
)
