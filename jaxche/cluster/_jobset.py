"""The manifest of a JobSet of Kubernetes: one pod per GPU."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from jaxche.cluster._job import PORT, Job, Nodes, total_tasks
from jaxche.cluster._tunables import SET_TUNABLES
from jaxche.distributed import COORDINATOR, LIVENESS, NUM_PROCESSES, PROCESS_ID, RESTART


def jobset(job: Job, image: str, volume: str | None) -> str:
    """A JobSet with a replicated job per kind of machine and a pod per process."""
    claim, _, path = (volume or "").partition(":")
    host = f"{job.name}-{'coordinator' if job.elastic else 'nodes0'}-0-0.{job.name}"
    variables = {COORDINATOR: f"{host}:{PORT}", NUM_PROCESSES: str(total_tasks(job.groups))}
    if job.elastic:
        variables[LIVENESS] = json.dumps([host, PORT + 1, None, secrets.token_hex(16)])
    variables |= job.variables
    replicated, first = [_coordinator(image, variables)] if job.elastic else [], 0
    for number, group in enumerate(job.groups):
        pod = _pod(job, group, first, image, variables, claim, path)
        replicated.append(_replicated_job(f"nodes{number}", group.tasks, _failures(job), pod))
        first += group.tasks
    manifest = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.name},
        "spec": {"network": {"enableDNSHostnames": True}, **_policies(job), "replicatedJobs": replicated},
    }
    comments = "".join(f"# {line}\n" for line in _comments(job, claim, path))
    return comments + yaml.safe_dump(manifest, sort_keys=False, width=2**16)


def _comments(job: Job, claim: str, path: str) -> Iterator[str]:
    yield job.made_by
    oldest = "1.29" if job.elastic else "1.26"
    yield f"Needs the JobSet controller (jobset.sigs.k8s.io) and Kubernetes {oldest}. Start with: kubectl apply -f FILE"
    if claim:
        yield f"The claim {claim} must be writable from all nodes (ReadWriteMany)."
        yield f"Checkpoints go to a folder in {path}."
    else:
        yield "A restart deletes the files of a pod. To keep checkpoints, --volume CLAIM:/path mounts a"
        yield "PersistentVolumeClaim in every pod; it must be writable from all nodes (ReadWriteMany)."
    if any(group.kind for group in job.groups):
        yield "A kind is the exact value of the node label nvidia.com/gpu.product, e.g. NVIDIA-H100-80GB-HBM3:"
        yield "kubectl get nodes -L nvidia.com/gpu.product"
    if job.elastic:
        yield "A pod that fails is started again alone, backoffLimitPerIndex times, and joins as a replacement;"
        yield "evictions and lost nodes are not counted. The others continue without it. All pods restart,"
        yield "maxRestarts times, if the coordinator or all of them have failed."
    else:
        yield "All pods restart, maxRestarts times, after a failure of one; evictions and lost nodes are not counted,"
        yield "but exit code 2 of bad input is. After SIGTERM they have 120 s for a checkpoint."


def _policies(job: Job) -> dict[str, Any]:
    """What follows the failure or the success of a replicated job."""
    if not job.elastic:
        evicted = {
            "name": "evictions",
            "action": "RestartJobSetAndIgnoreMaxRestarts",
            "onJobFailureReasons": ["PodFailurePolicy"],
        }
        return {"failurePolicy": {"maxRestarts": job.max_restarts, "rules": [evicted]}}
    names = [f"nodes{number}" for number in range(len(job.groups))]
    # A pod that has failed for good lets the others train to the end; then the jobset has failed.
    rule = {"name": "pods", "action": "FailJobSet", "targetReplicatedJobs": names}
    return {
        "failurePolicy": {"maxRestarts": job.max_restarts, "rules": [rule]},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": [*names]},  # a copy, or YAML writes an alias
    }


def _failures(job: Job) -> dict[str, Any]:
    """What follows the failure of a pod."""
    evicted = [{"type": "DisruptionTarget", "status": "True"}]
    if not job.elastic:
        rule = {"action": "FailJob", "onPodConditions": evicted}
        return {"backoffLimit": 0, "podFailurePolicy": {"rules": [rule]}}
    eviction = {"action": "Ignore", "onPodConditions": evicted}
    # 2: bad input, never restarted.
    bad_input = {"action": "FailIndex", "onExitCodes": {"containerName": "train", "operator": "In", "values": [2]}}
    return {
        "backoffLimitPerIndex": job.max_restarts,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": [eviction, bad_input]},
    }


def _replicated_job(name: str, pods: int, failures: dict[str, Any], pod: dict[str, Any]) -> dict[str, Any]:
    spec = {"parallelism": pods, "completions": pods, "completionMode": "Indexed", **failures}
    pod = {"restartPolicy": "Never", **pod}
    return {"name": name, "replicas": 1, "template": {"spec": {**spec, "template": {"spec": pod}}}}


def _coordinator(image: str, variables: Mapping[str, str]) -> dict[str, Any]:
    """A pod where the processes meet, so that each of them may die."""
    container = {
        "name": "coordinator",
        "image": image,
        "command": ["python", "-m", "jaxche", "coordinator"],
        # It ends with its standard input: not before the jobset.
        "stdin": True,
        "env": _env(variables),
    }
    pod = {"terminationGracePeriodSeconds": 1, "containers": [container]}
    return _replicated_job("coordinator", 1, {"backoffLimit": 0}, pod)


def _pod(
    job: Job, group: Nodes, first: int, image: str, variables: Mapping[str, str], claim: str, path: str
) -> dict[str, Any]:
    """A pod of a process; ``first`` is the number of the first process on these machines."""
    # In an elastic run the shell stays process 1 and does not pass SIGTERM on: all processes would save and exit.
    run = '"$@"; exit $?' if job.elastic else 'exec "$@"'
    set_variables = f"{PROCESS_ID}=$(({first} + JOB_COMPLETION_INDEX)) {SET_TUNABLES}"
    restart = {"fieldRef": {"fieldPath": "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"}}
    container: dict[str, Any] = {
        "name": "train",
        "image": image,
        "command": [
            "sh",
            "-c",
            f"{set_variables} {run}",
            "sh",
            *(word.replace("$", "$$") for word in job.command),  # Kubernetes replaces $(NAME)
        ],
        "env": [{"name": RESTART, "valueFrom": restart}, *_env(variables)],
    }
    pod: dict[str, Any] = {"terminationGracePeriodSeconds": 1 if job.elastic else 120, "containers": [container]}
    if group.kind:
        pod["nodeSelector"] = {"nvidia.com/gpu.product": group.kind}
    if group.gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": 1}}
    if claim:
        container["volumeMounts"] = [{"name": "kept", "mountPath": path}]
        pod["volumes"] = [{"name": "kept", "persistentVolumeClaim": {"claimName": claim}}]
    return pod


def _env(variables: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "value": value} for name, value in variables.items()]
