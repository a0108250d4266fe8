"""`spanax inspect` shows the placement of a plan without devices, and of a run as it was saved."""

import json
import xml.etree.ElementTree as xml
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import spanax
from programs import zoo_program
from spanax import cli
from spanax.check.array_placement import array_placement, copies, shards
from spanax.check.compilers.annotated_step import annotated_program
from spanax.errors import DataError, SpanaxError
from spanax.sealed import sealed
from spanax.show.placement import devices_text, drawing_svg, grid

MINE = """
import jax, spanax
from flax import nnx

def mine(batch_size=8, embed_dim=16):
    return spanax.Workload(
        build=lambda rngs: nnx.Linear(embed_dim, 32, rngs=rngs),
        batch=jax.ShapeDtypeStruct((batch_size, embed_dim), "float32"),
        loss=lambda model, x: (model(x) ** 2).mean(),
        source=[],
    )
"""
LAYOUTS = [("fsdp", "fsdp=8"), ("fsdp+tensor", "fsdp=4,model=2"), ("hsdp", "data=2,fsdp=4"), ("data", "data=8")]


def planned(layout: str, mesh: str, name: str = "mlp") -> spanax.Plan:
    cluster = spanax.cluster("cpu", spanax.MeshShape.of(mesh).size)
    return spanax.plan(zoo_program(name), cluster, layout=layout, mesh=mesh)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    spanax.start(zoo_program("mlp"), planned("fsdp+tensor", "fsdp=4,model=2")).save(folder / "checkpoints").wait()
    return folder


@pytest.mark.parametrize(("layout", "mesh"), LAYOUTS)
def test_the_parts_are_those_of_real_arrays(layout: str, mesh: str) -> None:
    """JAX's own map of devices to slices says the same, array by array."""
    plan = planned(layout, mesh)
    devices = plan.mesh.build()
    order = {device: index for index, device in enumerate(devices.devices.flat)}
    for leaf in plan.leaves + plan.batch:
        expected: dict[Any, set[int]] = {}
        for device, index in leaf.sharding(devices).devices_indices_map(leaf.shape).items():
            bounds = [part.indices(size)[:2] for part, size in zip(index, leaf.shape, strict=True)]
            expected.setdefault(tuple(bounds), set()).add(order[device])
        result = {
            tuple(zip(shard.start, shard.stop, strict=True)): set(shard.devices) for shard in shards(leaf, plan.mesh)
        }
        assert result == expected, leaf.path
        assert {len(devices) for devices in expected.values()} == {copies(leaf, plan.mesh)}


def test_a_grid_shows_every_shard_once_or_reports_omissions() -> None:
    for layout, mesh in LAYOUTS:
        plan = planned(layout, mesh)
        for leaf in plan.leaves:
            drawing = grid(leaf, plan.mesh)
            cells = [cell for row in drawing.cells for cell in row]
            assert len(set(map(len, drawing.cells))) == 1
            assert drawing.left_out or len(cells) == len(shards(leaf, plan.mesh))


def test_a_checkpoint_has_the_plan_that_it_was_saved_under(saved: Path) -> None:
    result, plan = array_placement(saved), planned("fsdp+tensor", "fsdp=4,model=2")
    assert result.origin == "checkpoint 0" and result.plan == plan


