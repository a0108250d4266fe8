"""The levels that need no extra: 0, 1 and 2, and what every level refuses."""

import dataclasses
import functools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import programs
import spanax
from sampling import sampled
from spanax.check import check as checking
from spanax.check.compilers import target
from spanax.check.compilers.abstract_mesh import is_available
from spanax.check.compilers.compile import compile_for
from spanax.check.compilers.lowered_step import lower
from spanax.check.compilers.target import install_command, other_compiler, simulated_target, target_of
from spanax.check.report import Report
from spanax.errors import CompilerError, DataError, SpanaxError
from spanax.plan.cost.memory.tiles import padded_bytes


class Depthwise(nnx.Module):
    """A grouped convolution, which runs shard by shard on a mesh with more axes than the batch's."""

    def __init__(self, rngs: nnx.Rngs):
        self.stem = nnx.Conv(8, 64, (3, 3), rngs=rngs)
        self.depthwise = nnx.Conv(64, 64, (3, 3), feature_group_count=64, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.depthwise(jax.nn.relu(self.stem(x)))


MACHINE = spanax.cluster("cpu:8")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPANAX_CACHE_DIR", str(tmp_path / "cache"))


def planned(layout: str, mesh: str) -> tuple[spanax.Program, spanax.Plan]:
    program = programs.zoo_program("gpt")
    return program, spanax.plan(program, MACHINE, layout=layout, mesh=mesh)


@functools.cache
def report(layout: str, mesh: str, level: int) -> Report:
    return spanax.check(*planned(layout, mesh), MACHINE, level=level, cache=False)


@pytest.mark.parametrize(("batch", "is_exchanged"), [(8, True), (512, False)])
def test_activations_move_where_they_are_smaller(batch: int, is_exchanged: bool) -> None:
    program = spanax.trace(
        build=lambda rngs: nnx.Linear(64, 32, use_bias=False, rngs=rngs), optimizer=optax.sgd(0.1),
        batch=jax.ShapeDtypeStruct((batch, 64), "float32"), loss=lambda model, x: jax.nn.softmax(model(x))[:, 0].mean(),
    )  # fmt: skip
    machine = spanax.cluster("cpu:4")
    result = spanax.check(program, spanax.plan(program, machine, layout="fsdp"), machine, level=1)
    kinds, predicted = ({**each.collectives["fsdp"], "all-reduce": 0} for each in (result.compiled, result.predicted))
    assert kinds == predicted  # but for the sums of the loss and the metrics
    assert (kinds["all-gather"] < 4 * 64 * 32) is is_exchanged and ("all-to-all" in kinds) is is_exchanged


LAYOUTS = [("data", "data=8"), ("fsdp", "fsdp=8"), ("fsdp+tensor", "fsdp=4,model=2")]


@pytest.mark.parametrize("layout, mesh", sampled(LAYOUTS, LAYOUTS[2:]))
def test_the_partitioner_agrees_with_the_plan(layout: str, mesh: str) -> None:
    run_report = report(layout, mesh, 2)
    assert run_report.errors["state_bytes"] == 0 and run_report.errors["flops"] == pytest.approx(0, abs=0.02)
    for axes, error in run_report.errors["collectives"].items():
        small = sum(run_report.compiled.collectives[axes].values()) < 4096
        assert small or error == pytest.approx(0, abs=0.05), (axes, run_report.compiled.collectives)
    assert run_report.compiled.peak_bytes is None, "a CPU's temporaries are no chip's memory"


@pytest.mark.slow
@pytest.mark.skipif(not is_available(), reason="this jaxlib does not provide the partitioner's passes")
def test_the_passes_read_the_collectives_of_a_shard_map() -> None:
    """On more devices than level 2 simulates, too."""
    program = spanax.trace(
        build=Depthwise, optimizer=optax.sgd(0.1), batch=jax.ShapeDtypeStruct((1024, 8, 8, 8), "float32"),
        loss=lambda model, x: jnp.square(model(x)).mean(),
    )  # fmt: skip
    plan = spanax.plan(program, MACHINE, mesh="data=4,model=2")
    first, second = (spanax.check(program, plan, MACHINE, level=level, cache=False).compiled for level in (1, 2))
    assert first is not None and second is not None
    sizes = [figures.collectives["data"]["all-reduce"] for figures in (first, second)]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.01) and sizes[0] > 4 * 9 * 64 / 2
    many = spanax.cluster("h100:256x8")
    large = spanax.check(program, spanax.plan(program, many, mesh="data=1024,model=2"), many, level=1, cache=False)
    assert large.compiled is not None  # an H100 computes in bfloat16
    assert large.compiled.collectives["data"]["all-reduce"] == sizes[0] // 2


