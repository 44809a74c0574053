"""Files that start a run on a cluster with Slurm, JobSet or mpirun: one process per GPU."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence

from jaxche.distributed import HANG_TIMEOUT

# Port of process 0.
_PORT = 61234
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
label() { trap "" TERM; exec sed -u "s/^/[${OMPI_COMM_WORLD_RANK:-${PMIX_RANK-}}] /"; }
"$@" > >(label) 2> >(label >&2) &
process=$!
trap "stopped=1; kill -TERM $process" USR1
trap "kill -TERM $process" TERM
while wait "$process"; code=$?; kill -0 "$process"; do :; done 2>/dev/null
[ "${stopped-}$code" = 1143 ] || exit "$code"'"""

_GROUP = re.compile(r"([1-9]\d*)(?:x([1-9]\d*)(?::([\w.-]+))?)?")
_WRITE = "--nodes 4 (no GPUs), --nodes 2x8 or, of two kinds, --nodes 2x8:h100,4x1:l4"

_KINDS = (
    "# A kind is the exact value of the node label nvidia.com/gpu.product, e.g. NVIDIA-H100-80GB-HBM3:",
    "# kubectl get nodes -L nvidia.com/gpu.product",
)


@dataclasses.dataclass(frozen=True)
class Nodes:
    """Machines of one kind: their number, GPUs of each (0: one process on the CPU), and name of the kind or None."""

    count: int
    gpus: int = 0
    kind: str | None = None

    @property
    def tasks_per_node(self) -> int:
        """Processes on each machine."""
        return max(self.gpus, 1)

    @property
    def tasks(self) -> int:
        """Processes on all machines."""
        return self.count * self.tasks_per_node


@dataclasses.dataclass(frozen=True)
class Job:
    """The parts that the files of all schedulers share."""

    command: Sequence[str]
    groups: Sequence[Nodes]
    max_restarts: int
    name: str
    made_by: str
    variables: Mapping[str, str]


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
    variables = {"PYTHONUNBUFFERED": "1"}
    if hang_timeout_s is not None:
        variables[HANG_TIMEOUT] = f"{hang_timeout_s:g}"
    # Valid names in all three formats.
    name = re.sub(r"[^a-z0-9]+", "-", name.lower())[:40].strip("-") or "jaxche"
    # Names of Kubernetes services begin with a letter.
    name = name if name[0].isalpha() else f"run-{name}"
    made_by = "".join(letter if letter.isprintable() else " " for letter in made_by)
    job = Job(command, groups, max_restarts, name, made_by, variables)
    if scheduler == "jobset":
        return _jobset(job, image or "", volume)
    return {"slurm": _slurm, "mpirun": _mpirun}[scheduler](job)


def parse_nodes(text: str) -> tuple[Nodes, ...]:
    """Parses ``COUNT[xGPUS[:KIND]]``, separated by commas."""
    groups = []
    for word in text.split(","):
        match = _GROUP.fullmatch(word.strip())
        if match is None:
            raise ValueError(f"--nodes {text!r} is invalid at {word!r}. Write: {_WRITE}")
        groups.append(Nodes(int(match[1]), int(match[2] or 0), match[3]))
    return tuple(groups)


def total_tasks(groups: Sequence[Nodes]) -> int:
    """Processes of the job."""
    return sum(group.tasks for group in groups)


