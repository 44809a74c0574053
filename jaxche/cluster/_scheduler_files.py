"""Files that start a run on a cluster with Slurm, JobSet or mpirun: one process per GPU."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence

from jaxche.cluster._detect import ELASTIC, PROCESS_ID
from jaxche.cluster._job import PORT, Job, Nodes, parse_nodes, total_tasks
from jaxche.cluster._jobset import jobset
from jaxche.distributed import HANG_TIMEOUT, LIVENESS

# Seconds for a checkpoint after SIGTERM.
_TERM_S = 120
# Seconds between the signals of Open MPI to the other processes after a failure. Each restart waits for twice this.
_KILL_S = 5

# A Kubernetes name and an absolute path.
_VOLUME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?:/[^:\s]+")

# A wrapper of each process. mpirun kills a process seconds after SIGTERM, but forwards SIGUSR1 unchanged. It kills the
# other processes if one exits with another code than 0. Its own labels (--tag-output) split lines.
_RANK = """\
rank='trap "" USR1
label() { trap "" TERM; exec sed -u "s/^/[${JAXCHE_PROCESS_ID-${OMPI_COMM_WORLD_RANK:-${PMIX_RANK-}}}] /"; }
"$@" > >(label) 2> >(label >&2) &
process=$!
trap "stopped=1; kill -TERM $process" USR1
trap "kill -TERM $process" TERM
while wait "$process"; code=$?; kill -0 "$process"; do :; done 2>/dev/null
[ "${stopped-}$code" = 1143 ] || exit "$code"'"""


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
    """Writes a file that starts a command on a cluster, one process per GPU.

    Args:
      scheduler: "slurm", "jobset" or "mpirun".
      command: the program and its arguments.
      nodes: the machines as ``COUNTxGPUS:KIND,...``, e.g. ``"2x8:h100,4x1:l4"``.
      max_restarts: restarts after a failure; SIGTERM is no failure.
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
    if scheduler not in ("slurm", "jobset", "mpirun"):
        raise ValueError(f"--emit {scheduler}: there are slurm, jobset and mpirun. Write: --emit slurm")
    if not command:
        raise ValueError("there is no command. Write: jaxche launch --emit slurm --nodes 2x8 train.py")
    if (image is None) == (scheduler == "jobset"):
        raise ValueError(
            f"--image {image}: --emit jobset needs the container image, the others take none. "
            "Write: jaxche launch --emit jobset --image registry/me/train:1 --nodes 2x8 train.py"
        )
    if volume is not None and (scheduler != "jobset" or not _VOLUME.fullmatch(volume)):
        raise ValueError(
            f"--volume {volume}: --emit jobset takes the name of a PersistentVolumeClaim and an absolute path, the "
            "others take none. Write: --emit jobset --volume training:/checkpoints"
        )
    if hang_timeout_s is not None and not 0 < hang_timeout_s < math.inf:
        raise ValueError(f"hang_timeout_s={hang_timeout_s!r} must be positive seconds. Write: hang_timeout_s=600")
    variables = {"PYTHONUNBUFFERED": "1", **({ELASTIC: "1"} if elastic else {})}
    if hang_timeout_s is not None:
        variables[HANG_TIMEOUT] = f"{hang_timeout_s:g}"
    # Valid names in all three formats.
    name = re.sub(r"[^a-z0-9]+", "-", name.lower())[:40].strip("-") or "jaxche"
    # Names of Kubernetes services begin with a letter.
    name = name if name[0].isalpha() else f"run-{name}"
    made_by = "".join(letter if letter.isprintable() else " " for letter in made_by)
    job = Job(command, groups, max_restarts, name, made_by, variables, elastic)
    if scheduler == "jobset":
        return jobset(job, image or "", volume)
    return {"slurm": _slurm, "mpirun": _mpirun}[scheduler](job)


def _slurm(job: Job) -> str:
    """A batch script; several kinds of machines become a heterogeneous job."""
    directives = [
        f"#SBATCH --job-name={job.name}",
        "#SBATCH --output=%x-%j.log --open-mode=append",
        "#SBATCH --time=24:00:00",
        "# Back into the queue after pre-emption or the loss of a node;",
        "# SIGTERM to all ranks 120 s before the time is up.",
        "#SBATCH --requeue --signal=TERM@120",
        *(("# The job continues without a node that fails.", "#SBATCH --no-kill") if job.elastic else ()),
        f"#SBATCH {_request(job.groups[0])}",
    ]
    for group in job.groups[1:]:
        directives += ["#SBATCH hetjob", f"#SBATCH {_request(group)}"]
    return "\n".join(
        [
            "#!/bin/bash",
            f"# {job.made_by}",
            "# Submit with sbatch; options on its command line win over those in this file.",
            *directives,
            "",
            _exported(job.variables),
            "# The training script resumes from its checkpoint.",
            'export JAXCHE_RESTART="${SLURM_RESTART_COUNT:-0}"',
            *(_slurm_steps(job) if job.elastic else _slurm_step(job)),
            "",
            "# 143: SIGTERM, after a checkpoint. 2: bad input, never restarted. Other codes are failures.",
            "# Failures are counted here, because SLURM_RESTART_COUNT counts every requeue.",
            'failures=".jaxche-$SLURM_JOB_ID.failures" again=',
            'case "$code" in',
            "  0 | 2) ;;",
            "  143) again=yes ;;",
            f'  *) echo "$code" >>"$failures" && [ "$(wc -l <"$failures")" -le {job.max_restarts} ] && again=yes ;;',
            "esac",
            'if [ -n "$again" ]; then',
            '  echo "exit code $code after restart $JAXCHE_RESTART: back into the queue"',
            '  scontrol requeue "$SLURM_JOB_ID"',
            "else",
            '  rm -f "$failures"',
            "fi",
            'exit "$code"',
            "",
        ]
    )


def _mpirun(job: Job) -> str:
    """A script around mpirun; it passes the address of process 0, which Open MPI 5 does not set."""
    groups, processes = job.groups, total_tasks(job.groups)
    slots = [group.tasks_per_node for group in groups for _ in range(group.count)]
    kinds = ", then ".join(f"{group.count} with {group.gpus} GPU(s) {group.kind or ''}".rstrip() for group in groups)
    return "\n".join(
        [
            "#!/bin/bash",
            f"# {job.made_by}",
            f"# Write: HOSTS=node1,node2,... bash {job.name}.sh",
            f"# Machines: {kinds}. The first opens the port. For Open MPI 4 and 5.",
            "# To stop it send SIGTERM to this script: all processes write a checkpoint, and it ends with code 143.",
            "# A signal to mpirun itself looks like a failure and restarts the run.",
            "set -u",
            f"slots=({' '.join(map(str, slots))})",
            'IFS=, read -r -a hosts <<<"$HOSTS"',
            'if [ "${#hosts[@]}" -ne "${#slots[@]}" ]; then',
            '  echo "HOSTS has ${#hosts[@]} name(s), ${#slots[@]} are needed" >&2',
            "  exit 2",
            "fi",
            "where=",
            'for i in "${!hosts[@]}"; do where="$where,${hosts[i]}:${slots[i]}"; done',
            "",
            f'export JAXCHE_COORDINATOR="${{hosts[0]}}:${{PORT:-{PORT}}}" JAXCHE_NUM_PROCESSES={processes}',
            _exported(job.variables),
            "# Seconds before SIGTERM and SIGKILL to the others after a failure, in Open MPI 4 and 5.",
            f"export OMPI_MCA_odls_base_sigkill_timeout={_KILL_S} PRTE_MCA_odls_base_sigkill_timeout={_KILL_S}",
            "",
            "# A wrapper of each process: lines start with the rank, and SIGUSR1 from mpirun becomes SIGTERM. Exit by",
            "# this SIGTERM has code 0, because mpirun kills the other processes after any other code.",
            _RANK,
            "",
            "stopped= started= late=",
            *(_member(job, _mpirun_words(job, "1", "$1"), stoppable=True) if job.elastic else ()),
            "stop() {",
            "  stopped=$1",
            '  [ -n "$started" ] && kill -USR1 $started 2>/dev/null || return',
            '  [ -z "$late" ] || return',
            f"  {{ sleep {_TERM_S}; kill -TERM $started; }} >/dev/null 2>&1 &",
            "  late=$!",
            "}",
            "trap 'stop 129' HUP",
            "trap 'stop 130' INT",
            "trap 'stop 143' TERM",
            "# Background jobs get their own process groups, so that signals reach mpirun only through this script.",
            "set -m",
            "code=0",
            f"for ((JAXCHE_RESTART = 0; JAXCHE_RESTART <= {job.max_restarts}; JAXCHE_RESTART++)); do",
            "  export JAXCHE_RESTART",
            *(f"  {line}" for line in (_mpirun_each(job) if job.elastic else _mpirun_all(job))),
            "  # 2: bad input, never restarted. 143 and 130: stopped by a signal.",
            '  [ -z "$stopped" ] || { code=$stopped; break; }',
            '  case "$code" in 0 | 2 | 130 | 143) break ;; esac',
            "done",
            '[ -z "$late" ] || { kill -KILL -- "-$late"; wait "$late"; } 2>/dev/null',
            'exit "$code"',
            "",
        ]
    )


def _mpirun_all(job: Job) -> list[str]:
    """One mpirun of all processes."""
    return [
        f"{_mpirun_words(job, str(total_tasks(job.groups)), '${where#,}')} &",
        "started=$!",
        '[ -z "$stopped" ] || stop "$stopped"',
        'while wait "$started"; code=$?; kill -0 "$started" 2>/dev/null; do :; done',
    ]


def _mpirun_each(job: Job) -> list[str]:
    """One mpirun for each process, because mpirun cannot start a process again."""
    return [
        *_coordinator(f'mpirun -n 1 --host "${{hosts[0]}}" {_passed(job)} python -m jaxche coordinator'),
        "number=0 started=",
        'for i in "${!hosts[@]}"; do',
        "  for ((gpu = 0; gpu < slots[i]; gpu++)); do",
        '    JAX_LOCAL_DEVICE_IDS=$gpu member "$number" "${hosts[i]}" &',
        '    number=$((number + 1)) started="$started $!"',
        "  done",
        "done",
        '[ -z "$stopped" ] || stop "$stopped"',
        *_ended(),
        'kill "$coordinator" 2>/dev/null',
        'wait $started "$coordinator" 2>/dev/null',
    ]


def _mpirun_words(job: Job, processes: str, hosts: str) -> str:
    passed = _passed(job, PROCESS_ID, "JAX_LOCAL_DEVICE_IDS")
    # Not bound to a core, because GPUs need a fast host process.
    return (
        f'mpirun -n {processes} --host "{hosts}" --bind-to none {passed} '
        f'bash -c "$rank" rank {shlex.join(job.command)} </dev/null'
    )


def _passed(job: Job, *more: str) -> str:
    names = ["JAXCHE_COORDINATOR", "JAXCHE_NUM_PROCESSES", "JAXCHE_RESTART", *job.variables, "PATH"]
    names += [LIVENESS, *more] if job.elastic else []
    return " ".join(f"-x {name}" for name in names)


def _coordinator(command: str) -> list[str]:
    """Starts the coordinator of an elastic run."""
    return [
        "# The coordinator of the run, so that every rank may die. It ends some seconds after the last one.",
        "token=$(od -An -N16 -tx1 /dev/urandom | tr -d '[:space:]')",
        "host=${JAXCHE_COORDINATOR%:*} port=${JAXCHE_COORDINATOR##*:}",
        'export JAXCHE_LIVENESS="[\\"$host\\", $((port + 1)), null, \\"$token\\"]"',
        f"{command} </dev/null &",
        "coordinator=$!",
    ]


def _member(job: Job, start: str, stoppable: bool = False) -> list[str]:
    """A shell function that starts a process, and again after each death; on SIGUSR1, if ``stoppable``, no more."""
    return [
        f"start() {{ exec {start}; }}",
        "# A rank that died is started again, with the same environment, and joins as a replacement. Not after these",
        "# exit codes: 2, bad input; 130 and 143, signals.",
        "member() {",
        "  local number=$1 again code job=",
        *(["  trap 'stopped=1; kill -USR1 $job 2>/dev/null' USR1"] if stoppable else ()),
        "  trap 'kill $job 2>/dev/null' TERM",
        f"  for ((again = 0; again <= {job.max_restarts}; again++)); do",
        '    JAXCHE_PROCESS_ID=$number start "${@:2}" &',
        "    job=$!",
        *(['    [ -z "$stopped" ] || kill -USR1 "$job" 2>/dev/null'] if stoppable else ()),
        '    while wait "$job"; code=$?; kill -0 "$job" 2>/dev/null; do :; done',
        *(['    [ -z "$stopped" ] || exit 143'] if stoppable else ()),
        '    case "$code" in 0 | 2 | 130 | 143) break ;; esac',
        '    echo "rank $number has ended with exit code $code"',
        '    kill -0 "$coordinator" 2>/dev/null || break',
        "  done",
        '  exit "$code"',
        "}",
    ]


def _ended() -> list[str]:
    """Waits until the run is over; sets ``code``."""
    return [
        "# A rank that still waits for its start, or starts too late to join, has no run to join.",
        'while kill -0 $started 2>/dev/null && kill -0 "$coordinator" 2>/dev/null; do sleep 0.5; done',
        "codes=",
        'for job in $started; do kill -0 "$job" 2>/dev/null || { wait "$job"; codes="$codes $?"; }; done',
        "kill $started 2>/dev/null",
        "# Success if one rank came to the end: the others died too often.",
        'for code in 0 143 2 $codes 1; do [[ "$codes 1 " = *" $code "* ]] && break; done',
    ]


def _exported(variables: Mapping[str, str]) -> str:
    return f"export {' '.join(f'{name}={value}' for name, value in variables.items())}"


def _request(group: Nodes) -> str:
    gpus = f" {_gpus(group, group.gpus)}" if group.gpus else ""
    return f"--nodes={group.count} --ntasks-per-node={group.tasks_per_node}{gpus}"


def _gpus(group: Nodes, count: int) -> str:
    return f"--gres=gpu:{group.kind + ':' if group.kind else ''}{count}"


def _span(groups: Sequence[Nodes]) -> str:
    return f"--het-group={','.join(map(str, range(len(groups))))} " if len(groups) > 1 else ""


def _slurm_step(job: Job) -> list[str]:
    """One step of all processes."""
    return [
        *(_slurm_address(job.groups, "% 4096") if len(job.groups) > 1 else ()),
        f"srun {_span(job.groups)}--kill-on-bad-exit=1 --label {shlex.join(job.command)}",
        "code=$?",
    ]


def _slurm_steps(job: Job) -> list[str]:
    """One step for each process, because Slurm cannot start a task of a step again."""
    # Without --mem=0 a step takes all of the memory, and the others wait.
    step = f'srun --exact --nodes=1 --ntasks=1 --mem=0 "$@" {shlex.join(job.command)} </dev/null'
    step += ' > >(exec sed -u "s/^/$JAXCHE_PROCESS_ID: /") 2>&1'
    lines, first = [], 0
    for number, group in enumerate(job.groups):
        kind = f"_HET_GROUP_{number}" if len(job.groups) > 1 else ""
        words = [f"--het-group={number}"] if kind else []
        words += [_gpus(group, 1)] if group.gpus else []
        words += [f"${{SLURM_CPUS_PER_TASK{kind}:+--cpus-per-task=$SLURM_CPUS_PER_TASK{kind}}}"]
        lines += [
            f"for ((number = {first}; number < {first + group.tasks}; number++)); do",
            f'  member "$number" {" ".join(words)} &',
            '  started="$started $!"',
            "done",
        ]
        first += group.tasks
    return [
        *_slurm_address(job.groups, "% 2048 * 2"),
        *_coordinator("python -m jaxche coordinator"),
        *_member(job, step),
        "started=",
        *lines,
        *_ended(),
        "# It ignores SIGTERM, on which ranks save.",
        'kill -KILL "$coordinator" 2>/dev/null',
    ]


def _slurm_address(groups: Sequence[Nodes], ports: str) -> list[str]:
    first = "SLURM_JOB_NODELIST_HET_GROUP_0" if len(groups) > 1 else "SLURM_JOB_NODELIST"
    return [
        "# The port is on the first machine.",
        f'first=$(scontrol show hostnames "${first}" | head -n 1)',
        'export JAXCHE_COORDINATOR="$first:${PORT:-$((61440 + SLURM_JOB_ID ' + ports + '))}" '
        f"JAXCHE_NUM_PROCESSES={total_tasks(groups)}",
    ]