class Keyed(nnx.Module):
    """Random keys as scalars and, one per layer, as an array."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear, self.dropout = nnx.Linear(8, 8, rngs=rngs), nnx.Dropout(0.2, rngs=rngs)
        self.layers = nnx.vmap(lambda rngs: nnx.Dropout(0.2, rngs=rngs))(rngs.split(4))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.linear(x))


def test_a_run_with_random_keys_is_inspected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = spanax.trace(
        build=Keyed, optimizer=optax.sgd(1e-2), batch=jax.ShapeDtypeStruct((8, 8), "float32"),
        loss=lambda model, x: (model(x) ** 2).mean(),
    )  # fmt: skip
    plan = spanax.plan(program, spanax.cluster("cpu", 8), layout="fsdp")
    assert {leaf.shape for leaf in plan.leaves if leaf.is_key} == {(), (4,)}
    spanax.start(program, plan).save(tmp_path / "checkpoints").wait()
    placement = array_placement(tmp_path)
    assert placement.origin == "checkpoint 0" and placement.plan == plan
    cli.main(["inspect", str(tmp_path)])
    assert "fsdp on 8 devices" in capsys.readouterr().out


def test_the_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned("hsdp", "data=2,fsdp=4")
    plan.save(tmp_path / "plan.json")
    cli.main(["inspect", str(tmp_path / "plan.json"), "--json"])
    data = json.loads(capsys.readouterr().out)
    assert data["bytes_per_device"]["param"] == plan.state_bytes("param") and data["from"] == "plan"
    assert {item["copies"] for item in data["copied"]} == {2}
    cli.main(["inspect", str(tmp_path / "plan.json")])
    out = capsys.readouterr().out
    assert "arrays are replicated" in out and "up.kernel" in out and out.startswith("as in the plan: layout hsdp")


def test_one_array_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned("fsdp+tensor", "fsdp=4,model=2").save(tmp_path / "plan.json")
    args = ["inspect", str(tmp_path / "plan.json"), "--leaf", "mid.kernel"]
    cli.main([*args, "--svg", str(tmp_path / "a.svg")])
    out = capsys.readouterr().out
    assert "down" in out and "across" in out and "one copy of each shard" in out
    assert [line.split()[1::2] for line in out.splitlines() if line.startswith("│")][0] == ["0", "2", "4", "6"]
    svg = (tmp_path / "a.svg").read_text()
    texts = [(part.text or "").split() for part in xml.fromstring(svg).iter() if part.tag.endswith("text")]
    assert {str(device) for device in range(8)} <= {text[0] for text in texts if len(text) == 1} and "@font" not in svg
    cli.main([*args, "--json"])
    assert len(json.loads(capsys.readouterr().out)["leaf"]["shards"]) == 8


def test_a_name_cannot_break_out_of_the_svg() -> None:
    import dataclasses

    leaf = dataclasses.replace(planned("fsdp", "fsdp=8")["up.kernel"], path="<script>")
    for mesh in ("fsdp=8", "data=2,fsdp=8"):
        text = drawing_svg([leaf], spanax.MeshShape.of(mesh), "a & b\x1b<b>").replace("&#160;", " ")
        assert "<script>" not in text and "&lt;script&gt;" in text and "a & b" not in text and "a &amp; b" in text
        assert xml.fromstring(text).tag.endswith("svg")


def test_device_numbers_are_short() -> None:
    assert devices_text(range(8)) == "0-7" and devices_text([3]) == "3" and devices_text([0, 1]) == "0,1"
    assert devices_text([0, 1, 4, 5, 8, 9, 12, 13, 16, 17]) == "0,1,4,5,... (10)"


def test_the_program_names_its_arrays_and_their_shardings() -> None:
    plan = planned("fsdp+tensor", "fsdp=4,model=2")
    text = annotated_program(zoo_program("mlp"), plan, jax.devices())
    assert 'loc("mid.kernel")' in text and "sdy.sharding" in text and "state[" not in text
    assert [line for line in text.splitlines() if line.startswith("// mid.kernel")][0].endswith("stored over fsdp")


def test_the_program_of_a_plan_file_and_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    cli.main(
        ["plan", "mine.py:mine", "--on", "cpu:8", "--global-batch-size", "16", "--layout", "fsdp", "--out", "plan.json"]
    )
    cli.main(["inspect", "plan.json", "--hlo", "a.mlir", "--workload", "mine.py:mine"])
    assert "tensor<16x16xf32>" in Path("a.mlir").read_text()
    Path("run").mkdir()
    Path("run/plan.json").write_text(Path("plan.json").read_text())
    Path("run/config.toml").write_text(
        sealed('workload = "mine.py:mine"\nglobal_batch_size = 16\nsteps = 3\nlr = 0.1\n')
    )
    cli.main(["inspect", "run", "--hlo", "b.mlir"])
    assert "tensor<16x16xf32>" in Path("b.mlir").read_text()


def test_a_path_that_is_neither_raises(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no plan or run"):
        array_placement(tmp_path / "nowhere")
    with pytest.raises(DataError, match="neither plan nor checkpoint"):
        array_placement(tmp_path)
    np.save(tmp_path / "a.npy", np.zeros(3))
    with pytest.raises(DataError, match="cannot read the plan|no plan file"):
        array_placement(tmp_path / "a.npy")
    planned("fsdp", "fsdp=8").save(tmp_path / "plan.json")
    with pytest.raises(SystemExit):
        cli.main(["inspect", str(tmp_path / "plan.json"), "--hlo", str(tmp_path / "x")])
    with pytest.raises(SpanaxError, match="no leaf"):
        array_placement(tmp_path / "plan.json").plan["nothing"]
