"""Files that start a run on a cluster with Slurm, JobSet or mpirun: one process per GPU."""

from __future__ import annotations

import re
import shlex
import string
import textwrap
from collections.abc import Mapping, Sequence

from jaxche.cluster._job import PORT, Job, Nodes, check_failures, parse_nodes, total_tasks
from jaxche.cluster._jobset import jobset
from jaxche.cluster._tunables import SET_TUNABLES, TUNABLES
from jaxche.distributed import COORDINATOR, ELASTIC, HANG_TIMEOUT, LIVENESS, NUM_PROCESSES, PROCESS_ID, RESTART

SCHEDULERS = ("slurm", "jobset", "mpirun")
# Seconds for a checkpoint after SIGTERM.
_TERM_S = 120
# Seconds between the signals of Open MPI to the other processes after a failure. Each restart waits for twice this.
_KILL_S = 5

# A Kubernetes name and an absolute path.
_VOLUME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?:/[^:\s]+")


class _Template(string.Template):
    """A part of a shell script, with placeholders ``%%name``, because "$" is the shell's."""

    delimiter = "%%"


_SLURM = _Template("""\
#!/bin/bash
# %%made_by
# Submit with sbatch; options on its command line win over those in this file.
#SBATCH --job-name=%%name
#SBATCH --output=%x-%j.log --open-mode=append
#SBATCH --time=24:00:00
# Back into the queue after pre-emption or the loss of a node;
# SIGTERM to all ranks 120 s before the time is up.
#SBATCH --requeue --signal=TERM@120
%%requests

# With these tunables processes keep their memory, which saves page faults in steps and merges on CPUs;
# what is set in GLIBC_TUNABLES already takes precedence.
export %%variables
# The training script resumes from its checkpoint.
export JAXCHE_RESTART="${SLURM_RESTART_COUNT:-0}"
%%steps

# 143: SIGTERM, after a checkpoint. 2: bad input, never restarted. Other codes are failures.
# Failures are counted here, because SLURM_RESTART_COUNT counts every requeue.
failures=".jaxche-$SLURM_JOB_ID.failures" again=
case "$code" in
  0 | 2) ;;
  143) again=yes ;;
  *) echo "$code" >>"$failures" && [ "$(wc -l <"$failures")" -le %%max_restarts ] && again=yes ;;
esac
if [ -n "$again" ]; then
  echo "exit code $code after restart $JAXCHE_RESTART: back into the queue"
  scontrol requeue "$SLURM_JOB_ID"
else
  rm -f "$failures"
fi
exit "$code"
""")

_SLURM_ADDRESS = _Template("""\
# The port is on the first machine.
first=$(scontrol show hostnames "$%%nodes" | head -n 1)
export JAXCHE_COORDINATOR="$first:${PORT:-$((61440 + SLURM_JOB_ID %%port))}" JAXCHE_NUM_PROCESSES=%%processes
""")

# A step for each process, because Slurm cannot start a task of a step again.
_SLURM_GROUP = _Template("""\
for ((number = %%first; number < %%end; number++)); do
  member "$number" %%options &
  started="$started $!"
done
""")

_SLURM_STEPS = _Template("""\
%%{address}%%{coordinator}%%{member}\
started=
%%{groups}%%{ended}\
# It ignores SIGTERM, on which ranks save.
kill -KILL "$coordinator" 2>/dev/null""")