@pytest.mark.skipif(not is_available(), reason="this jaxlib does not provide the partitioner's passes")
@pytest.mark.parametrize("layout, mesh", sampled(LAYOUTS, LAYOUTS[2:]))
def test_the_partitioner_passes_report_the_same_axes(layout: str, mesh: str) -> None:
    passes, simulated_devices = report(layout, mesh, 1), report(layout, mesh, 2)
    for axes, kinds in simulated_devices.compiled.collectives.items():
        if sum(kinds.values()) > 4096:
            assert sum(passes.compiled.collectives[axes].values()) == pytest.approx(sum(kinds.values()), rel=0.35)
    assert all(collective.is_counted for collective in passes.collectives)
    assert {collective.runs for collective in passes.collectives} > {1}, "loops are multiplied out"


@pytest.mark.skipif(not is_available(), reason="this jaxlib does not provide the partitioner's passes")
def test_the_passes_name_the_parameters_of_unsharded_results() -> None:
    gathers = [move for move in report("fsdp", "fsdp=8", 1).collectives if move.kind == "all-gather"]
    unsharded = [move for move in gathers if "shards" not in move.shapes]
    assert {path for move in unsharded for path in move.tensors} >= {"blocks.up.kernel", "blocks.down.kernel"}


def test_a_mesh_of_any_size_needs_no_device() -> None:
    machine = spanax.cluster("v5p:16x16x16")
    program = programs.workload("gpt-nano", batch_size=1024)
    plan = spanax.plan(program, machine, layout="fsdp+tensor", mesh="data=64,fsdp=16,model=4")
    report = spanax.check(program, plan, machine, level=1)
    assert report.compiled.collectives and report.target == "v5p:16x16x16"
    with pytest.raises(SpanaxError, match="at most 1024 devices"):
        spanax.check(program, plan, machine, level=2)


def test_level_0_needs_only_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "lower", lambda *_: pytest.fail("level 0 lowers nothing"))
    program, plan = planned("fsdp", "fsdp=8")
    report = spanax.check(program, plan, MACHINE, level=0)
    assert report.compiled.state_bytes == plan.state_bytes() and report.compiled.collectives is None


@pytest.mark.parametrize(
    "shape, num_bytes",
    [
        ((12, 48), 8192),
        ((12, 12, 64, 48), 3538944),
        ((12, 3, 12, 4), 73728),
        ((12, 48, 3, 12, 64), 10616832),
        ((12, 192, 768), 7077888),
        ((12, 768, 192), 7077888),
        ((50257, 48), 9658368),
        ((48,), 512),
        ((2, 1024), 8192),
        ((), 512),
    ],
)
def test_padding_is_that_of_the_arguments_of_a_program_for_v5e(shape: tuple[int, ...], num_bytes: int) -> None:
    """GPT-2 stored over 16 chips, as libtpu 0.0.51 lays its arguments out."""
    assert padded_bytes(shape, 4, "tpu") == num_bytes


def test_gathers_name_the_users_line_and_the_tensor() -> None:
    result = report("fsdp", "fsdp=8", 2).collectives
    gathers = [item for item in result if item.kind == "all-gather" and item.runs > 1]
    assert gathers and all("models/gpt.py:" in gather.source for gather in gathers)
    assert {path for gather in gathers for path in gather.tensors} >= {"blocks.up.kernel", "blocks.down.kernel"}


def test_a_certificate_reads_back_equal(tmp_path: Path) -> None:
    run_report = report("fsdp", "fsdp=8", 2)
    run_report.save(tmp_path / "c.json")
    assert Report.from_json((tmp_path / "c.json").read_text()) == run_report
    written = json.loads((tmp_path / "c.json").read_text())
    assert len(written["program_hash"]) == 64 and written["versions"]["jax"] == jax.__version__
    with pytest.raises(DataError, match="not a certificate"):
        Report.from_json("{}")


def test_a_report_is_cached_by_its_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    program, plan = planned("data", "data=8")
    first = spanax.check(program, plan, MACHINE, level=2)
    assert not first.is_kept
    monkeypatch.setattr(checking, "compile_for", lambda *_, **__: pytest.fail("the report is cached"))
    assert spanax.check(program, plan, MACHINE, level=2) == dataclasses.replace(first, is_kept=True)
    other, another = planned("fsdp", "fsdp=8")
    for changed in ({"flags": {"a": "b"}}, {"codegen": True}, {"inputs_only": True}, {"cache": False}):
        with pytest.raises(pytest.fail.Exception):
            spanax.check(program, plan, MACHINE, level=2, **changed)
    with pytest.raises(pytest.fail.Exception):
        spanax.check(other, another, MACHINE, level=2)
    with pytest.raises(pytest.fail.Exception):  # a cluster file with less memory
        spanax.check(program, plan, dataclasses.replace(MACHINE, memory_bytes=1 << 20), level=2)
    monkeypatch.setattr(checking, "OURS", Path(__file__).parent)
    with pytest.raises(pytest.fail.Exception):  # another source of the same version
        spanax.check(program, plan, MACHINE, level=2)


def test_a_broken_report_in_the_cache_is_ignored(tmp_path: Path) -> None:
    key = checking.key_of(a=1)
    checking.put_cached(key, report("fsdp", "fsdp=8", 2))
    assert checking.find_cached(key) is not None
    next((tmp_path / "cache").rglob(f"{key}.json")).write_text("{")
    assert checking.find_cached(key) is None


