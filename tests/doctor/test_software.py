"""Versions and settings that the doctor must object to."""

from email.message import Message
from types import SimpleNamespace

import pytest

from spanax.doctor import software
from spanax.doctor.software import Installed, installed_packages

NEEDS = {
    "spanax": ["jax<0.13,>=0.10.2", "flax>=0.12.8", 'libtpu>=0.0.51; extra == "tpu"'],
    "jax": ["jaxlib<=0.10.2,>=0.10.1", 'jaxlib==0.10.1; extra == "ci"'],
    "flax": ["jax>=0.10.0"],
}
GOOD = {"spanax": "0.1.0.dev0", "jax": "0.10.2", "jaxlib": "0.10.2", "flax": "0.12.8"}


def shelf(**changes: str | None) -> Installed:
    versions = {name.replace("_", "-"): version for name, version in (GOOD | changes).items() if version is not None}
    metadata = Message()
    metadata["Requires-Python"] = ">=3.11"
    return {
        name: SimpleNamespace(version=version, requires=NEEDS.get(name), metadata=metadata)  # type: ignore[misc]
        for name, version in versions.items()
    }


def test_this_environment_passes() -> None:
    installed = installed_packages()
    result = [software.python(installed), software.packages(installed), software.plugins(installed)]
    assert [item.state for item in result] == ["ok"] * 3, result
    assert "jax 0.1" in result[1].what


def test_matching_packages_pass() -> None:
    assert software.packages(shelf()).state == software.plugins(shelf()).state == "ok"
    assert software.packages(shelf(jaxlib="0.10.2.dev3")).state == "ok"
    assert software.python(shelf(), "3.15.0rc1").state == "ok"


@pytest.mark.parametrize(
    ("changes", "what", "fix"),
    [
        (
            {"jax": "0.9.1"},
            "spanax needs jax<0.13,>=0.10.2, but 0.9.1 is installed.",
            "pip install 'jax<0.13,>=0.10.2'",
        ),
        ({"jax": "0.13.0.dev1"}, "but 0.13.0.dev1 is installed", "jax<0.13"),
        (
            {"jaxlib": "0.10.0"},
            "jax needs jaxlib<=0.10.2,>=0.10.1, but 0.10.0 is installed.",
            "'jaxlib<=0.10.2,>=0.10.1'",
        ),
        ({"flax": None}, "spanax needs flax>=0.12.8, but none is installed.", "pip install 'flax>=0.12.8'"),
    ],
)
def test_versions_that_do_not_go_together(changes: dict[str, str | None], what: str, fix: str) -> None:
    verdicts = software.packages(shelf(**changes))
    assert verdicts.state == "problem" and what in verdicts.what and fix in verdicts.fix, verdicts


def test_a_spanax_that_is_not_installed() -> None:
    verdicts = software.packages(shelf(spanax=None))
    assert verdicts.state == "warning" and verdicts.fix == "pip install spanax"


def test_an_old_python() -> None:
    verdict = software.python(shelf(), "3.10.14")
    assert verdict.state == "problem" and "3.10.14" in verdict.what and ">=3.11" in verdict.where


def test_a_plugin_of_another_jaxlib() -> None:
    good = software.plugins(shelf(jax_cuda12_plugin="0.10.2", jax_cuda12_pjrt="0.10.2", libtpu="0.0.51"))
    assert good.state == "ok" and "libtpu 0.0.51" in good.what
    verdict = software.plugins(shelf(jax_cuda12_plugin="0.10.2", jax_cuda12_pjrt="0.9.0"))
    assert verdict.state == "problem" and "jax-cuda12-pjrt 0.9.0 is incompatible with jaxlib 0.10.2" in verdict.what
    assert verdict.fix == "pip install jax-cuda12-pjrt==0.10.2 jax-cuda12-plugin==0.10.2"


@pytest.mark.parametrize(
    ("environ", "what"),
    [
        ({"NPROC": "2"}, "NPROC=2: simulated devices may deadlock"),
        ({"NPROC": "many"}, "NPROC=many"),
        ({"XLA_FLAGS": "--xla_a=1 --xla_force_host_platform_device_count=4"}, "JAX rejects"),
        ({"JAX_DEBUG_NANS": "True"}, "JAX_DEBUG_NANS is set"),
        ({"JAX_DISABLE_JIT": "1"}, "nothing is compiled"),
        ({"JAX_ENABLE_X64": "on"}, "twice the memory"),
        ({"https_proxy": "http" + "://proxy:3128"}, "a proxy is set"),
    ],
)
def test_harmful_environment_settings_are_reported(environ: dict[str, str], what: str) -> None:
    verdicts = software.settings(environ, is_group=True)
    assert [item.state for item in verdicts] == ["warning"] and what in verdicts[0].what and verdicts[0].fix


def test_invalid_settings_raise() -> None:
    verdicts = software.settings({"NPROC": "32", "JAX_ENABLE_X64": "0", "HTTPS_PROXY": "proxy"}, is_group=False)
    assert [item.state for item in verdicts] == ["ok"] and "NPROC=32" in verdicts[0].what
    assert software.settings({}, is_group=True)[0].what == "nothing is set"