_MPIRUN = _Template("""\
#!/bin/bash
# %%made_by
# Write: HOSTS=node1,node2,... bash %%name.sh
# Machines: %%kinds. The first opens the port. For Open MPI 4 and 5.
# To stop it send SIGTERM to this script: all processes write a checkpoint, and it ends with code 143.
# A signal to mpirun itself looks like a failure and restarts the run.
set -u
slots=(%%slots)
IFS=, read -r -a hosts <<<"${HOSTS-}"
if [ "${#hosts[@]}" -ne "${#slots[@]}" ]; then
  echo "HOSTS has ${#hosts[@]} name(s), ${#slots[@]} are needed. Write: HOSTS=node1,node2,... bash $0" >&2
  exit 2
fi
where=
for i in "${!hosts[@]}"; do where="$where,${hosts[i]}:${slots[i]}"; done

export JAXCHE_COORDINATOR="${hosts[0]}:${PORT:-%%port}" JAXCHE_NUM_PROCESSES=%%processes
# With these tunables processes keep their memory, which saves page faults in steps and merges on CPUs;
# what is set in GLIBC_TUNABLES already takes precedence.
export %%variables
# Seconds before SIGTERM and SIGKILL to the others after a failure, in Open MPI 4 and 5.
export OMPI_MCA_odls_base_sigkill_timeout=%%kill_s PRTE_MCA_odls_base_sigkill_timeout=%%kill_s

# A wrapper of each process: lines start with the rank, and SIGUSR1 from mpirun becomes SIGTERM. Exit by
# this SIGTERM has code 0, because mpirun kills the other processes after any other code.
rank='trap "" USR1
label() { trap "" TERM; exec sed -u "s/^/[${JAXCHE_PROCESS_ID-${OMPI_COMM_WORLD_RANK:-${PMIX_RANK-}}}] /"; }
"$@" > >(label) 2> >(label >&2) &
process=$!
trap "stopped=1; kill -TERM $process" USR1
trap "kill -TERM $process" TERM
while wait "$process"; code=$?; kill -0 "$process"; do :; done 2>/dev/null
[ "${stopped-}$code" = 1143 ] || exit "$code"'

stopped= started= late=
%%{member}\
stop() {
  stopped=$1
  [ -n "$started" ] && kill -USR1 $started 2>/dev/null || return
  [ -z "$late" ] || return
  { sleep %%term_s; kill -TERM $started; } >/dev/null 2>&1 &
  late=$!
}
trap 'stop 129' HUP
trap 'stop 130' INT
trap 'stop 143' TERM
# Background jobs get their own process groups, so that signals reach mpirun only through this script.
set -m
code=0
for ((JAXCHE_RESTART = 0; JAXCHE_RESTART <= %%max_restarts; JAXCHE_RESTART++)); do
  export JAXCHE_RESTART
%%{run}\
  # 2: bad input, never restarted. 143 and 130: stopped by a signal.
  [ -z "$stopped" ] || { code=$stopped; break; }
  case "$code" in 0 | 2 | 130 | 143) break ;; esac
done
[ -z "$late" ] || { kill -KILL -- "-$late"; wait "$late"; } 2>/dev/null
exit "$code"
""")

# One mpirun of all processes.
_MPIRUN_ALL = _Template("""\
%%mpirun &
started=$!
[ -z "$stopped" ] || stop "$stopped"
while wait "$started"; code=$?; kill -0 "$started" 2>/dev/null; do :; done
""")

# One mpirun for each process, because mpirun cannot start a process again.
_MPIRUN_EACH = _Template("""\
%%{coordinator}\
number=0 started=
for i in "${!hosts[@]}"; do
  for ((gpu = 0; gpu < slots[i]; gpu++)); do
    JAX_LOCAL_DEVICE_IDS=$gpu member "$number" "${hosts[i]}" &
    number=$((number + 1)) started="$started $!"
  done
done
[ -z "$stopped" ] || stop "$stopped"
%%{ended}\
kill "$coordinator" 2>/dev/null
wait $started "$coordinator" 2>/dev/null
""")

_COORDINATOR = _Template("""\
# The coordinator of the run, so that every rank may die. It ends some seconds after the last one.
token=$(od -An -N16 -tx1 /dev/urandom | tr -d '[:space:]')
host=${JAXCHE_COORDINATOR%:*} port=${JAXCHE_COORDINATOR##*:}
export JAXCHE_LIVENESS="[\\"$host\\", $((port + 1)), null, \\"$token\\"]"
%%command </dev/null &
coordinator=$!
""")

# Starts a process, and again after each death; on SIGUSR1, which only mpirun gets, no more.
_MEMBER = _Template("""\
start() { exec %%start; }
# A rank that died is started again, with the same environment, and joins as a replacement. Not after these
# exit codes: 2, bad input; 130 and 143, signals.
member() {
  local number=$1 again code job=
  trap 'stopped=1; kill -USR1 $job 2>/dev/null' USR1
  trap 'kill $job 2>/dev/null' TERM
  for ((again = 0; again <= %%max_restarts; again++)); do
    JAXCHE_PROCESS_ID=$number start "${@:2}" &
    job=$!
    [ -z "${stopped-}" ] || kill -USR1 "$job" 2>/dev/null
    while wait "$job"; code=$?; kill -0 "$job" 2>/dev/null; do :; done
    [ -z "${stopped-}" ] || exit 143
    case "$code" in 0 | 2 | 130 | 143) break ;; esac
    echo "rank $number has ended with exit code $code"
    kill -0 "$coordinator" 2>/dev/null || break
  done
  exit "$code"
}
""")

# Waits until the run is over, and sets `code`.
_ENDED = """\
# A rank that still waits for its start, or starts too late to join, has no run to join.
while kill -0 $started 2>/dev/null && kill -0 "$coordinator" 2>/dev/null; do sleep 0.5; done
codes=
for job in $started; do kill -0 "$job" 2>/dev/null || { wait "$job"; codes="$codes $?"; }; done
kill $started 2>/dev/null
# Success if one rank came to the end: the others died too often.
for code in 0 143 2 $codes 1; do [[ "$codes 1 " = *" $code "* ]] && break; done
"""


