"""Kubernetes: `spanax launch kubernetes` writes a JobSet and hands it to kubectl.

One pod a host, one process of the run in each, under a supervisor of its own; the JobSet starts all of them again
when one is lost.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Literal

from tyro.conf import UseAppendAction

from spanax.errors import PREEMPTED, SpanaxError
from spanax.launch.exit_codes import FINAL
from spanax.launch.request import TrainRequest, count
from spanax.printable import printable_lines, to_stdout

PORT = 8476
"""The coordinator's, in the pod of the first host."""

GRACE_SECONDS = 120

RESOURCES = {"gpu": "nvidia.com/gpu", "tpu": "google.com/tpu", "cpu": "cpu"}


@dataclass(frozen=True)
class KubernetesCommand:
    """Write a JobSet for the command behind `--`, and create it with kubectl.

    Attributes:
      image: the container image; it has spanax and the model in it.
      claim: the PersistentVolumeClaim that all hosts share (ReadWriteMany); the run folder lies on it.
      mount: where the claim is seen in the containers.
      hosts: pods; one process runs in each.
      devices_per_host: chips of each pod, or simulated devices with --device cpu.
      device: gpu (nvidia.com/gpu), tpu (google.com/tpu), or cpu to simulate devices.
      node_selector: a label that the nodes must have, as key=value; repeatable.
      restarts: how often to start again; preemptions are not counted.
      namespace: as kubectl takes it.
      name: the JobSet's name; by default that of the run folder.
      python: the interpreter in the image.
      dry_run: print the manifest, and create nothing.
    """

    image: str
    claim: str
    mount: str = "/runs"
    hosts: int = 1
    devices_per_host: int = 8
    device: Literal["gpu", "tpu", "cpu"] = "gpu"
    node_selector: UseAppendAction[tuple[str, ...]] = ()
    restarts: int = 10
    namespace: str | None = None
    name: str | None = None
    python: str = "python"
    dry_run: bool = False


def manifest(command: KubernetesCommand, request: TrainRequest) -> dict[str, Any]:
    """The JobSet.

    Raises:
      SpanaxError: a value that Kubernetes cannot take, or a run folder that the hosts would not share.
    """
    hosts, name = count("hosts", command.hosts), _name(command, request)
    if not PurePosixPath(os.path.normpath(request.folder)).is_relative_to(command.mount):
        raise SpanaxError(
            f"the run folder '{request.folder}' is not on the volume that the hosts share.",
            where=f"claim {command.claim}, mounted on {command.mount}",
            fix=f"--out {PurePosixPath(command.mount) / request.folder.name}",
        )
    if command.restarts < 0:
        raise SpanaxError(f"--restarts is {command.restarts}; it takes a number from 0.", fix="--restarts 0")
    job = {
        "parallelism": hosts,
        "completions": hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": _exits(*FINAL)},
                {"action": "FailJob", "onExitCodes": _exits(PREEMPTED)},
                {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": {"spec": _pod(command, request, name, hosts)},
    }
    metadata = {"name": name, "namespace": command.namespace}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {key: value for key, value in metadata.items() if value is not None},
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": name},
            "failurePolicy": {
                "maxRestarts": command.restarts,
                "rules": [
                    # Which of its own rules failed a Job is told in its message alone.
                    _rule("hopeless", "FailJobSet") | {"onJobFailureMessagePatterns": ["rule at index 0$"]},
                    _rule("preempted", "RestartJobSetAndIgnoreMaxRestarts"),
                ],
            },
            "replicatedJobs": [{"name": "workers", "replicas": 1, "template": {"spec": job}}],
        },
    }


