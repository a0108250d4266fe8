"""Rules: applied by Flax itself, they give every PartitionSpec of the plan."""

import json
from functools import cache

import pytest
from flax.linen import logical_to_mesh_axes

import spanax
from spanax.interop import export_rules
from spanax.models.workloads import load

CASES = [
    ("gpt-nano", "data", "data=8"),
    ("gpt-nano", "fsdp", "fsdp=8"),
    ("gpt-nano", "fsdp+tensor", "fsdp=4,model=2"),
    ("llama-nano", "hsdp", "data=2,fsdp=4"),
    ("moe-nano", "expert", "data=2,expert=4"),
    pytest.param("vit-nano", "fsdp+tensor", "fsdp=2,model=4", marks=pytest.mark.slow),
    pytest.param("resnet-nano", "fsdp", "fsdp=8", marks=pytest.mark.slow),
]


@cache
def program(name: str) -> spanax.Program:
    return load(name).trace(learning_rate=0.1, num_steps=1)


@pytest.mark.parametrize("name, layout, mesh", CASES)
def test_flax_gets_the_specs_of_the_plan(name: str, layout: str, mesh: str) -> None:
    plan = spanax.plan(program(name), spanax.cluster("cpu:8"), layout=layout, mesh=mesh)
    result = export_rules(plan)
    expected = [leaf for leaf in (*plan.leaves, *plan.batch) if leaf.kind in ("param", "batch")]
    assert set(result.names) == {leaf.path for leaf in expected}
    assert len({name for name, _ in result.rules}) == len(result.rules), "a name with two rules"
    data = json.loads(json.dumps(result.to_json()))
    rules = [(name, axes if axes is None else tuple(axes)) for name, axes in data["rules"]]
    for leaf in expected:
        spec = tuple(logical_to_mesh_axes(tuple(data["names"][leaf.path]), rules))
        by_dim = [() if axes is None else (axes,) if isinstance(axes, str) else tuple(axes) for axes in spec]
        by_dim += [()] * (len(leaf.shape) - len(by_dim))
        assert tuple(by_dim) == leaf.spec, leaf.path
    assert any(leaf.spec != ((),) * len(leaf.shape) for leaf in expected), "nothing is split: nothing was compared"


def test_an_axis_with_two_shardings_has_two_names() -> None:
    plan = spanax.plan(program("gpt-nano"), spanax.cluster("cpu:8"), layout="fsdp+tensor", mesh="fsdp=4,model=2")
    result = export_rules(plan)
    rules = dict(result.rules)
    assert rules["mlp"] == ("model",) and result.names["blocks.up.kernel"][-1] == "mlp"
    odd = result.names["blocks.up.bias"][-1]
    assert odd != "mlp" and rules[odd] == plan["blocks.up.bias"].spec[-1]
    assert f'["{odd}", {json.dumps(list(rules[odd]))}],' in str(result)
