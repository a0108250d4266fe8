"""Options for XLA's compiler: those of the table are known to it, those of a plan reach it, and no file is named."""

import json
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import jax
import pytest

import spanax
import zoo
from sampling import sampled
from spanax.errors import DataError, SpanaxError
from spanax.hardware.flags import BOOL, FLAGS, INT, MODE, OPTIONS, checked, default_flags, flags_of, for_platform
from spanax.plan.plan import Plan
from spanax.step.placement import check_accepted
from spanax.train.run import Run

MIXED_FLAGS = ("xla_gpu_autotune_level=2", "xla_cpu_enable_fast_math=True", "xla_tpu_such=1")
LEVEL = "xla_gpu_autotune_level=1"
GATHERS = "xla_tpu_all_gather_collective_matmul_mode"


def planned(on: str = "cpu:8") -> tuple[spanax.Program, Plan]:
    case = zoo.ZOO["mlp"]
    program = spanax.trace(build=case.build, optimizer=case.optimizer, batch=case.batch(16), loss=case.loss)
    return program, spanax.plan(program, spanax.cluster(on), layout="fsdp", mesh="fsdp=8")


def test_each_chip_has_options_and_a_cpu_none() -> None:
    names = {on: {flag.partition("=")[0] for flag in default_flags(spanax.cluster(on))} for on in (
        "cpu:8", "h100:8", "h100:1", "v5p:2x2x2", "v5e:2x2:2",
    )}  # fmt: skip
    by_platform = {kind: {flag.name for flag in FLAGS if flag.platform == kind} for kind in ("gpu", "tpu")}
    assert names["h100:8"] == by_platform["gpu"] and names["v5e:2x2:2"] == by_platform["tpu"]
    assert names["cpu:8"] == names["h100:1"] == names["v5p:2x2x2"] == set()
    assert all(flag.reason and flag.source and checked(f"{flag.name}={flag.value}") for flag in FLAGS)


@pytest.mark.parametrize("layout", sampled(["expert", "fsdp", None], ["expert"]))
def test_expert_weights_turn_latency_hiding_off(layout: str | None) -> None:
    case = zoo.ZOO["moe"]
    program = spanax.trace(build=case.build, optimizer=case.optimizer, batch=case.batch(16), loss=case.loss)
    off = "xla_gpu_enable_latency_hiding_scheduler=False"
    plan = spanax.plan(program, spanax.cluster("h100:8"), layout=layout)
    assert plan.xla_flags == (off,)
    assert f"{off} (expert weights: " in str(plan) and Plan.from_json(plan.to_json()) == plan
    dense = replace(planned("h100:8")[1], xla_flags=(off,))
    assert off in str(dense) and "expert weights" not in str(dense)
    assert spanax.plan(program, spanax.cluster("cpu:8"), layout=layout).xla_flags == ()


def test_the_page_lists_them() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "training.md").read_text()
    assert {f"{flag.name}={flag.value}" for flag in FLAGS} == set(
        re.findall(r"^\| `(xla_\w+=\w+)` \|", page, re.MULTILINE)
    )


@pytest.mark.parametrize("item", [flag for flag in FLAGS if flag.platform == "gpu"], ids=lambda item: item.name)
def test_this_jaxlib_knows_the_options_for_gpus(item, devices: list[jax.Device]) -> None:
    """Options of GPUs are the CPU compiler's too, which ignores them; those of TPUs are libtpu's alone."""
    step = jax.jit(lambda x: x, compiler_options={item.name: item.value})
    step.lower(jax.ShapeDtypeStruct((), "int32")).compile()


