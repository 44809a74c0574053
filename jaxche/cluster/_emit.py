"""Files that start a run on a cluster, as text: one process a GPU, restarts left to the scheduler."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence

from jaxche.cluster._nodes import Nodes, parse_nodes, total_tasks

_PORT = 61234


def emit(
    scheduler: str,
    command: Sequence[str],
    nodes: str,
    max_restarts: int = 3,
    name: str = "jaxche",
    made_by: str = "Made by jaxche.",
    image: str | None = None,
) -> str:
    """Writes the file that starts a command on a cluster, one process a GPU.

    Args:
      scheduler: "slurm", "jobset" or "mpirun".
      command: the program and its arguments.
      nodes: the machines, as ``parse_nodes`` reads them.
      max_restarts: how often a failed run starts again.
      name: of the job; what is no letter or digit becomes a hyphen, and "run-" comes before a digit.
      made_by: a line for the reader of the file; what would end the line becomes a space.
      image: container image with the program and jaxche; for "jobset" alone.

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
    # What all three read as a name, and a comment that stays one, whatever is quoted in it.
    name = re.sub(r"[^a-z0-9]+", "-", name.lower())[:40].strip("-") or "jaxche"
    # A service of Kubernetes has it too, and those begin with a letter.
    name = name if name[0].isalpha() else f"run-{name}"
    made_by = "".join(letter if letter.isprintable() else " " for letter in made_by)
    if scheduler == "jobset":
        return _jobset(command, groups, max_restarts, name, made_by, image or "")
    return {"slurm": _slurm, "mpirun": _mpirun}[scheduler](command, groups, max_restarts, name, made_by)


def _slurm(command: Sequence[str], groups: Sequence[Nodes], max_restarts: int, name: str, made_by: str) -> str:
    """Machines of several kinds become one heterogeneous job."""
    directives = [
        f"#SBATCH --job-name={name}",
        "#SBATCH --output=%x-%j.log --open-mode=append",
        "#SBATCH --time=24:00:00",
        "# Back into the queue after pre-emption or the loss of a node;",
        "# SIGTERM to all ranks 120 s before the time is up.",
        "#SBATCH --requeue --signal=TERM@120",
        f"#SBATCH {_request(groups[0])}",
    ]
    for group in groups[1:]:
        directives += ["#SBATCH hetjob", f"#SBATCH {_request(group)}"]
    return "\n".join(
        [
            "#!/bin/bash",
            f"# {made_by}",
            "# Submit with sbatch; options on its command line win over those in this file.",
            *directives,
            "",
            "export PYTHONUNBUFFERED=1",
            "# The training script goes on from its checkpoint.",
            'export JAXCHE_RESTART="${SLURM_RESTART_COUNT:-0}"',
            *_slurm_coordinator(groups),
            f"srun {_span(groups)}--kill-on-bad-exit=1 --label {shlex.join(command)}",
            "code=$?",
            "",
            "# 143: SIGTERM, after a checkpoint of what there was. 2: bad input, which would be refused again.",
            f'if [ "$code" -eq 143 ] || {{ [ "$code" -ne 0 ] && [ "$code" -ne 2 ] '
            f'&& [ "$JAXCHE_RESTART" -lt {max_restarts} ]; }}; then',
            '  echo "exit code $code after restart $JAXCHE_RESTART: back into the queue"',
            '  scontrol requeue "$SLURM_JOB_ID"',
            "fi",
            'exit "$code"',
            "",
        ]
    )


def _jobset(
    command: Sequence[str], groups: Sequence[Nodes], max_restarts: int, name: str, made_by: str, image: str
) -> str:
    """A job a kind of machine (the value of the label nvidia.com/gpu.product), a pod a process."""
    jobs, first = [], 0
    for number, group in enumerate(groups):
        jobs.append(_job(command, group, number, first, f"{name}-nodes0-0-0.{name}", total_tasks(groups), image))
        first += group.tasks
    return "\n".join(
        [
            f"# {made_by}",
            "# Needs the JobSet controller (jobset.sigs.k8s.io). Start with: kubectl apply -f FILE",
            "apiVersion: jobset.x-k8s.io/v1alpha2",
            "kind: JobSet",
            f"metadata: {{name: {name}}}",
            "spec:",
            "  network: {enableDNSHostnames: true}",
            "  # All pods start again after one failed; the training script goes on from its checkpoint.",
            f"  failurePolicy: {{maxRestarts: {max_restarts}}}",
            "  replicatedJobs:",
            *jobs,
            "",
        ]
    )


def _mpirun(command: Sequence[str], groups: Sequence[Nodes], max_restarts: int, name: str, made_by: str) -> str:
    """A script around mpirun, with the address that Open MPI 5 no longer tells."""
    slots = [group.tasks_per_node for group in groups for _ in range(group.count)]
    kinds = ", then ".join(f"{group.count} with {group.gpus} GPU(s) {group.kind or ''}".rstrip() for group in groups)
    variables = ("JAXCHE_COORDINATOR", "JAXCHE_NUM_PROCESSES", "JAXCHE_RESTART", "PYTHONUNBUFFERED", "PATH")
    return "\n".join(
        [
            "#!/bin/bash",
            f"# {made_by}",
            f"# Write: HOSTS=node1,node2,... bash {name}.sh",
            f"# Machines: {kinds}. Process 0 is on the first.",
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
            f'export JAXCHE_COORDINATOR="${{hosts[0]}}:${{PORT:-{_PORT}}}" JAXCHE_NUM_PROCESSES={total_tasks(groups)}',
            "export PYTHONUNBUFFERED=1",
            f"for ((JAXCHE_RESTART = 0; JAXCHE_RESTART <= {max_restarts}; JAXCHE_RESTART++)); do",
            "  export JAXCHE_RESTART",
            "  # Unbound: a process on one core is a slow host for its GPU.",
            f'  mpirun -n {total_tasks(groups)} --host "${{where#,}}" --bind-to none \\',
            f"    {' '.join(f'-x {variable}' for variable in variables)} \\",
            f"    {shlex.join(command)}",
            "  code=$?",
            "  # 143 and 130: told to stop. 2: bad input, which would be refused again.",
            '  case "$code" in 0 | 2 | 130 | 143) break ;; esac',
            "done",
            'exit "$code"',
            "",
        ]
    )


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
        'export JAXCHE_COORDINATOR="$first:$((61440 + SLURM_JOB_ID % 4096))" '
        f"JAXCHE_NUM_PROCESSES={total_tasks(groups)}",
    ]


def _job(
    command: Sequence[str], group: Nodes, number: int, first: int, coordinator: str, processes: int, image: str
) -> str:
    # JSON strings are YAML strings.
    words = [
        "sh",
        "-c",
        f'JAXCHE_PROCESS_ID=$(({first} + JOB_COMPLETION_INDEX)) exec "$@"',
        "sh",
        *command,
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
        f"                    - {{name: JAXCHE_COORDINATOR, value: {json.dumps(f'{coordinator}:{_PORT}')}}}",
        f'                    - {{name: JAXCHE_NUM_PROCESSES, value: "{processes}"}}',
        "                    - name: JAXCHE_RESTART",
        "                      valueFrom:",
        "                        fieldRef: {fieldPath: \"metadata.annotations['jobset.sigs.k8s.io/restart-attempt']\"}",
        '                    - {name: PYTHONUNBUFFERED, value: "1"}',
    ]
    if group.gpus:
        lines.append("                  resources: {limits: {nvidia.com/gpu: 1}}")
    return "\n".join(lines)
