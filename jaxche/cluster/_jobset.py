"""A JobSet of Kubernetes, as text: a job a kind of machine, a pod a process."""

from __future__ import annotations

import json

from jaxche.cluster._nodes import Job, Nodes, total_tasks

# Of process 0, where nobody says another.
PORT = 61234

_KINDS = (
    "# A kind is the value of the node label nvidia.com/gpu.product, letter by letter, e.g. NVIDIA-H100-80GB-HBM3:",
    "# kubectl get nodes -L nvidia.com/gpu.product",
)


def jobset(job: Job, image: str, volume: str | None) -> str:
    """A job a kind of machine (the value of the label nvidia.com/gpu.product), a pod a process."""
    claim, _, path = (volume or "").partition(":")
    again = "; the training script goes on from its checkpoint" if claim else ""
    jobs, first = [], 0
    for number, group in enumerate(job.groups):
        jobs.append(_job(job, group, number, first, image, claim, path))
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
            f"  # So often all pods start again after one failed{again}.",
            f"  failurePolicy: {{maxRestarts: {job.max_restarts}}}",
            "  replicatedJobs:",
            *jobs,
            "",
        ]
    )


def _storage(claim: str, path: str) -> list[str]:
    if not claim:
        return [
            "# What a pod writes is gone with it. For checkpoints that outlive a restart, --volume CLAIM:/path mounts",
            "# a PersistentVolumeClaim that all nodes can write (ReadWriteMany) in every pod; the script writes there.",
        ]
    return [
        f"# The claim {claim} is one that all nodes can write (ReadWriteMany); checkpoints go to a folder in {path}.",
    ]


def _job(job: Job, group: Nodes, number: int, first: int, image: str, claim: str, path: str) -> str:
    coordinator = f"{job.name}-nodes0-0-0.{job.name}:{PORT}"
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
