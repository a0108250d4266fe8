"""The recipes of docs/hosts.md for Kubernetes and Ray, as far as they run without a cluster."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import yaml

from spanax.commands import launch as launching
from spanax.errors import PREEMPTED
from spanax.launch.exit_codes import FINAL
from spanax.processes.processes import Hosts
from written import blocks

BLOCKS = {block.info: block.text for block in blocks((Path(__file__).parents[2] / "docs" / "hosts.md").read_text())}


def launched(words: list[str]) -> list[str]:
    """The words after `--` of a command line of `spanax launch`, which is parsed."""
    command = launching.parse(words[words.index("launch") + 1 :])
    assert command.flags.limits.restarts == 0
    return list(command.argv)


def schema_fields(kind: str, data: dict[str, Any]) -> dict[str, Any]:
    """What the types that are generated from the published schema keep of an object."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api")
    return getattr(models, f"TrainerV1alpha1{kind}").from_dict(data).to_dict()


def test_the_objects_of_kubeflow_are_as_published() -> None:
    runtime, job = yaml.safe_load_all(BLOCKS["yaml"])
    assert schema_fields("TrainingRuntime", runtime) == runtime and schema_fields("TrainJob", job) == job
    trainer = job["spec"]["trainer"]
    trainer["numNode"] = trainer.pop("numNodes")
    assert schema_fields("TrainJob", job) != job, "a misspelled field is not detected"


def test_the_objects_of_kubeflow_agree_with_each_other_and_with_spanax() -> None:
    runtime, job = yaml.safe_load_all(BLOCKS["yaml"])
    name, trainer = job["metadata"]["name"], job["spec"]["trainer"]
    (pods,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    (container,) = pods["template"]["spec"]["template"]["spec"]["containers"]
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert launched(trainer["command"])[0] == "train"
    environment = {entry["name"]: entry.get("value", "1") for entry in trainer["env"]}
    group = Hosts.of(environment)
    assert group.coordinator == f"{name}-{pods['name']}-0-0.{name}:8476"
    assert (group.num_hosts, group.rank, group.attempt) == (trainer["numNodes"], 1, 1)
    rules = [rule.get("onExitCodes") for rule in pods["template"]["spec"]["podFailurePolicy"]["rules"]]
    assert [rule and rule["values"] for rule in rules] == [sorted(FINAL), [PREEMPTED], None]
    assert {rule["containerName"] for rule in rules if rule} == {container["name"]}
    hopeless, _ = runtime["spec"]["template"]["spec"]["failurePolicy"]["rules"]
    assert hopeless["onJobFailureMessagePatterns"] == ["rule at index 0$"] and hopeless["action"] == "FailJobSet"


def test_the_function_for_ray_starts_a_process_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    place = SimpleNamespace(get_world_size=lambda: 4, get_world_rank=lambda: 2)
    names = {
        "ray": {"util": SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")},
        "ray.train": {name: MagicMock() for name in ("FailureConfig", "RunConfig", "ScalingConfig")},
        "ray.train.collective": {"broadcast_from_rank_zero": lambda value: value},
        "ray.train.v2.jax": {"JaxTrainer": lambda function, **configs: SimpleNamespace(fit=function)},
    }
    names["ray.train"]["get_context"] = lambda: place
    for name, values in names.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    started: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(subprocess, "run", lambda words, env, check: started.append((words, env)))
    exec(BLOCKS["py"], {})
    ((words, environment),) = started
    group = Hosts.of(environment)
    assert (group.num_hosts, group.rank) == (4, 2) and group.coordinator.startswith("127.0.0.1:")
    assert launched(words)[-1] == "--resume" and environment["PATH"] == os.environ["PATH"]