def emit(
    scheduler: str,
    command: Sequence[str],
    nodes: str,
    max_restarts: int = 3,
    name: str = "jaxche",
    made_by: str = "Made by jaxche.",
    image: str | None = None,
    volume: str | None = None,
    hang_timeout_s: float | None = None,
    elastic: bool = False,
) -> str:
    """Write a file that starts a command on a cluster, one process per GPU.

    Args:
      scheduler: "slurm", "jobset" or "mpirun".
      command: the program and its arguments.
      nodes: the machines as ``COUNTxGPUS:KIND,...``, e.g. ``"2x8:h100,4x1:l4"``.
      max_restarts: restarts after a failure. SIGTERM, and exit code 2 of bad input under Slurm and mpirun, are none.
      name: of the job; other characters than letters and digits become hyphens, and "run-" precedes a digit.
      made_by: a comment in the file; unprintable characters become spaces.
      image: container image with the program and jaxche; for "jobset" only.
      volume: ``CLAIM:/path``, for "jobset" only: a PersistentVolumeClaim and its mount point in all pods. Without it a
        restarted pod loses its files, checkpoints included.
      hang_timeout_s: seconds after which a process without a finished round prints the stacks of its threads and exits
        with code 1; must exceed the first round with its compilation.
      elastic: whether the other processes continue after the death of a process. The scheduler then starts the dead
        one again alone, ``max_restarts`` times each, and a coordinator beside them. All are restarted, ``max_restarts``
        times too, if the coordinator or all processes have died.

    Returns:
      Text for ``sbatch``, ``kubectl apply -f -`` or ``bash``.

    Raises:
      ValueError: if an argument is invalid.

    Example:
      >>> print(emit("slurm", ["python", "train.py"], "2x8:h100,4x1:l4"))
      #!/bin/bash
      ...
      #SBATCH --nodes=2 --ntasks-per-node=8 --gres=gpu:h100:8
      #SBATCH hetjob
      #SBATCH --nodes=4 --ntasks-per-node=1 --gres=gpu:l4:1
      ...
    """
    groups = parse_nodes(nodes)
    if elastic and total_tasks(groups) == 1:
        raise ValueError(
            f"--elastic with --nodes {nodes}: there is one process, and none continues after its death. "
            "Write: --nodes 2"
        )
    if scheduler not in SCHEDULERS:
        *others, last = SCHEDULERS
        raise ValueError(f"--emit {scheduler}: there are {', '.join(others)} and {last}. Write: --emit slurm")
    if isinstance(command, str):
        raise ValueError(f"command={command!r} must be a list of words. Write: {command.split()}")
    if not command:
        raise ValueError("there is no command. Write: jaxche launch --emit slurm --nodes 2x8 train.py")
    if scheduler == "jobset" and not image:
        raise ValueError(
            "--emit jobset needs a container image. "
            "Write: jaxche launch --emit jobset --image registry/me/train:1 --nodes 2x8 train.py"
        )
    if scheduler != "jobset" and image is not None:
        raise ValueError(f"--image {image}: --emit {scheduler} takes no container image. Leave it out")
    if volume is not None and (scheduler != "jobset" or not _VOLUME.fullmatch(volume)):
        raise ValueError(
            f"--volume {volume}: --emit jobset takes the name of a PersistentVolumeClaim and an absolute path, the "
            "others take none. Write: --emit jobset --volume training:/checkpoints"
        )
    max_restarts = check_failures(max_restarts, hang_timeout_s)
    variables = {"PYTHONUNBUFFERED": "1", **({ELASTIC: "1"} if elastic else {})}
    if hang_timeout_s is not None:
        variables[HANG_TIMEOUT] = f"{hang_timeout_s:g}"
    # Valid names in all three formats.
    name = re.sub(r"[^a-z0-9]+", "-", name.lower())[:40].strip("-") or "jaxche"
    # Names of Kubernetes services begin with a letter.
    name = name if name[0].isalpha() else f"run-{name}"
    made_by = "".join(letter if letter.isprintable() else " " for letter in made_by)
    job = Job(command, groups, max_restarts, name, made_by, variables, elastic)
    if scheduler == "slurm":
        return _slurm(job)
    return _mpirun(job) if scheduler == "mpirun" else jobset(job, image or "", volume)


def _slurm(job: Job) -> str:
    """A batch script; several kinds of machines become a heterogeneous job."""
    requests = ["# The job continues without a node that fails.", "#SBATCH --no-kill"] if job.elastic else []
    requests += [f"#SBATCH {_request(job.groups[0])}"]
    for group in job.groups[1:]:
        requests += ["#SBATCH hetjob", f"#SBATCH {_request(group)}"]
    return _SLURM.substitute(
        made_by=job.made_by,
        name=job.name,
        requests="\n".join(requests),
        variables=_assignments(job.variables),
        steps=_slurm_steps(job) if job.elastic else _slurm_step(job),
        max_restarts=job.max_restarts,
    )


