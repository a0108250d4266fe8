"""Clusters: by name without a device, or this machine as JAX sees it."""

import jax
import pytest

from spanax.errors import SpanaxError
from spanax.hardware.cluster import Cluster, cluster, local


@pytest.mark.parametrize(("args", "text"), [(("cpu:8",), "cpu:8"), (("cpu", 4), "cpu:4"), (("cpu:8", 2), "cpu:2")])
def test_by_name(args: tuple, text: str) -> None:
    assert str(cluster(*args)) == text


def test_simulated_devices_share_the_memory_of_the_host() -> None:
    one, eight = cluster("cpu:1"), cluster("cpu:8")
    assert one.memory_bytes is not None and eight.memory_bytes == one.memory_bytes // 8


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cpu", "cluster 'cpu' has no number of devices"),
        ("cpu:0", "cluster 'cpu:0' has no number of devices"),
        ("cpu:eight", "cluster 'cpu:eight' has no number of devices"),
        ("cqu:8", "unknown chip 'cqu'"),
    ],
)
def test_refused(name: str, message: str) -> None:
    with pytest.raises(SpanaxError) as caught:
        cluster(name)
    assert str(caught.value).startswith(message) and "fix: " in str(caught.value)


def test_local() -> None:
    try:
        devices = jax.devices()
    except RuntimeError:
        pytest.skip("JAX can start no backend here")
    assert local() == cluster("cpu", len(devices))
    assert local(devices[:2]) == cluster("cpu:2")


def test_a_cluster_is_a_value() -> None:
    assert Cluster("cpu", 8, 2**30) == Cluster("cpu", 8, 2**30) != Cluster("cpu", 8)
