"""`jaxche launch`: starts one process per replica on this machine, or prints a file that starts them on a cluster."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from pathlib import Path

import jaxche
from jaxche.cli._command import Command, write_text
from jaxche.cli._options import Options, command_word, file_path, flag, non_default_options
from jaxche.cli._settings import SCHEDULERS

_ABOUT = """\
Each process has a replica: a copy of the model on its own device. Its rank is its number, from 0.
The script calls jaxche.initialize() before its first array. If one process fails, all are stopped."""

_EPILOG = """\
examples:
  jaxche launch -n 2 train.py --epochs 3             one process per GPU, or per CPU core
  jaxche launch -n 2 --pace 20,50 train.py           act as two devices of 20 and 50 ms a step
  JAX_PLATFORMS=cpu jaxche launch -n 4 train.py      CPU cores, on a machine with GPUs too
  jaxche launch --on-cpu 1 train.py                  one process per GPU, and one on the CPU
  jaxche launch -n 2 -m my_package.train --epochs 3  a module
  jaxche launch -n 2 -- python -O train.py           any command
  jaxche launch -n 4 --max-restarts 3 --hang-timeout 600 --events run.jsonl train.py
  jaxche launch -n 4 --elastic --max-restarts 3 train.py   survivors continue, a replacement joins
  jaxche launch --emit slurm --nodes 2x8 -o train.sbatch train.py
  jaxche launch --emit slurm --nodes 2x8:h100,4x1:l4 -o train.sbatch train.py   two kinds in one job
  jaxche launch --emit slurm --elastic --nodes 2x8 -o train.sbatch train.py   survivors continue
  jaxche launch --emit jobset --nodes 2x8 --image me/train:1 --volume c:/ckpt -o job.yaml train.py
  jaxche launch --emit mpirun --nodes 2x8 -o train.sh train.py; HOSTS=node1,node2 bash train.sh

With --max-restarts all processes are restarted after a failure, on a new port and with
JAXCHE_RESTART=1, 2, ...; the script resumes from its checkpoint. With --survivors a rank that fails
first in two starts in a row is removed from the next start, as long as one process is left.
With --elastic the other ranks continue after the death of a rank. With --max-restarts the dead rank
alone is then restarted, with the same number, and joins the others at the end of a round. Each
replacement counts as a restart.

A file for a cluster restarts all ranks after a failure, three times by default. A Slurm job that
reaches its time limit is requeued, which does not count as a failure. With --elastic the scheduler
starts a dead rank again alone, --max-restarts times each, and all ranks if all have died.
On a cluster JAX detects a process that is stopped or disconnected after 100 s. A process that hangs
prints the stacks of its threads and exits with code 1 when a round exceeds --hang-timeout
(JAXCHE_HANG_TIMEOUT, for any launcher). Without this option XLA ends it after two hours.

exit codes:
  0     success of all processes
  2     invalid arguments, or a process exited with 2 for bad input; never restarted
  124   no process touched its JAXCHE_HEARTBEAT file within --hang-timeout
  130   Ctrl-C
  143   SIGTERM; the processes received it and had --term-grace seconds to write a checkpoint
  128+n signal n ended a process (137: SIGKILL, often out of memory)
  else  the code of the first process that failed
