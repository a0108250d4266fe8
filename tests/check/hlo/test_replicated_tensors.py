"""Replicated tensors are read from the partitioner's log, compared with the plan, and stored in reports."""

import dataclasses
import functools
import gzip

import pytest

import programs
import spanax
import stored
from sampling import sampled
from spanax.check.check import figures
from spanax.check.finding import Finding
from spanax.check.hlo.collectives import Collective, collectives, totals, with_arrays
from spanax.check.hlo.flops import program_flops
from spanax.check.hlo.module import read_module
from spanax.check.hlo.replicated_tensors import ReplicatedTensor, replicated_tensors
from spanax.check.lint.lint import lint
from spanax.check.lint.subject import LintSubject
from spanax.check.report import Figures, Report
from spanax.plan.evaluate import evaluate

MACHINE = spanax.cluster("cpu:8")

OLD = (
    "W1121 19:09:07.198850   20261 spmd_partitioner.cc:656] [SPMD] Involuntary full rematerialization. The compiler "
    "cannot go from sharding {devices=[2,2,1,2]<=[8] last_tile_dim_replicate} to {devices=[8,1,1]<=[8]} efficiently "
    "for HLO operation %sharding_constraint.0 = bf16[16,8,4]{2,1,0} copy(%sin.0), sharding={devices=[2,2,2]<=[8]}, "
    'metadata={op_name="jit(f)/sin" source_file="/home/me/model.py" source_line=7}. As the last resort, SPMD will '
    "replicate the tensor and then partition it to obtain the target sharding, which is inefficient.\n"
)
NEW = (
    "W1121 19:09:25.073109   20472 spmd_partitioner.cc:666] [SPMD] Involuntary full rematerialization. The compiler "
    "cannot go from sharding {mesh['a'=2,'b'=2,'c'=4], [{'a', 'b'}, {'c':(1)2}, {}]} to {mesh['a'=2,'b'=2,'c'=4], [{}, "
    "{}, {'a'}]} efficiently for HLO operation %add_any.4 = f32[16,8,4]{2,1,0} add(%a.1, %b.2), metadata={"
    'op_name="jit(step)/add_any"}. As the last resort, SPMD will replicate the tensor.\n'
)


@functools.cache
def checked(layout: str, inputs_only: bool) -> tuple[spanax.Program, spanax.Plan, Report]:
    program = programs.zoo_program("gpt")
    plan = spanax.plan(program, MACHINE, layout=layout)
    return program, plan, spanax.check(program, plan, MACHINE, level=2, inputs_only=inputs_only, cache=False)


def findings_of(layout: str, inputs_only: bool, **changes: object) -> list[Finding]:
    program, plan, report = checked(layout, inputs_only)
    return lint(program, plan, MACHINE, dataclasses.replace(report, **changes))


def moved(figures: Figures) -> int:
    assert figures.collectives is not None
    return sum(num_bytes for kinds in figures.collectives.values() for num_bytes in kinds.values())


def test_both_formats_of_the_log_are_read() -> None:
    reported = replicated_tensors("I0000 nothing of ours\n" + OLD + NEW + OLD)
    by_name = {line.name: line for line in reported}
    assert len(reported) == len(by_name) == 2
    assert by_name["add_any.4"].shape == "f32[64,16,4]" and by_name["add_any.4"].num_bytes == 4 * 64 * 16 * 4
    assert by_name["add_any.4"].after == "{mesh['a'=2,'b'=2,'c'=4], [{}, {}, {'a'}]}"
    output = by_name["sharding_constraint.0"]
    assert (output.shape, output.num_bytes, output.op_name) == ("bf16[32,16,4]", 4096, "jit(f)/sin")
    assert output.source == "/home/me/model.py:7"
    assert replicated_tensors("") == ()


