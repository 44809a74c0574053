"""`jaxche launch`: one process a replica on this machine, or a file that starts them on a cluster."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys

from jaxche.cli._arguments import file, flag, given, number, numbers, whole
from jaxche.cli._command import Command
from jaxche.cluster import count_gpus, emit, launch

_EXAMPLES = """\
examples:
  jaxche launch -n 2 train.py --epochs 3             one process a GPU, or a CPU core each
  jaxche launch -n 2 --pace 20,50 train.py           act as two devices of 20 and 50 ms a step
  JAX_PLATFORMS=cpu jaxche launch -n 4 train.py      CPU cores, on a machine with GPUs too
  jaxche launch --on-cpu 1 train.py                  one process a GPU, and one on the CPU
  jaxche launch -n 2 -m my_package.train --epochs 3  a module
  jaxche launch -n 2 -- python -O train.py           any command
  jaxche launch -n 4 --max-restarts 3 --hang-timeout 600 --events run.jsonl train.py
  jaxche launch -n 4 --elastic --max-restarts 3 train.py   survivors go on, a replacement joins
  jaxche launch --emit slurm --nodes 2x8 train.py >train.sbatch
  jaxche launch --emit slurm --nodes 2x8:h100,4x1:l4 train.py >train.sbatch    two kinds in one job
  jaxche launch --emit jobset --nodes 2x8 --image me/train:1 --volume c:/ckpt train.py >train.yaml
  jaxche launch --emit mpirun --nodes 2x8 train.py >train.sh; HOSTS=node1,node2 bash train.sh

The script calls jaxche.initialize() before its first array. One process that fails ends them all.
With --max-restarts all are then started again, on a new port and with JAXCHE_RESTART=1, 2, ...; the
script goes on from its checkpoint. With --survivors a rank that is the first to fail twice in a row
is left out of the next start, down to one process.
With --elastic the others go on where a rank other than 0 dies, and start nothing again; with
--max-restarts that rank alone is then started again, with the same number, and joins them at the
end of a round. Each replacement uses up one of the N, as does a start of all, which the death of
rank 0 needs.

A file for a cluster starts all again after a failure, three times if --max-restarts is left out.
Under Slurm a job whose time is up goes back into the queue, too; that is no failure.
There JAX detects a process that is stopped or cut off, after 100 s of silence. One that hangs
in its program ends itself with code 1, saying where its threads are, when a round lasts for the
--hang-timeout (JAXCHE_HANG_TIMEOUT, for any launcher); without it after two hours.

exit codes:
  0     all processes ended well
  2     the arguments make no sense, or a process refused its input with 2; never tried again
  124   no process touched its JAXCHE_HEARTBEAT file for the --hang-timeout
  130   Ctrl-C
  143   SIGTERM, which the processes were passed, with --term-grace seconds to write a checkpoint
  128+n a process was ended by signal n (137: SIGKILL, often for want of memory)
  else  that of the first process that failed