def _slurm(job: Job) -> str:
    """A batch script; several kinds of machines become a heterogeneous job."""
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
            "# The training script resumes from its checkpoint.",
            'export JAXCHE_RESTART="${SLURM_RESTART_COUNT:-0}"',
            *_slurm_coordinator(job.groups),
            f"srun {_span(job.groups)}--kill-on-bad-exit=1 --label {shlex.join(job.command)}",
            "code=$?",
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
    passed = ("JAXCHE_COORDINATOR", "JAXCHE_NUM_PROCESSES", "JAXCHE_RESTART", *job.variables, "PATH")
    return "\n".join(
        [
            "#!/bin/bash",
            f"# {job.made_by}",
            f"# Write: HOSTS=node1,node2,... bash {job.name}.sh",
            f"# Machines: {kinds}. Process 0 is on the first. For Open MPI 4 and 5.",
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
            f'export JAXCHE_COORDINATOR="${{hosts[0]}}:${{PORT:-{_PORT}}}" JAXCHE_NUM_PROCESSES={processes}',
            _exported(job.variables),
            "# Seconds before SIGTERM and SIGKILL to the others after a failure, in Open MPI 4 and 5.",
            f"export OMPI_MCA_odls_base_sigkill_timeout={_KILL_S} PRTE_MCA_odls_base_sigkill_timeout={_KILL_S}",
            "",
            "# A wrapper of each process: lines start with the rank, and SIGUSR1 from mpirun becomes SIGTERM. Exit by",
            "# this SIGTERM has code 0, because mpirun kills the other processes after any other code.",
            _RANK,
            "",
            "stopped= mpirun= late=",
            "stop() {",
            "  stopped=$1",
            '  [ -n "$mpirun" ] && kill -USR1 "$mpirun" 2>/dev/null || return',
            '  [ -z "$late" ] || return',
            f'  {{ sleep {_TERM_S}; kill -TERM "$mpirun"; }} >/dev/null 2>&1 &',
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
            "  # Not bound to a core, because GPUs need a fast host process.",
            f'  mpirun -n {processes} --host "${{where#,}}" --bind-to none \\',
            f"    {' '.join(f'-x {variable}' for variable in passed)} \\",
            f'    bash -c "$rank" rank {shlex.join(job.command)} </dev/null &',
            "  mpirun=$!",
            '  [ -z "$stopped" ] || stop "$stopped"',
            '  while wait "$mpirun"; code=$?; kill -0 "$mpirun" 2>/dev/null; do :; done',
            "  # 2: bad input, never restarted. 143 and 130: stopped by a signal.",
            '  [ -z "$stopped" ] || { code=$stopped; break; }',
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
    return [
        "# Process 0 is on the first machine of the first kind.",
        'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_0" | head -n 1)',
        'export JAXCHE_COORDINATOR="$first:${PORT:-$((61440 + SLURM_JOB_ID % 4096))}" '
        f"JAXCHE_NUM_PROCESSES={total_tasks(groups)}",
    ]


def _jobset(job: Job, image: str, volume: str | None) -> str:
    """A JobSet with a replicated job per kind of machine and a pod per process."""
    claim, _, path = (volume or "").partition(":")
    again = "; the training script resumes from its checkpoint" if claim else ""
    jobs, first = [], 0
    for number, group in enumerate(job.groups):
        jobs.append(_replicated_job(job, group, number, first, image, claim, path))
        first += group.tasks
    return "\n".join(
        [
            f"# {job.made_by}",
            "# Needs the JobSet controller (jobset.sigs.k8s.io). Start with: kubectl apply -f FILE",
            *_storage(claim, path),
            *(_KINDS if any(group.kind for group in job.groups) else ()),
            "apiVersion: jobset.x-k8s.io/v1alpha2",
            "kind: JobSet",
            f"metadata: {{name: {job.name}}}",
            "spec:",
            "  network: {enableDNSHostnames: true}",
            f"  # Restarts of all pods after a failure of one{again}.",
            f"  failurePolicy: {{maxRestarts: {job.max_restarts}}}",
            "  replicatedJobs:",
            *jobs,
            "",
        ]
    )


def _storage(claim: str, path: str) -> list[str]:
    if not claim:
        return [
            "# A restart deletes the files of a pod. To keep checkpoints, --volume CLAIM:/path mounts a",
            "# PersistentVolumeClaim in every pod; it must be writable from all nodes (ReadWriteMany).",
        ]
    return [
        f"# The claim {claim} must be writable from all nodes (ReadWriteMany). Checkpoints go to a folder in {path}.",
    ]


def _replicated_job(job: Job, group: Nodes, number: int, first: int, image: str, claim: str, path: str) -> str:
    coordinator = f"{job.name}-nodes0-0-0.{job.name}:{_PORT}"
    # JSON strings are YAML strings.
    words = [
        "sh",
        "-c",
        f'JAXCHE_PROCESS_ID=$(({first} + JOB_COMPLETION_INDEX)) exec "$@"',
        "sh",
        *job.command,
    ]
    lines = [
        f"    - name: nodes{number}",
        "      replicas: 1",
        "      template:",
        "        spec:",
        f"          parallelism: {group.tasks}",
        f"          completions: {group.tasks}",
        "          completionMode: Indexed",
        "          backoffLimit: 0",
        "          template:",
        "            spec:",
        "              restartPolicy: Never",
        "              # Time for a checkpoint after SIGTERM.",
        "              terminationGracePeriodSeconds: 120",
    ]
    if group.kind:
        lines.append(f"              nodeSelector: {{nvidia.com/gpu.product: {json.dumps(group.kind)}}}")
    lines += [
        "              containers:",
        "                - name: train",
        f"                  image: {json.dumps(image)}",
        f"                  command: {json.dumps(words)}",
        "                  env:",
        f"                    - {{name: JAXCHE_COORDINATOR, value: {json.dumps(coordinator)}}}",
        f'                    - {{name: JAXCHE_NUM_PROCESSES, value: "{total_tasks(job.groups)}"}}',
        "                    - name: JAXCHE_RESTART",
        "                      valueFrom:",
        "                        fieldRef: {fieldPath: \"metadata.annotations['jobset.sigs.k8s.io/restart-attempt']\"}",
        *(
            f"                    - {{name: {name}, value: {json.dumps(value)}}}"
            for name, value in job.variables.items()
        ),
    ]
    if group.gpus:
        lines.append("                  resources: {limits: {nvidia.com/gpu: 1}}")
    if claim:
        lines += [
            f"                  volumeMounts: [{{name: kept, mountPath: {json.dumps(path)}}}]",
            "              volumes:",
            f"                - {{name: kept, persistentVolumeClaim: {{claimName: {json.dumps(claim)}}}}}",
        ]
    return "\n".join(lines)
