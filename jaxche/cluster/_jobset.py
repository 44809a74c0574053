"""The manifest of a JobSet of Kubernetes: one pod per GPU."""

from __future__ import annotations

import dataclasses
import json
import secrets

from jaxche.cluster._job import PORT, Job, Nodes, total_tasks

_KINDS = (
    "# A kind is the exact value of the node label nvidia.com/gpu.product, e.g. NVIDIA-H100-80GB-HBM3:",
    "# kubectl get nodes -L nvidia.com/gpu.product",
)


def jobset(job: Job, image: str, volume: str | None) -> str:
    """A JobSet with a replicated job per kind of machine and a pod per process."""
    claim, _, path = (volume or "").partition(":")
    again = "; the training script resumes from its checkpoint" if claim else ""
    needs = f"the JobSet controller (jobset.sigs.k8s.io){' and Kubernetes 1.29' if job.elastic else ''}"
    address = f"{job.name}-{'coordinator' if job.elastic else 'nodes0'}-0-0.{job.name}"
    variables = {
        "JAXCHE_COORDINATOR": f"{address}:{PORT}",
        "JAXCHE_NUM_PROCESSES": str(total_tasks(job.groups)),
        **({"JAXCHE_LIVENESS": json.dumps([address, PORT + 1, None, secrets.token_hex(16)])} if job.elastic else {}),
        **job.variables,
    }
    job = dataclasses.replace(job, variables=variables)
    jobs, first = [_coordinator(job, image)] if job.elastic else [], 0
    for number, group in enumerate(job.groups):
        jobs.append(_replicated_job(job, group, number, first, image, claim, path))
        first += group.tasks
    return "\n".join(
        [
            f"# {job.made_by}",
            f"# Needs {needs}. Start with: kubectl apply -f FILE",
            *_storage(claim, path),
            *(_KINDS if any(group.kind for group in job.groups) else ()),
            "apiVersion: jobset.x-k8s.io/v1alpha2",
            "kind: JobSet",
            f"metadata: {{name: {job.name}}}",
            "spec:",
            "  network: {enableDNSHostnames: true}",
            *(_elastic_policies(job, again) if job.elastic else _policy(job, again)),
            "  replicatedJobs:",
            *jobs,
            "",
        ]
    )


def _policy(job: Job, again: str) -> list[str]:
    return [
        f"  # Restarts of all pods after a failure of one{again}.",
        f"  failurePolicy: {{maxRestarts: {job.max_restarts}}}",
    ]


def _elastic_policies(job: Job, again: str) -> list[str]:
    names = ", ".join(f"nodes{number}" for number in range(len(job.groups)))
    return [
        "  # The others continue without a pod that fails, to the end of the run; then the jobset has failed.",
        f"  # Restarts of all pods after a failure of the coordinator or of all{again}.",
        "  failurePolicy:",
        f"    maxRestarts: {job.max_restarts}",
        "    rules:",
        f"      - {{name: pods, action: FailJobSet, targetReplicatedJobs: [{names}]}}",
        f"  successPolicy: {{operator: All, targetReplicatedJobs: [{names}]}}",
    ]


def _coordinator(job: Job, image: str) -> str:
    return "\n".join(
        [
            "    # The processes meet there, so that each of them may die.",
            "    - name: coordinator",
            "      replicas: 1",
            "      template:",
            "        spec:",
            "          parallelism: 1",
            "          completions: 1",
            "          completionMode: Indexed",
            "          backoffLimit: 0",
            "          template:",
            "            spec:",
            "              restartPolicy: Never",
            "              terminationGracePeriodSeconds: 1",
            "              containers:",
            "                - name: coordinator",
            f"                  image: {json.dumps(image)}",
            '                  command: ["python", "-m", "jaxche", "coordinator"]',
            "                  # It ends with its standard input: not before the jobset.",
            "                  stdin: true",
            "                  env:",
            *_variables(job),
        ]
    )


def _variables(job: Job) -> list[str]:
    return [
        f"                    - {{name: {name}, value: {json.dumps(value)}}}" for name, value in job.variables.items()
    ]


def _failures(job: Job) -> list[str]:
    """What follows the failure of a pod."""
    if not job.elastic:
        return ["          backoffLimit: 0"]
    return [
        "          # A pod that fails is started again alone, and joins as a replacement. Evictions and lost nodes are",
        "          # not counted. 2: bad input, never restarted.",
        f"          backoffLimitPerIndex: {job.max_restarts}",
        "          podReplacementPolicy: Failed",
        "          podFailurePolicy:",
        "            rules:",
        '              - {action: Ignore, onPodConditions: [{type: DisruptionTarget, status: "True"}]}',
        "              - {action: FailIndex, onExitCodes: {containerName: train, operator: In, values: [2]}}",
    ]


def _sigterm(job: Job) -> list[str]:
    """What a pod does on SIGTERM."""
    if job.elastic:
        return [
            "              # The shell, process 1, does not pass SIGTERM on: all processes would save and exit.",
            "              terminationGracePeriodSeconds: 1",
        ]
    return [
        "              # Time for a checkpoint after SIGTERM.",
        "              terminationGracePeriodSeconds: 120",
    ]


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
    # JSON strings are YAML strings.
    words = [
        "sh",
        "-c",
        f"JAXCHE_PROCESS_ID=$(({first} + JOB_COMPLETION_INDEX)) " + ('"$@"; exit $?' if job.elastic else 'exec "$@"'),
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
        *_failures(job),
        "          template:",
        "            spec:",
        "              restartPolicy: Never",
        *_sigterm(job),
    ]
    if group.kind:
        lines.append(f"              nodeSelector: {{nvidia.com/gpu.product: {json.dumps(group.kind)}}}")
    lines += [
        "              containers:",
        "                - name: train",
        f"                  image: {json.dumps(image)}",
        f"                  command: {json.dumps(words)}",
        "                  env:",
        "                    - name: JAXCHE_RESTART",
        "                      valueFrom:",
        "                        fieldRef: {fieldPath: \"metadata.annotations['jobset.sigs.k8s.io/restart-attempt']\"}",
        *_variables(job),
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
