"""Files that start a run on a cluster, as text: one process a GPU, restarts left to the scheduler."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence

from jaxche.cluster._jobset import PORT, jobset
from jaxche.cluster._nodes import Job, Nodes, parse_nodes, total_tasks
from jaxche.distributed import HANG_TIMEOUT

# Seconds for a checkpoint after SIGTERM.
_TERM_S = 120
# Seconds between the signals with which Open MPI ends the processes beside one that failed. It waits them out in full,
# twice, so a longer time would delay every new start.
_KILL_S = 5

# A name as Kubernetes takes it, and an absolute path.
_VOLUME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?:/[^:\s]+")

# Around each process of mpirun, which gives a process seconds after a SIGTERM of its own, but passes SIGUSR1 on as it
# is, and kills the others where one ends with another code than 0. Its own labels (--tag-output) tear lines.
_RANK = """\
rank='trap "" USR1
label() { trap "" TERM; exec sed -u "s/^/[${OMPI_COMM_WORLD_RANK:-${PMIX_RANK-}}] /"; }
"$@" > >(label) 2> >(label >&2) &
process=$!
trap "told=1; kill -TERM $process" USR1
trap "kill -TERM $process" TERM
while wait "$process"; code=$?; kill -0 "$process"; do :; done 2>/dev/null
[ "${told-}$code" = 1143 ] || exit "$code"'"""


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
) -> str:
    """Writes the file that starts a command on a cluster, one process a GPU.

    Args:
      scheduler: "slurm", "jobset" or "mpirun".
      command: the program and its arguments.
      nodes: the machines, as ``parse_nodes`` reads them.
      max_restarts: how often a failed run starts again; one that SIGTERM ended has not failed.
      name: of the job; what is no letter or digit becomes a hyphen, and "run-" comes before a digit.
      made_by: a line for the reader of the file; what would end the line becomes a space.
      image: container image with the program and jaxche; for "jobset" alone.
      volume: ``CLAIM:/path``, for "jobset" alone: a PersistentVolumeClaim and where all pods find it. A pod that starts
        again has nothing else of what the one before it wrote, checkpoints included.
      hang_timeout_s: seconds after which a process ends itself, with code 1 and the stacks of its threads, that has not
        come to the end of a round; more than the first one takes, with its compilation.

    Returns:
      Text for ``sbatch``, ``kubectl apply -f -`` or ``bash``.

    Raises:
      ValueError: if an argument makes no sense.

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
    if scheduler not in ("slurm", "jobset", "mpirun"):
        raise ValueError(f"--emit {scheduler}: there are slurm, jobset and mpirun. Write: --emit slurm")
    if not command:
        raise ValueError("there is nothing to run. Write: jaxche launch --emit slurm --nodes 2x8 train.py")
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
    variables = {"PYTHONUNBUFFERED": "1"}
    if hang_timeout_s is not None:
        variables[HANG_TIMEOUT] = f"{hang_timeout_s:g}"
    # What all three read as a name, and a comment that stays one, whatever is quoted in it.
    name = re.sub(r"[^a-z0-9]+", "-", name.lower())[:40].strip("-") or "jaxche"
    # A service of Kubernetes has it too, and those begin with a letter.
    name = name if name[0].isalpha() else f"run-{name}"
    made_by = "".join(letter if letter.isprintable() else " " for letter in made_by)
    job = Job(command, groups, max_restarts, name, made_by, variables)
    if scheduler == "jobset":
        return jobset(job, image or "", volume)
    return {"slurm": _slurm, "mpirun": _mpirun}[scheduler](job)


def _slurm(job: Job) -> str:
    """Machines of several kinds become one heterogeneous job."""
    directives = [
        f"#SBATCH --job-name={job.name}",
        "#SBATCH --output=%x-%j.log --open-mode=append",
        "#SBATCH --time=24:00:00",
        "# Back into the queue after pre-emption or the loss of a node;",
        "# SIGTERM to all ranks 120 s before the time is up.",
        "#SBATCH --requeue --signal=TERM@120",
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
            "# The training script goes on from its checkpoint.",
            'export JAXCHE_RESTART="${SLURM_RESTART_COUNT:-0}"',
            *_slurm_coordinator(job.groups),
            f"srun {_span(job.groups)}--kill-on-bad-exit=1 --label {shlex.join(job.command)}",
            "code=$?",
            "",
            "# 143: SIGTERM, after a checkpoint of what there was. 2: bad input, which would be refused again.",
            "# All else is a failure. They are counted here, for Slurm's own count is of all returns to the queue.",
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
    """A script around mpirun, with the address that Open MPI 5 no longer tells."""
    groups, processes = job.groups, total_tasks(job.groups)
    slots = [group.tasks_per_node for group in groups for _ in range(group.count)]
    kinds = ", then ".join(f"{group.count} with {group.gpus} GPU(s) {group.kind or ''}".rstrip() for group in groups)
    passed = ("JAXCHE_COORDINATOR", "JAXCHE_NUM_PROCESSES", "JAXCHE_RESTART", *job.variables, "PATH")
    return "\n".join(
        [
            "#!/bin/bash",
            f"# {job.made_by}",
            f"# Write: HOSTS=node1,node2,... bash {job.name}.sh",
            f"# Machines: {kinds}. Process 0 is on the first. For Open MPI 4 and 5.",
            "# To stop it send SIGTERM to this script: all processes write a checkpoint, and it ends with code 143.",
            "# What is sent to mpirun alone looks like a failure, and starts the run again.",
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
            "# Seconds that mpirun leaves the others when one failed, before and after SIGTERM; in Open MPI 4 and 5.",
            f"export OMPI_MCA_odls_base_sigkill_timeout={_KILL_S} PRTE_MCA_odls_base_sigkill_timeout={_KILL_S}",
            "",
            "# Around each process: lines start with its rank. SIGUSR1, which mpirun passes on, becomes SIGTERM, and",
            "# to end by that is to end well, for mpirun kills the others beside one that does not.",
            _RANK,
            "",
            "told= mpirun= late=",
            "stop() {",
            "  told=$1",
            '  [ -n "$mpirun" ] && kill -USR1 "$mpirun" 2>/dev/null || return',
            '  [ -z "$late" ] || return',
            f'  {{ sleep {_TERM_S}; kill -TERM "$mpirun"; }} >/dev/null 2>&1 &',
            "  late=$!",
            "}",
            "trap 'stop 129' HUP",
            "trap 'stop 130' INT",
            "trap 'stop 143' TERM",
            "# Jobs in process groups of their own: a signal to that of this script reaches mpirun through it alone.",
            "set -m",
            "code=0",
            f"for ((JAXCHE_RESTART = 0; JAXCHE_RESTART <= {job.max_restarts}; JAXCHE_RESTART++)); do",
            "  export JAXCHE_RESTART",
            "  # Unbound: a process on one core is a slow host for its GPU.",
            f'  mpirun -n {processes} --host "${{where#,}}" --bind-to none \\',
            f"    {' '.join(f'-x {variable}' for variable in passed)} \\",
            f'    bash -c "$rank" rank {shlex.join(job.command)} </dev/null &',
            "  mpirun=$!",
            '  [ -z "$told" ] || stop "$told"',
            '  while wait "$mpirun"; code=$?; kill -0 "$mpirun" 2>/dev/null; do :; done',
            "  # 2: bad input, which would be refused again. 143 and 130: told to stop.",
            '  [ -z "$told" ] || { code=$told; break; }',
            '  case "$code" in 0 | 2 | 130 | 143) break ;; esac',
            "done",
            '[ -z "$late" ] || { kill -KILL -- "-$late"; wait "$late"; } 2>/dev/null',
            'exit "$code"',
            "",
        ]
    )


def _exported(variables: Mapping[str, str]) -> str:
    return f"export {' '.join(f'{name}={value}' for name, value in variables.items())}"


def _request(group: Nodes) -> str:
    gres = f" --gres=gpu:{group.kind + ':' if group.kind else ''}{group.gpus}" if group.gpus else ""
    return f"--nodes={group.count} --ntasks-per-node={group.tasks_per_node}{gres}"


def _span(groups: Sequence[Nodes]) -> str:
    return f"--het-group={','.join(map(str, range(len(groups))))} " if len(groups) > 1 else ""


def _slurm_coordinator(groups: Sequence[Nodes]) -> list[str]:
    if len(groups) == 1:
        return []
    # JAX takes the first name of the whole job's list; process 0 is on the first machine of the first kind.
    return [
        "# Process 0 is on the first machine of the first kind.",
        'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_0" | head -n 1)',
        'export JAXCHE_COORDINATOR="$first:${PORT:-$((61440 + SLURM_JOB_ID % 4096))}" '
        f"JAXCHE_NUM_PROCESSES={total_tasks(groups)}",
    ]