"""

# Options that a file for a cluster can hold.
_IN_A_FILE = ("emit", "nodes", "image", "volume", "max_restarts", "hang_timeout", "module", "command")


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", "--processes", type=whole("-n 2"), help="how many to start (default: one a GPU)")
    parser.add_argument(
        "--on-cpu",
        type=whole("--on-cpu 1", 0),
        default=0,
        metavar="N",
        help="of these, how many train on the CPU beside those on GPUs (default: 0)",
    )
    parser.add_argument(
        "--pace",
        type=numbers("--pace 20,50"),
        metavar="MS,MS,...",
        help="pad each local step to this wall time, one a process",
    )
    parser.add_argument("--only-rank0", action="store_true", help="show standard output of rank 0 only")
    parser.add_argument("--no-pin", action="store_true", help="let processes without a GPU run on any core")
    parser.add_argument("--no-prefix", action="store_true", help="do not start each line with its rank")
    parser.add_argument(
        "--grace",
        type=number("--grace 5"),
        default=5.0,
        metavar="S",
        help="seconds between SIGTERM and SIGKILL (default: %(default)g)",
    )
    group = parser.add_argument_group("when something fails")
    group.add_argument(
        "--max-restarts",
        type=whole("--max-restarts 3", 0),
        metavar="N",
        help="start all again, or with --elastic the rank that died (default: 0; with --emit 3)",
    )
    group.add_argument("--survivors", action="store_true", help="leave out a rank that fails first twice in a row")
    group.add_argument(
        "--hang-timeout",
        type=number("--hang-timeout 600", above=True),
        metavar="S",
        help="seconds without a heartbeat of any process that are a failure (default: none); with --elastic also of "
        "one process while others give theirs (default: 120), and with --emit of one round",
    )
    group.add_argument(
        "--term-grace",
        type=number("--term-grace 25"),
        default=25.0,
        metavar="S",
        help="seconds for a checkpoint after SIGTERM to the launcher (default: %(default)g)",
    )
    group.add_argument("--elastic", action="store_true", help="the others go on without a rank that dies")
    group.add_argument(
        "--events", type=file, metavar="FILE", help="append a line of JSON for each start, exit, restart and round"
    )
    group = parser.add_argument_group("on a cluster")
    group.add_argument(
        "--emit", choices=("slurm", "jobset", "mpirun"), help="print a file that starts the script there, and end"
    )
    group.add_argument(
        "--nodes",
        metavar="COUNTxGPUS:KIND,...",
        help="the machines, e.g. 4 (no GPUs), 2x8, or 2x8:h100,4x1:l4; KIND as the scheduler calls it: under Slurm "
        "the type in --gres, in a jobset the node label nvidia.com/gpu.product, e.g. NVIDIA-H100-80GB-HBM3",
    )
    group.add_argument("--image", help="container image of the pods of a jobset")
    group.add_argument(
        "--volume",
        metavar="CLAIM:/PATH",
        help="PersistentVolumeClaim to mount in the pods of a jobset, for checkpoints",
    )
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, help="run a module, with the arguments that follow"
    )
    parser.add_argument(
        "command", type=file, nargs=argparse.REMAINDER, help="a script (*.py) or a program, with its arguments"
    )


def _run(args: argparse.Namespace) -> int:
    if args.emit:
        sys.stdout.write(_emitted(args))
        return 0
    if args.nodes or args.image or args.volume:
        raise ValueError(
            "--nodes, --image and --volume are for a cluster. Write: jaxche launch --emit slurm --nodes 2x8 ..."
        )
    args.max_restarts = args.max_restarts or 0
    command = _command(args.module, args.command, sys.executable)
    if command[0] == sys.executable and args.module is None and not os.path.isfile(command[1]):
        raise ValueError(f"no script {command[1]!r} in {os.getcwd()}")
    if shutil.which(command[0]) is None:
        raise ValueError(f"no program {command[0]!r} to run; for a script write: jaxche launch -n 2 train.py")
    processes = _one_a_gpu() + args.on_cpu if args.processes is None else args.processes
    _check(args, processes)
    return launch(
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
        elastic=args.elastic,
    )


def _check(args: argparse.Namespace, processes: int) -> None:
    """What ``launch`` would refuse in the words of Python, in those of a shell."""
    if args.pace and len(args.pace) != processes:
        raise ValueError(
            f"--pace has {len(args.pace)} value(s) for {processes} process(es); write one a process, e.g. "
            "-n 2 --pace 20,50"
        )
    if args.survivors and args.max_restarts < 2:
        raise ValueError(
            "--survivors leaves out a rank that failed first twice in a row, so it needs two restarts or more; "
            "write --max-restarts 3 --survivors"
        )


def _one_a_gpu() -> int:
    gpus = count_gpus()
    if not gpus:
        raise ValueError("there are no GPUs here to count. Write: jaxche launch -n 2 train.py")
    return gpus


def _emitted(args: argparse.Namespace) -> str:
    here = [flag(name) for name in given(_arguments, args) if name not in _IN_A_FILE]
    if args.nodes is None or here:
        more = f", and nothing of what is for processes on this machine: leave out {', '.join(here)}" if here else ""
        raise ValueError(
            f"--emit {args.emit} takes the machines in --nodes{more}. "
            f"Write: jaxche launch --emit {args.emit} --nodes 2x8 train.py"
        )
    # Of the environment in which the file is used, not of this one.
    command = _command(args.module, args.command, "python")
    if args.module is not None:
        name = args.module[0].rpartition(".")[2]
    else:
        name = os.path.splitext(os.path.basename(next((w for w in command if w.endswith(".py")), command[0])))[0]
    return emit(
        args.emit,
        command,
        args.nodes,
        **({} if args.max_restarts is None else {"max_restarts": args.max_restarts}),
        name=name,
        made_by=f"Made by: {shlex.join(['jaxche', *args.words])}",
        image=args.image,
        volume=args.volume,
        hang_timeout_s=args.hang_timeout,
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
    "run a training script once a replica on this machine",
    _EXAMPLES,
    _arguments,
    _run,
    usage="%(prog)s [options] train.py [its arguments]",
)