@pytest.mark.parametrize(
    ("output", "result"),
    [
        ("none", ()),
        ("default", (LEVEL,)),
        ("xla_gpu_triton_gemm_any=true", ("xla_gpu_triton_gemm_any=True",)),
        ("default,--XLA_cpu_use_onednn=FALSE", (LEVEL, "xla_cpu_use_onednn=False")),
        ("default,xla_gpu_autotune_level=-1", ("xla_gpu_autotune_level=-1",)),
        (f"{GATHERS}=post_spmd", (f"{GATHERS}=post_spmd",)),
    ],
)
def test_requested_xla_flags_are_resolved(output: str, result: tuple[str, ...]) -> None:
    assert flags_of(output, (LEVEL,)) == result


@pytest.mark.parametrize(
    "output",
    [
        *("xla_dump_to=/tmp/x", "xla_dump_to=7", "xla_dump_to=true", "--XLA_DUMP_TO=1", "xla_b=1", "b=1", ""),
        *(f"xla_gpu_autotune_level{value}" for value in ("", "=", "=1;2", "=True", "=1.5", "=٧")),
        *("none,xla_gpu_autotune_level=1", "xla_gpu_triton_gemm_any=1", "xla_gpu_triton_gemm_any=True True"),
        f"{GATHERS}=post",
    ],
)
def test_an_invalid_option_raises(output: str) -> None:
    with pytest.raises(SpanaxError, match="cannot set the option"):
        flags_of(output, ())


def test_the_listed_options_write_no_file(devices: list[jax.Device], tmp_path: Path, monkeypatch) -> None:
    """The compiler knows most of them, with the type that is listed, and all of those set in one program."""
    monkeypatch.chdir(tmp_path)
    lowered = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((), "int32"))
    known = {}
    for name, kind in OPTIONS.items():
        value = {BOOL: "False", INT: "1", MODE: "auto"}[kind]
        with suppress(jax.errors.JaxRuntimeError):
            lowered.compile(compiler_options={name: value})
            known[name] = value
    assert {name for name in OPTIONS if name.startswith("xla_cpu_")} - known.keys() <= {"xla_cpu_use_fusion_emitters"}
    assert len([name for name in known if name.startswith("xla_gpu_")]) > 30
    lowered.compile(compiler_options=known)
    assert not list(tmp_path.iterdir())
    lowered.compile(compiler_options={"xla_dump_to": "7"})
    assert list(tmp_path.iterdir())


def test_a_plan_stores_compiler_options(devices: list[jax.Device]) -> None:
    program, plan = planned("h100:8")
    assert plan.xla_flags == default_flags(spanax.cluster("h100:8")) and plan.xla_flags[0] in str(plan)
    assert Plan.from_json(plan.to_json()) == plan
    assert "xla_flags" not in json.loads(planned()[1].to_json())
    hostile = plan.to_json().replace(plan.xla_flags[0], "xla_dump_to=/tmp/x")
    with pytest.raises(DataError, match="cannot set the option 'xla_dump_to"):
        Plan.from_json(hostile)


def test_the_options_for_these_devices_reach_the_compiler(devices: list[jax.Device], monkeypatch) -> None:
    assert for_platform(MIXED_FLAGS, "cuda") == {"xla_gpu_autotune_level": "2"}
    program, plan = planned()
    taken: list[dict[str, str] | None] = []
    jit = jax.jit
    monkeypatch.setattr(
        jax, "jit", lambda function, **how: taken.append(how.get("compiler_options")) or jit(function, **how)
    )
    Run(program, replace(plan, xla_flags=MIXED_FLAGS), plan.mesh.build(), state=[]).compile()
    assert taken[-1] == {"xla_cpu_enable_fast_math": "True"}


@pytest.mark.parametrize("flag", ["xla_such=True", "xla_cpu_enable_fast_math=7"])
def test_unknown_compiler_options_raise_at_startup(flag: str, devices: list[jax.Device]) -> None:
    program, plan = planned()
    with pytest.raises(SpanaxError, match="XLA rejects an option: .*" + flag.partition("=")[0]):
        spanax.start(program, replace(plan, xla_flags=(flag,)))
    check_accepted(replace(plan, xla_flags=("xla_gpu_such=1",)), plan.mesh.build())  # another platform's