def launch(command: KubernetesCommand, argv: Sequence[str]) -> int:
    """Create the JobSet, or print it; the exit code.

    Raises:
      SpanaxError: there is no kubectl here, or it refuses the manifest.
    """
    import yaml

    text = yaml.safe_dump(manifest(command, TrainRequest.of(argv)), sort_keys=False)
    if command.dry_run:
        to_stdout(text)
        return 0
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise SpanaxError(
            "there is no kubectl on this machine.",
            fix="--dry-run to see the manifest, and kubectl create -f - where it is",
        )
    # Not `apply`: a JobSet of this name that has ended would stay as it is, and nothing would run.
    done = subprocess.run([kubectl, "create", "-f", "-"], input=text, capture_output=True, text=True)
    if done.returncode:
        refused = next(iter(done.stderr.strip().splitlines()), f"exit code {done.returncode}")
        raise SpanaxError("kubectl did not create the JobSet.", where=refused, fix="--dry-run shows the manifest")
    print(printable_lines(done.stdout.strip()))
    return 0


def _pod(command: KubernetesCommand, request: TrainRequest, name: str, hosts: int) -> dict[str, Any]:
    devices = count("devices-per-host", command.devices_per_host)
    shared, memory = {"name": "runs"}, {"name": "memory"}
    container = {
        "name": "worker",
        "image": command.image,
        # Whoever loses a host must start all of them again, so a supervisor in one pod restarts nothing.
        "command": [command.python, "-P", "-m", "spanax", "launch", "workers", "--restarts", "0", "--"]
        + request.argv(is_again=False),
        "env": _environment(command, name, hosts),
        "resources": {"limits": {RESOURCES[command.device]: devices}},
        "volumeMounts": [shared | {"mountPath": command.mount}, memory | {"mountPath": "/dev/shm"}],
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "automountServiceAccountToken": False,
        "nodeSelector": dict(_pair(label) for label in command.node_selector),
        "containers": [container],
        "volumes": [
            shared | {"persistentVolumeClaim": {"claimName": command.claim}},
            # A container's own /dev/shm has 64 MiB, too few for data workers and NCCL.
            memory | {"emptyDir": {"medium": "Memory"}},
        ],
    }
    return {key: value for key, value in pod.items() if value != {}}


def _environment(command: KubernetesCommand, name: str, hosts: int) -> list[dict[str, Any]]:
    said: dict[str, str] = {}
    if hosts > 1:
        said = {"SPANAX_COORDINATOR": f"{name}-workers-0-0.{name}:{PORT}", "SPANAX_NUM_HOSTS": str(hosts)}
    fields = {
        "SPANAX_HOST": "metadata.annotations['batch.kubernetes.io/job-completion-index']",
        "SPANAX_ATTEMPT": "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']",
    }
    if command.device == "cpu":
        said |= {"JAX_PLATFORMS": "cpu", "SPANAX_HOST_DEVICES": str(command.devices_per_host)}
    return [{"name": key, "value": value} for key, value in said.items()] + [
        {"name": key, "valueFrom": {"fieldRef": {"fieldPath": path}}} for key, path in fields.items()
    ]


def _exits(*codes: int) -> dict[str, Any]:
    return {"containerName": "worker", "operator": "In", "values": list(codes)}


def _rule(name: str, action: str) -> dict[str, Any]:
    return {"name": name, "action": action, "onJobFailureReasons": ["PodFailurePolicy"]}


def _name(command: KubernetesCommand, request: TrainRequest) -> str:
    name = command.name or request.name
    # Of the 63 letters of a pod's name its job, its index and a suffix take some.
    most = 63 - len(f"-workers-0-{command.hosts - 1}-abcde")
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) or len(name) > most:
        raise SpanaxError(
            f"'{name}' cannot be the name of a JobSet.",
            fix=f"--name with at most {most} small letters, digits and dashes, a letter first",
        )
    return name


def _pair(label: str) -> tuple[str, str]:
    key, is_pair, value = label.partition("=")
    if not is_pair or not key:
        raise SpanaxError(f"--node-selector is '{label}'.", fix="--node-selector key=value")
    return key, value