def test_the_program_hash_is_that_of_the_program_and_not_of_its_lines() -> None:
    program, plan = planned("fsdp", "fsdp=8")
    first = lower(program, plan, "cpu")
    assert first.digest == lower(program, plan, "cpu").digest
    assert first.digest != lower(*planned("data", "data=8"), "cpu").digest
    assert b"gpt.py" in first.code


def products(text: str) -> list[str]:
    """The types of a program's matmuls, as StableHLO prints them."""
    return re.findall(r"dot_general .* : (.*)$", text, flags=re.MULTILINE)


def test_the_checked_cpu_program_equals_the_executed_program() -> None:
    program, plan = planned("fsdp", "fsdp=8")
    running = spanax.start(program, plan).lower().compiler_ir().operation.get_asm(enable_debug_info=False)
    checked = {on: lower(program, plan, "cpu", devices=on).module.operation.get_asm() for on in ("cpu", "tpu", "gpu")}
    assert products(checked["cpu"]) == products(running)
    # On a CPU a gradient's sum over batch and positions is one over both.
    assert products(checked["tpu"]) == products(checked["gpu"]) != products(running)


def test_requests_that_no_level_answers_are_refused() -> None:
    program, plan = planned("fsdp", "fsdp=8")
    for level in (-1, 4):
        with pytest.raises(SpanaxError, match=f"unknown level {level}"):
            spanax.check(program, plan, MACHINE, level=level)
    with pytest.raises(SpanaxError, match="made for another program"):
        spanax.check(programs.zoo_program("mlp"), plan, MACHINE, level=0)
    with pytest.raises(SpanaxError, match="plan is for 8 devices"):
        spanax.check(program, plan, spanax.cluster("cpu:4"), level=0)
    with pytest.raises(SpanaxError, match="no known compiler targets"):
        target_of(spanax.cluster("mi300x:8"))


@pytest.mark.parametrize(
    "on, line", [("v5e:2x4", "pip install 'spanax[tpu]'"), ("h100:8", "pip install 'spanax[cuda12]'")]
)
def test_a_missing_compiler_names_the_package_to_install(on: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    program, machine = programs.zoo_program("gpt"), spanax.cluster(on)
    plan = spanax.plan(program, machine, layout="fsdp")
    with pytest.raises(SpanaxError) as error:
        spanax.check(program, plan, machine, level=3)
    assert line in str(error.value) and checking.highest_level(machine) == 2


def test_a_plugin_of_another_version_is_reported_with_the_right_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: True)
    monkeypatch.setattr(target, "cuda_folder", lambda: "/cuda")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.12.0" if name == "jaxlib" else "0.11.0")
    assert install_command("cuda") == "pip install jax-cuda12-plugin==0.12.0 jax-cuda12-pjrt==0.12.0"


@pytest.mark.parametrize(
    ("on", "note"),
    [("v5e:2x4", ""), ("h100:8", "note: jax-cuda12-plugin is 0.0.52; estimates were measured with 0.10.2")],
)
def test_another_compiler_than_that_of_the_estimates_is_noted(
    on: str, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.0.52")
    assert other_compiler(spanax.cluster(on)) == note


def folder_of(error: CompilerError) -> Path:
    [line] = [line for line in str(error).splitlines() if "compiler log:" in line]
    return Path(line.split("compiler log: ")[1]).parent


def test_a_compiler_over_the_time_limit_leaves_its_log() -> None:
    program, plan = planned("fsdp", "fsdp=8")
    with pytest.raises(CompilerError, match=r"exceeded the time limit of 0\.05 s") as error:
        compile_for(simulated_target(8), lower(program, plan, "cpu"), plan.mesh, timeout=0.05)
    assert error.value.exit_code == 70 and (folder_of(error.value) / "log.txt").exists()


def test_a_compiler_that_crashes_leaves_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    program, plan = planned("fsdp", "fsdp=8")
    broken = dataclasses.replace(lower(program, plan, "cpu"), code=b"no program at all")
    with pytest.raises(CompilerError, match="crashed") as error:
        compile_for(simulated_target(8), broken, plan.mesh)
    assert "Traceback" in (folder_of(error.value) / "log.txt").read_text()


def test_an_unknown_compiler_flag_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    program, plan = planned("fsdp", "fsdp=8")
    with pytest.raises(CompilerError, match="xla_no_such_flag"):
        compile_for(simulated_target(8), lower(program, plan, "cpu"), plan.mesh, flags={"xla_no_such_flag": "1"})


def test_wraparound_and_cores_are_those_of_the_topology_table() -> None:
    assert target_of(spanax.cluster("v5p:4x4x8")).options["wrap"] == (True, True, True)
    assert target_of(spanax.cluster("v5p:2x2x4")).options["wrap"] == (False, False, False)
    assert target_of(spanax.cluster("v6e:16x16")).options["wrap"] == (True, True, False)
    assert target_of(spanax.cluster("v4:2x2x2")).options["chip_config_name"] == "megacore"
    assert target_of(spanax.cluster("v5e:4x4:2")).options["num_slices"] == 2
    assert install_command("cpu") == ""
