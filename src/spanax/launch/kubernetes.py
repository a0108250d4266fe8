"""Writes a JobSet for `spanax launch kubernetes` and submits it with kubectl.

Each host is a pod with one process of the run, under its own supervisor; the JobSet restarts all of them if one fails.
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

from spanax.errors import PREEMPTED, FormatError, LaunchError, NotInstalledError, RangeError
from spanax.launch.exit_codes import FINAL
from spanax.launch.request import Request, count, request_of
from spanax.printable import printable_lines, to_stdout

PORT = 8476
"""Port of the coordinator in the pod of the first host."""

GRACE_SECONDS = 120

RESOURCES = {"gpu": "nvidia.com/gpu", "tpu": "google.com/tpu", "cpu": "cpu"}


@dataclass(frozen=True)
class KubernetesCommand:
    """Write a JobSet for the command after `--`, and create it with kubectl.

    Attributes:
      image: container image with spanax and the model.
      claim: PersistentVolumeClaim shared by all hosts (ReadWriteMany); it contains the run folder.
      mount: mount path of the claim in the containers.
      hosts: number of pods; each runs one process.
      devices_per_host: chips of each pod, or simulated devices with --device cpu.
      device: gpu (nvidia.com/gpu), tpu (google.com/tpu), or cpu to simulate devices.
      node_selector: label that nodes must have, as key=value; repeatable.
      restarts: maximum number of restarts; preemptions do not count.
      namespace: Kubernetes namespace.
      name: name of the JobSet; by default that of the folder.
      logs: folder for the logs, heartbeats and events of a program, on the claim; by default launched-DATE in `mount`.
      python: interpreter in the image.
      dry_run: print the manifest without creating anything.
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
    logs: str | None = None
    python: str = "python"
    dry_run: bool = False


def manifest(command: KubernetesCommand, request: Request) -> dict[str, Any]:
    """Returns the JobSet.

    Raises:
      SpanaxError: a value is invalid for Kubernetes, or the run folder is not on the shared volume.
    """
    hosts, name = count("hosts", command.hosts), _name(command, request)
    if not PurePosixPath(os.path.normpath(request.folder)).is_relative_to(command.mount):
        kind, flag = ("folder of the logs", "--logs") if request.is_program else ("run folder", "--output-dir")
        raise LaunchError(
            f"the {kind} '{request.folder}' is not on the volume that the hosts share.",
            where=f"claim {command.claim}, mounted on {command.mount}",
            fix=f"{flag} {PurePosixPath(command.mount) / request.folder.name}",
        )
    if command.restarts < 0:
        raise RangeError(f"--restarts is {command.restarts}; expected an integer >= 0.", fix="--restarts 0")
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
                    # Only the message of a failed Job names the rule that matched.
                    _rule("hopeless", "FailJobSet") | {"onJobFailureMessagePatterns": ["rule at index 0$"]},
                    _rule("preempted", "RestartJobSetAndIgnoreMaxRestarts"),
                ],
            },
            "replicatedJobs": [{"name": "workers", "replicas": 1, "template": {"spec": job}}],
        },
    }


def launch(command: KubernetesCommand, argv: Sequence[str]) -> int:
    """Creates the JobSet, or prints it; returns the exit code.

    Raises:
      SpanaxError: kubectl is not installed, or rejects the manifest.
    """
    import yaml

    request = request_of(argv, command.logs, parent=command.mount, is_here=False)
    text = yaml.safe_dump(manifest(command, request), sort_keys=False)
    if command.dry_run:
        to_stdout(text)
        return 0
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise NotInstalledError(
            "kubectl is not installed on this machine.",
            fix="use --dry-run to print the manifest, and kubectl create -f - where it is installed",
        )
    # Not `apply`: a finished JobSet of this name would stay unchanged, and nothing would run.
    process = subprocess.run([kubectl, "create", "-f", "-"], input=text, capture_output=True, text=True)
    if process.returncode:
        reason = next(iter(process.stderr.strip().splitlines()), f"exit code {process.returncode}")
        raise LaunchError("kubectl did not create the JobSet.", where=reason, fix="--dry-run shows the manifest")
    print(printable_lines(process.stdout.strip()))
    return 0


def _pod(command: KubernetesCommand, request: Request, name: str, hosts: int) -> dict[str, Any]:
    devices = count("devices-per-host", command.devices_per_host)
    shared, memory = {"name": "runs"}, {"name": "memory"}
    container = {
        "name": "worker",
        "image": command.image,
        # If one host fails all must restart, which the JobSet does; the supervisor in a pod restarts nothing.
        "command": [command.python, "-P", "-m", "spanax", "launch", "workers", "--restarts", "0"]
        + [*request.flags, "--", *request.argv(is_again=False)],
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
            # The default /dev/shm of a container has 64 MiB, too little for data workers and NCCL.
            memory | {"emptyDir": {"medium": "Memory"}},
        ],
    }
    return {key: value for key, value in pod.items() if value != {}}


def _environment(command: KubernetesCommand, name: str, hosts: int) -> list[dict[str, Any]]:
    values: dict[str, str] = {}
    if hosts > 1:
        values = {"SPANAX_COORDINATOR": f"{name}-workers-0-0.{name}:{PORT}", "SPANAX_NUM_HOSTS": str(hosts)}
    fields = {
        "SPANAX_HOST": "metadata.annotations['batch.kubernetes.io/job-completion-index']",
        "SPANAX_ATTEMPT": "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']",
    }
    if command.device == "cpu":
        values |= {"JAX_PLATFORMS": "cpu", "SPANAX_HOST_DEVICES": str(command.devices_per_host)}
    return [{"name": key, "value": value} for key, value in values.items()] + [
        {"name": key, "valueFrom": {"fieldRef": {"fieldPath": path}}} for key, path in fields.items()
    ]


def _exits(*codes: int) -> dict[str, Any]:
    return {"containerName": "worker", "operator": "In", "values": list(codes)}


def _rule(name: str, action: str) -> dict[str, Any]:
    return {"name": name, "action": action, "onJobFailureReasons": ["PodFailurePolicy"]}


def _name(command: KubernetesCommand, request: Request) -> str:
    name = command.name or request.name
    # A pod's name has at most 63 characters, including its job, its index and a suffix.
    max_length = 63 - len(f"-workers-0-{command.hosts - 1}-abcde")
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) or len(name) > max_length:
        raise FormatError(
            f"'{name}' is not a valid name of a JobSet.",
            fix=f"--name with at most {max_length} lowercase letters, digits and dashes, starting with a letter",
        )
    return name


def _pair(label: str) -> tuple[str, str]:
    key, is_pair, value = label.partition("=")
    if not is_pair or not key:
        raise FormatError(f"--node-selector is '{label}'.", fix="--node-selector key=value")
    return key, value