def test_the_report_has_the_replicated_tensors_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")  # also reported if the log is disabled
    _, _, report = checked("fsdp+tensor+seq", True)
    assert report.inputs_only and report.replicated
    assert any(
        "models/gpt.py:" in array.source and array.op_name.startswith("jit(step)") for array in report.replicated
    )
    assert all(array.num_bytes > 0 for array in report.replicated)
    assert Report.from_json(report.to_json()) == report


def test_a_replicated_tensor_is_reported_with_its_line() -> None:
    output = [item for item in findings_of("fsdp+tensor+seq", True) if item.code == "SPX012"]
    assert output and "models/gpt.py:" in output[0].message and output[0].num_bytes >= 1 << 19
    assert len(str(output[0]).splitlines()) == 2


def test_planned_replication_is_not_a_finding() -> None:
    """Newer compilers say it of exchanges that the plan means, too."""
    reported = tuple(ReplicatedTensor(f"copy.{i}", "f32[16,32,64]", "{a}", "{b}", 131072) for i in range(3))
    for layout in ("fsdp+tensor",):
        codes = [item.code for item in findings_of(layout, False, replicated=reported)]
        assert not {"SPX012", "SPX016"} & set(codes), codes


def test_an_unplanned_gather_of_a_parameter_is_reported() -> None:
    program, plan, report = checked("fsdp+tensor", False)
    gather = Collective("all-gather", "model", "f32", "f32[64,256]", 1 << 20, 4, 2, "all-gather.1",
                        "jit(step)/dot_general", "/home/me/model.py:7", tensors=("blocks.up.kernel",))  # fmt: skip
    kinds = {axes: dict(by_kind) for axes, by_kind in (report.compiled.collectives or {}).items()}
    kinds["model"]["all-gather"] = kinds["model"].get("all-gather", 0) + gather.num_bytes
    reported = dataclasses.replace(
        report,
        compiled=dataclasses.replace(report.compiled, collectives=kinds), collectives=(gather, *report.collectives),
    )  # fmt: skip
    [output] = [finding for finding in lint(program, plan, MACHINE, reported) if finding.code in ("SPX012", "SPX016")]
    assert (output.code, output.path) == ("SPX012", "blocks.up.kernel") and "/home/me/model.py:7" in output.message
    planned = LintSubject(program, plan, MACHINE).gathered_bytes("blocks.up.kernel", "model")
    assert output.num_bytes == gather.num_bytes - planned


@pytest.mark.parametrize("layout", sampled(["fsdp", "fsdp+tensor"], ["fsdp+tensor"]))
def test_unplanned_activation_transfers_are_reported_with_their_bytes(layout: str) -> None:
    """The usual mistake: inputs sharded, the rest left alone. What the plan says it saves is what it saves."""
    _, _, theirs = checked(layout, True)
    _, _, ours = checked(layout, False)
    measured = moved(theirs.compiled) - moved(ours.compiled)
    output = [item for item in findings_of(layout, True) if item.code in ("SPX012", "SPX016")]
    priced = sum(line.num_bytes for line in output)
    assert measured > moved(ours.compiled), "the mistake more than doubles what moves"
    assert priced == pytest.approx(measured, rel=0.2)
    assert moved(theirs.compiled) - moved(theirs.predicted) == pytest.approx(measured, rel=0.2)


@pytest.mark.parametrize("case", stored.CASES, ids=lambda case: case.on)
def test_programs_compiled_for_chips_have_no_findings(case: stored.Case) -> None:
    program = stored.program()
    plan, module = case.plan(program), read_module(gzip.decompress(case.path.read_bytes()))
    moves = with_arrays(collectives(module, plan.mesh), plan)
    compiled = Figures(flops=program_flops(module), collectives=totals(moves))
    predicted = figures(evaluate(program, plan, case.cluster))
    report = Report(3, case.on, plan.layout.name, repr(plan.mesh), True, "", predicted, compiled, collectives=moves)
    codes = {finding.code for finding in lint(program, plan, case.cluster, report)}
    assert moves and not codes & {"SPX003", "SPX012", "SPX016"}