def _request(group: Nodes) -> str:
    gpus = f" {_gpus(group, group.gpus)}" if group.gpus else ""
    return f"--nodes={group.count} --ntasks-per-node={group.tasks_per_node}{gpus}"


def _gpus(group: Nodes, count: int) -> str:
    return f"--gres=gpu:{group.kind + ':' if group.kind else ''}{count}"


def _slurm_address(groups: Sequence[Nodes], port: str) -> str:
    nodes = "SLURM_JOB_NODELIST_HET_GROUP_0" if len(groups) > 1 else "SLURM_JOB_NODELIST"
    return _SLURM_ADDRESS.substitute(nodes=nodes, port=port, processes=total_tasks(groups))


def _slurm_step(job: Job) -> str:
    """One step of all processes."""
    address, kinds = "", ""
    if len(job.groups) > 1:
        address = _slurm_address(job.groups, "% 4096")
        kinds = f"--het-group={','.join(map(str, range(len(job.groups))))} "
    return f"{address}srun {kinds}--kill-on-bad-exit=1 --label {shlex.join(job.command)}\ncode=$?"


def _slurm_steps(job: Job) -> str:
    """One step for each process of an elastic run."""
    # Without --mem=0 a step takes all of the memory, and the others wait.
    step = f'srun --exact --nodes=1 --ntasks=1 --mem=0 "$@" {shlex.join(job.command)} </dev/null'
    step += ' > >(exec sed -u "s/^/$JAXCHE_PROCESS_ID: /") 2>&1'
    groups, first = "", 0
    for number, group in enumerate(job.groups):
        kind = f"_HET_GROUP_{number}" if len(job.groups) > 1 else ""
        options = [f"--het-group={number}"] if kind else []
        options += [_gpus(group, 1)] if group.gpus else []
        options += [f"${{SLURM_CPUS_PER_TASK{kind}:+--cpus-per-task=$SLURM_CPUS_PER_TASK{kind}}}"]
        groups += _SLURM_GROUP.substitute(first=first, end=first + group.tasks, options=" ".join(options))
        first += group.tasks
    return _SLURM_STEPS.substitute(
        address=_slurm_address(job.groups, "% 2048 * 2"),
        coordinator=_COORDINATOR.substitute(command="python -m jaxche coordinator"),
        member=_MEMBER.substitute(start=step, max_restarts=job.max_restarts),
        groups=groups,
        ended=_ENDED,
    )


def _mpirun(job: Job) -> str:
    """A script around mpirun; it passes the address of process 0, which Open MPI 5 does not set."""
    groups, member = job.groups, ""
    if job.elastic:
        member = _MEMBER.substitute(start=_mpirun_command(job, "1", "$1"), max_restarts=job.max_restarts)
        coordinator = f'mpirun -n 1 --host "${{hosts[0]}}" {_passed(job)} python -m jaxche coordinator'
        run = _MPIRUN_EACH.substitute(coordinator=_COORDINATOR.substitute(command=coordinator), ended=_ENDED)
    else:
        run = _MPIRUN_ALL.substitute(mpirun=_mpirun_command(job, str(total_tasks(groups)), "${where#,}"))
    return _MPIRUN.substitute(
        made_by=job.made_by,
        name=job.name,
        kinds=", then ".join(f"{group.count} with {group.gpus} GPU(s) {group.kind or ''}".rstrip() for group in groups),
        slots=" ".join(str(group.tasks_per_node) for group in groups for _ in range(group.count)),
        port=PORT,
        processes=total_tasks(groups),
        variables=_assignments(job.variables),
        kill_s=_KILL_S,
        member=member,
        term_s=_TERM_S,
        max_restarts=job.max_restarts,
        run=textwrap.indent(run, "  "),
    )


def _mpirun_command(job: Job, processes: str, hosts: str) -> str:
    passed = _passed(job, PROCESS_ID, "JAX_LOCAL_DEVICE_IDS")
    # Not bound to a core, because GPUs need a fast host process.
    return (
        f'mpirun -n {processes} --host "{hosts}" --bind-to none {passed} '
        f'bash -c "$rank" rank {shlex.join(job.command)} </dev/null'
    )


def _passed(job: Job, *more: str) -> str:
    """The options that pass variables to the processes."""
    names = [COORDINATOR, NUM_PROCESSES, RESTART, *job.variables, TUNABLES, "PATH"]
    names += [LIVENESS, *more] if job.elastic else []
    return " ".join(f"-x {name}" for name in names)


def _assignments(variables: Mapping[str, str]) -> str:
    return " ".join([*(f"{name}={value}" for name, value in variables.items()), SET_TUNABLES])
