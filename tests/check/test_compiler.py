"""Level 3: the chips' own compilers, without the chips; skipped where they are not installed."""

from pathlib import Path

import pytest

import programs
import spanax
import stored
from sampling import sampled
from spanax.check.compilers.compile import compile_for
from spanax.check.compilers.lowered_step import lower
from spanax.check.compilers.target import TPUS, install_command, target_of
from spanax.check.hlo.collectives import collectives, totals
from spanax.check.hlo.module import read_module
from spanax.check.report import Report
from spanax.plan.evaluate import evaluate
from spanax.plan.plan import Schedule

TPU = pytest.mark.skipif(bool(install_command("tpu")), reason=f"libtpu is not installed: {install_command('tpu')}")
CUDA = pytest.mark.skipif(bool(install_command("cuda")), reason=f"no CUDA plugin: {install_command('cuda')}")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPANAX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("XLA_FLAGS", "")  # libtpu exits at a flag of the tests that it does not know


def check(name: str, on: str, layout: str, mesh: str | None = None, batch_size: int = 64, **asked: object) -> Report:
    program = programs.workload(name, batch_size=batch_size)
    machine = spanax.cluster(on)
    plan = spanax.plan(program, machine, layout=layout, mesh=mesh)
    return spanax.check(program, plan, machine, **asked)  # type: ignore[arg-type]


@TPU
@pytest.mark.parametrize(
    "name, on, layout, mesh",
    [
        ("gpt-nano", "v5e:2x4", "fsdp", None),
        ("llama-nano", "v6e:4x4", "fsdp+tensor", "fsdp=4,model=4"),
        ("moe-nano", "v5p:2x2x2", "expert", "data=4,expert=2"),
        ("vit-nano", "v4:2x2x2", "data", None),
        ("resnet-nano", "v5e:2x4", "fsdp", None),
    ],
)
def test_a_tpus_compiler_agrees_with_the_plan(name: str, on: str, layout: str, mesh: str | None) -> None:
    report = check(name, on, layout, mesh)
    assert report.level == 3 and report.fits and report.fits_by == "the compiler"
    assert report.errors["state_bytes"] == 0, "padding included"
    # The plan counts the full window of a convolution, the program only its part in the image.
    assert report.errors["flops"] == pytest.approx(0, abs=0.1 if name == "resnet-nano" else 0.02)
    assert report.compiled.collectives and all(collective.is_counted for collective in report.collectives)
    assert "TPU" in report.versions["compiler"] and "libtpu" in report.versions


@TPU
def test_a_tpus_compiler_places_offloaded_state_in_host_memory() -> None:
    program, machine = programs.workload("gpt-nano", batch_size=64), spanax.cluster("v5e:2x4")
    reports = [
        spanax.check(program, spanax.plan(program, machine, layout="fsdp", mesh="fsdp=8", offload=offload), machine)
        for offload in (None, "optimizer")
    ]
    plain, offloaded = (report.compiled for report in reports)
    arguments = [report.memory["arguments"] for report in reports]  # in main memory
    assert [report.errors["state_bytes"] for report in reports] == [0, 0], "padding included"
    assert plain.host_bytes == 0 and offloaded.host_bytes == reports[1].predicted.host_bytes
    assert plain.state_bytes == offloaded.state_bytes + offloaded.host_bytes
    assert arguments[0] - arguments[1] >= offloaded.host_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("on", "listed"),
    [
        pytest.param("v5e:2x4", "add.5@host+input.1@host+dot_general.1@host", marks=TPU),
        pytest.param("h100:8", "add.5@host+input.1@host+dot_general.1@host", marks=CUDA),
        pytest.param("h100:8", "add.5+dot_general.1@host", marks=CUDA),
    ],
)
def test_compilers_need_no_more_than_planned_where_layers_save_in_host_memory(on: str, listed: str) -> None:
    machine = spanax.cluster(on)
    program = programs.workload("gpt2", batch_size=128)
    for remat in (listed.replace("@host", "").replace("+input.1", ""), listed):
        plan = spanax.plan(
            program, machine, layout="fsdp", mesh="fsdp=8", attention="plain", schedule=Schedule(remat, microbatches=1)
        )
        report = spanax.check(program, plan, machine)
        assert report.compiled.peak_bytes <= evaluate(program, plan, machine).candidate.upper_bytes
        assert report.errors["peak_bytes"] == pytest.approx(0, abs=0.2), report.errors
        assert report.errors["flops"] == pytest.approx(0, abs=0.02)


@TPU
def test_a_program_that_does_not_fit_reports_its_largest_arrays() -> None:
    report = check("gpt2-xl", "v5e:2x4", "data", batch_size=8)
    assert report.fits is False and report.limit_bytes == int(15.75 * 2**30)
    assert report.compiled.peak_bytes > report.limit_bytes and report.buffers
    sizes = [buffer.num_bytes for buffer in report.buffers]
    assert sizes == sorted(sizes, reverse=True)
    assert any("blocks.up.kernel" in buffer.paths for buffer in report.buffers)


@TPU
def test_code_generation_changes_no_figure() -> None:
    program, machine = stored.program(), spanax.cluster("v5e:2x2")
    plan = spanax.plan(program, machine, layout="fsdp")
    early, whole = (spanax.check(program, plan, machine, codegen=codegen) for codegen in (False, True))
    assert early.compiled.collectives == whole.compiled.collectives
    assert early.compiled.state_bytes == whole.compiled.state_bytes
    assert whole.memory["code"] > 0 and early.memory["assigned"] == whole.memory["assigned"]


# v4, v5e, v5p and v6e are in the cases above.
@TPU
@pytest.mark.parametrize("chip", sampled(TPUS, ["v3", "v7"]))
def test_every_chip_of_the_catalogue_is_known_to_the_compiler(chip: str) -> None:
    shape = "2x2" if chip in ("v3", "v5e", "v6e") else "2x2x1"
    assert check("gpt-nano", f"{chip}:{shape}", "data").compiled.flops


@TPU
def test_the_stored_programs_are_up_to_date() -> None:
    case, program = stored.CASES[0], stored.program()
    plan = case.plan(program)
    fresh = compile_for(target_of(case.cluster), lower(program, plan, "tpu"), plan.mesh)
    assert totals(collectives(read_module(fresh.module), plan.mesh))["fsdp"]["all-gather"] == 6488064


@CUDA
@pytest.mark.parametrize("on", ["a100-80gb:8", "h100:8", "h200:2x4", "b200:8"])
def test_a_gpus_compiler_agrees_with_the_plan(on: str) -> None:
    report = check("gpt-nano", on, "fsdp+tensor", "fsdp=4,model=2")
    assert report.level == 3 and report.fits
    assert report.errors["state_bytes"] == 0
    assert report.errors["flops"] == pytest.approx(0, abs=0.02)
    moved = report.compiled.collectives["fsdp"]
    assert moved["reduce-scatter"] and moved["all-gather"]


@CUDA
def test_a_gpu_compiler_has_no_memory_limit_so_the_chips_is_used() -> None:
    report = check("gpt2-xl", "a100-40gb:8", "data", batch_size=64)
    assert report.fits is False and report.compiled.peak_bytes > report.limit_bytes