"""

# Options that also work with --emit.
_EMIT_OPTIONS = ("emit", "nodes", "image", "volume", "out", "max_restarts", "elastic", "hang_timeout")
_EMIT_OPTIONS += ("module", "command")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.allow_abbrev = False  # the options of the script are none of this command, however they begin
    options = Options(parser)
    options.add_processes("number of processes (default: one per GPU, and those of --on-cpu; required without GPUs)")
    options.add_integer(
        "--on-cpu 1", "how many of them train on the CPU instead of a GPU (default: 0)", least=0, default=0
    )
    options.add_numbers(
        "--pace 20,50",
        "MS,MS,...",
        "milliseconds of a training step of each process, e.g. 20,50; shorter steps wait, so that equal devices "
        "act as devices of different speeds (default: as fast as each can)",
    )
    options.add("--only-rank0", action="store_true", help="print standard output of rank 0 (the first process) only")
    options.add("--no-pin", action="store_true", help="do not pin processes without a GPU to a core")
    options.add("--no-prefix", action="store_true", help="do not start each line with its rank")
    options.add_number("--grace 5", "S", "seconds between SIGTERM and SIGKILL (default: %(default)g)", default=5.0)
    group = Options(parser, "failures")
    group.add_integer(
        "--max-restarts 3",
        "restarts of all ranks after failures (default: 0; with --emit 3); with --elastic restarts of single "
        "ranks: so many in all, or with --emit so many of each",
        least=0,
    )
    group.add(
        "--survivors",
        action="store_true",
        help="remove a rank that fails first twice in a row; needs --max-restarts 2 or more",
    )
    group.add_number(
        "--hang-timeout 600",
        "S",
        "end the run if no process finishes a round for so many seconds (default: no limit); with --elastic, end "
        "a process that finishes none while others do (default: 120); with --emit, the limit of each round",
        above=True,
    )
    group.add_number(
        "--term-grace 25",
        "S",
        "seconds for a checkpoint after SIGTERM to the launcher (default: %(default)g)",
        default=25.0,
    )
    group.add("--elastic", action="store_true", help="the other ranks continue after the death of a rank")
    group.add_number(
        "--heartbeat-timeout 5",
        "S",
        "with --elastic, the others continue after so many seconds without a heartbeat of a rank (default: 15)",
        above=True,
    )
    group.add(
        "--events", type=file_path, metavar="FILE", help="append a JSON line for each start, exit, restart and round"
    )
    group = Options(parser, "on a cluster")
    group.add("--emit", choices=SCHEDULERS, help="make a file that starts the script there, and exit")
    group.add_out("the file of --emit (default: the screen)")
    group.add(
        "--nodes",
        metavar="COUNTxGPUS:KIND,...",
        help="the machines, e.g. 4 (no GPUs), 2x8, or 2x8:h100,4x1:l4; KIND is the name in the scheduler: under "
        "Slurm the type in --gres, in a jobset the node label nvidia.com/gpu.product, e.g. NVIDIA-H100-80GB-HBM3",
    )
    group.add("--image", help="container image of the pods of a jobset")
    group.add(
        "--volume", metavar="CLAIM:/PATH", help="PersistentVolumeClaim for checkpoints, mounted in the pods of a jobset"
    )
    options.add("-m", dest="module", nargs=argparse.REMAINDER, help="run a module, with the arguments that follow")
    options.add(
        "command", type=command_word, nargs=argparse.REMAINDER, help="a script (*.py) or a program, with its arguments"
    )


def _run(args: argparse.Namespace) -> int:
    if args.emit:
        text = _scheduler_file(args)
        if args.out is None:
            sys.stdout.write(text)
        else:
            write_text(args.out, text)
        return 0
    if args.nodes or args.image or args.volume or args.out:
        raise ValueError(
            "--nodes, --image, --volume and --out are for a cluster. Write: jaxche launch --emit slurm --nodes 2x8 ..."
        )
    args.max_restarts = args.max_restarts or 0
    command = _command(args.module, args.command, sys.executable)
    if command[0] == sys.executable and command[1].endswith(".py") and not os.path.isfile(command[1]):
        raise ValueError(f"no script {command[1]!r} in {os.getcwd()}")
    if shutil.which(command[0]) is None:
        raise ValueError(f"no program {command[0]!r} to run; for a script write: jaxche launch -n 2 train.py")
    processes = _gpus() + args.on_cpu if args.processes is None else args.processes
    _check(args, processes)
    return jaxche.cluster.launch(
        command,
        processes=processes,
        pace_ms=args.pace,
        prefix=not args.no_prefix,
        only_rank0=args.only_rank0,
        grace_s=args.grace,
        pin=not args.no_pin,
        on_cpu=args.on_cpu,
        max_restarts=args.max_restarts,
        survivors=args.survivors,
        hang_timeout_s=args.hang_timeout,
        term_grace_s=args.term_grace,
        events=args.events,
        heartbeat_timeout_s=args.heartbeat_timeout,
        elastic=args.elastic,
    )


def _check(args: argparse.Namespace, processes: int) -> None:
    """Refuse what ``launch`` refuses, with a message about flags."""
    from jaxche.distributed import LEAST_TIMEOUT_S

    if args.pace and len(args.pace) != processes:
        raise ValueError(
            f"--pace has {len(args.pace)} value(s) for {processes} process(es); write one a process, e.g. "
            "-n 2 --pace 20,50"
        )
    if args.on_cpu >= processes:
        raise ValueError(
            f"--on-cpu {args.on_cpu} leaves none of {processes} process(es) for an accelerator; write e.g. -n 2 "
            "--on-cpu 1"
        )
    if args.survivors and args.max_restarts < 2:
        raise ValueError(
            "--survivors leaves out a rank that failed first twice in a row, so it needs two restarts or more; "
            "write --max-restarts 3 --survivors"
        )
    if args.heartbeat_timeout is not None and not (args.elastic and args.heartbeat_timeout >= LEAST_TIMEOUT_S):
        raise ValueError(
            f"--heartbeat-timeout {args.heartbeat_timeout:g} is for elastic runs, and at least {LEAST_TIMEOUT_S:g} "
            "seconds; write --elastic --heartbeat-timeout 5"
        )
    if args.events and os.path.isdir(args.events):
        file = os.path.join(args.events, "events.jsonl")
        raise ValueError(f"--events {args.events} is a folder; write e.g. --events {file}")
    if args.events and not os.path.isdir(folder := os.path.dirname(os.path.abspath(args.events))):
        raise ValueError(f"--events {args.events}: there is no folder {folder}; write: mkdir -p {folder}")


def _gpus() -> int:
    if not (gpus := jaxche.cluster.default_gpus(os.environ)):
        raise ValueError(
            "there are no GPUs here to count, or JAX_PLATFORMS excludes them. Write: jaxche launch -n 2 train.py"
        )
    return len(gpus)


def _scheduler_file(args: argparse.Namespace) -> str:
    local = [flag(name) for name in non_default_options(_add_arguments, args) if name not in _EMIT_OPTIONS]
    if args.nodes is None or local:
        more = f", and no options for processes on this machine: leave out {', '.join(local)}" if local else ""
        raise ValueError(
            f"--emit {args.emit} takes the machines in --nodes{more}. "
            f"Write: jaxche launch --emit {args.emit} --nodes 2x8 train.py"
        )
    # The Python of the cluster, not this one.
    command = _command(args.module, args.command, "python")
    script = next((word for word in command if word.endswith(".py")), command[0])
    name = Path(script).stem if args.module is None else args.module[0].rpartition(".")[2]
    return jaxche.cluster.emit(
        args.emit,
        command,
        args.nodes,
        **({} if args.max_restarts is None else {"max_restarts": args.max_restarts}),
        name=name,
        made_by=f"Made by: {shlex.join(['jaxche', *args.words])}",
        image=args.image,
        volume=args.volume,
        hang_timeout_s=args.hang_timeout,
        elastic=args.elastic,
    )


def _command(module: list[str] | None, words: list[str], python: str) -> list[str]:
    if module is not None:
        if not module:
            raise ValueError("-m has no module. Write: jaxche launch -n 2 -m my_package.train")
        return [python, "-m", *module, *words]
    if words[:1] == ["--"]:
        words = words[1:]
    if not words:
        raise ValueError("there is nothing to run. Write: jaxche launch -n 2 train.py")
    return [python, *words] if words[0].endswith(".py") else words


COMMAND = Command(
    "launch",
    "run a training script in one process per replica on this machine",
    _EPILOG,
    _add_arguments,
    _run,
    usage="%(prog)s [options] train.py [its arguments]",
    about=_ABOUT,
)
