"""Defaults: every verb and the library plan the same, and nothing that is requested is dropped."""

import dataclasses
import functools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import spanax
from programs import array
from requested import with_flags
from sampling import sampled
from spanax import cli
from spanax.check.report import Report
from spanax.commands import train
from spanax.commands.check import CheckCommand
from spanax.commands.check import answer as check_answer
from spanax.commands.plan.answer import answer as plan_answer
from spanax.commands.plan.flags import PlanCommand
from spanax.errors import SpanaxError
from spanax.models.workloads import load
from spanax.plan.advice.summary import summarize
from spanax.plan.candidates.request import Request, Scope
from spanax.plan.choose import searched
from spanax.plan.defaults import STAGE_MARGIN
from spanax.plan.plan import Plan, Schedule
from spanax.plan.search import search_in
from spanax.show.search import search_text
from spanax.trace.program import Program
from spanax.train.config import TrainConfig, check
from spanax.train.job import plan_choice
from written import read

BATCH = 32

CASES = [
    ("gpt-nano", "cpu:8", {}),
    ("gpt-nano", "cpu:8", {"layout": "fsdp+tensor"}),
    ("gpt-nano", "h100:8", {}),
    ("resnet-nano", "a100:8", {"layout": "hsdp"}),
    ("moe-nano", "v5e:2x4", {"mesh": "fsdp=4,model=2"}),
    ("gpt-nano", "v100:8", {"layout": "data"}),
]


def linear(**options: Any) -> Program:
    return spanax.trace(
        build=lambda rngs: nnx.Linear(256, 256, rngs=rngs),
        optimizer=optax.adam(1e-3),
        batch=array(64, 256),
        loss=lambda model, x: (model(x) ** 2).mean(),
        **options,
    )


@pytest.mark.parametrize("name, on, asked", sampled(CASES, [CASES[1]]))
def test_plan_check_and_the_library_agree(name: str, on: str, asked: dict[str, str], tmp_path: Path) -> None:
    file, certificate = tmp_path / "plan.json", tmp_path / "check.json"
    output = plan_answer(with_flags(PlanCommand(name, (on,)), global_batch_size=BATCH, out=file, **asked)).data
    planned = Plan.load(file)
    program = load(name, batch_size=BATCH).trace(learning_rate=1e-3, num_steps=100)
    assert spanax.plan(program, on, **asked) == planned
    best, schedule = output["best"], planned.schedule
    assert (best["mesh"], best["microbatches"]) == (dict(planned.mesh.axes), schedule.microbatches)
    assert best["remat"] == (schedule.remat or "as written") and best["layout"] == planned.layout.name
    assert (output["compute_dtype"], output["loss_chunks"]) == (schedule.compute_dtype, schedule.loss_chunks)
    check_answer(with_flags(CheckCommand(name, on), global_batch_size=BATCH, level=0, out=certificate, **asked))
    assert Report.from_json(certificate.read_text()).plan == planned


STAGED_ON = "v100:2x2"
"""Where stages pay: the links between these nodes are slow."""


@functools.cache
def staged_program() -> Program:
    return load("gpt2-xl", batch_size=16, seq_len=128, num_layers=32).trace(learning_rate=1e-3, num_steps=100)


def test_all_entry_points_divide_layers_into_the_same_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "plan.json"
    sizes = dict(global_batch_size=16, seq_len=128, layers=32)
    workload, on = "gpt2-xl", STAGED_ON
    plan_answer(with_flags(PlanCommand(workload, (on,)), out=file, **sizes))
    program = staged_program()
    monkeypatch.setattr(plan_choice, "local", lambda devices: spanax.cluster(on))
    telemetry = SimpleNamespace(folder=tmp_path)
    trained = plan_choice.choose_plan(program, TrainConfig(), [], telemetry)  # type: ignore[arg-type]
    plan = spanax.plan(program, on)
    assert plan.schedule.num_stages > 1
    assert plan == Plan.load(file) == trained


def test_stages_must_be_faster_by_a_margin() -> None:
    program = staged_program()
    result = searched(program, spanax.cluster(STAGED_ON), Request(), top=1000)
    seconds = {
        is_staged: min(each.step_seconds for each in result.candidates if (each.num_stages > 1) == is_staged)
        for is_staged in (False, True)
    }
    advantage = seconds[False] / seconds[True] - 1
    assert advantage > STAGE_MARGIN and result.best is not None and result.best.num_stages > 1
    scope = Scope(batch_size=program.batch_size, remat=("none",))
    slower, faster = (
        search_in(program, spanax.cluster(STAGED_ON), dataclasses.replace(scope, stage_margin=margin), "auto").best
        for margin in (20.0, 0.0)
    )
    assert slower is not None and slower.num_stages == 1 and faster is not None and faster.num_stages > 1


@pytest.mark.parametrize("asked", sampled([[], ["--layout", "fsdp"]], [[]]))
def test_a_saved_plan_is_the_one_that_trains(devices: list[jax.Device], tmp_path: Path, asked: list[str]) -> None:
    file, run = tmp_path / "plan.json", tmp_path / "run"
    cli.main(["plan", "gpt-nano", "--on", "cpu:8", "--global-batch-size", "8", "--out", str(file), *asked])
    cli.main(
        [
            "train",
            "gpt-nano",
            "--global-batch-size",
            "8",
            "--steps",
            "1",
            "--eval-batches",
            "1",
            "--output-dir",
            str(run),
            *asked,
        ]
    )
    assert Plan.load(run / "plan.json") == Plan.load(file)


def cached(model: nnx.Linear, x: jax.Array) -> jax.Array:
    cache = jnp.zeros((x.shape[0], 32, 16))
    return jax.lax.dynamic_update_slice(cache, model(x), (0, 0, 0)).sum()


def determinant(model: nnx.Linear, x: jax.Array) -> jax.Array:
    return model(x).mean() - jnp.linalg.slogdet(model.kernel[...])[1]


def solved(model: nnx.Linear, x: jax.Array) -> jax.Array:
    def body(total: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
        return total + jnp.linalg.solve(model.kernel[...], row[0]).sum(), None

    return jax.lax.scan(body, jnp.zeros((), x.dtype), x)[0] / len(x)


DECOMPOSED = "TypeError: (the decomposition of a matrix at .*test_defaults.py|lu does not accept dtype bfloat16)"
"""The error of Spanax, and that of JAX from 0.12 on."""


@pytest.mark.parametrize(
    ("loss", "on", "layout", "why"),
    [
        (cached, "h100:8", None, "TypeError: lax.dynamic_update_slice"),
        (cached, "v5e:2x4", "data", "TypeError: lax.dynamic_update_slice"),
        (determinant, "h100:8", None, DECOMPOSED),
        (solved, "v5e:2x4", "data", DECOMPOSED),
    ],
)
def test_a_loss_that_cannot_be_computed_in_bfloat16_is_planned_in_float32(
    loss: Any, on: str, layout: str | None, why: str
) -> None:
    program = spanax.trace(
        build=lambda rngs: nnx.Linear(16, 16, rngs=rngs), optimizer=optax.sgd(0.1), batch=array(16, 8, 16), loss=loss
    )
    plan = spanax.plan(program, on, layout=layout)
    search = searched(program, spanax.cluster(on), Request(layout=layout))
    why = f"computed in float32: the loss cannot be computed in bfloat16: {why}"
    assert plan.setting.dtypes == ("float32",)
    assert re.search(why, plan.why) and re.search(why, search_text(summarize(search), 1))
    assert spanax.check(program, plan, on, level=0).fits
    with pytest.raises(SpanaxError, match="cannot be computed in bfloat16"):
        spanax.plan(program, on, layout=layout, schedule=Schedule(compute_dtype="bfloat16"))


def test_accelerators_compute_in_bfloat16_and_keep_parameters() -> None:
    plan = spanax.plan(linear(), "h100:8")
    assert plan.schedule.compute_dtype == "bfloat16" and plan["kernel"].dtype == "float32"
    assert spanax.plan(linear(), "cpu:8").schedule.compute_dtype is None
    assert spanax.plan(linear(), "v100:8").schedule.compute_dtype is None  # float16 needs a scaled loss


def test_a_dtype_set_by_the_user_is_preserved() -> None:
    assert spanax.plan(linear(compute_dtype="float32"), "h100:8").schedule.compute_dtype == "float32"
    half = spanax.trace(
        build=lambda rngs: nnx.Linear(256, 256, dtype=jnp.float16, rngs=rngs), optimizer=optax.adam(1e-3),
        batch=array(64, 256), loss=lambda model, x: (model(x).astype("float32") ** 2).mean(),
    )  # fmt: skip
    assert spanax.plan(half, "h100:8").schedule.compute_dtype is None

    def train_step(model: Any, optimizer: Any, x: Any) -> dict[str, Any]:
        loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
        optimizer.update(model, grads)
        return {"loss": loss}

    program = spanax.trace(
        build=lambda rngs: nnx.Linear(256, 256, rngs=rngs), optimizer=optax.adam(1e-3), batch=array(64, 256),
        train_step=train_step,
    )  # fmt: skip
    schedule = spanax.plan(program, "h100:8").schedule
    assert (schedule.compute_dtype, schedule.remat, schedule.microbatches) == (None, None, 1)


def test_a_run_computes_as_planned(devices: list[jax.Device]) -> None:
    program = linear()
    plan = spanax.plan(program, "cpu:8", layout="data", schedule=Schedule(compute_dtype="bfloat16"))
    run = spanax.start(program, plan)
    assert run.program.compute_dtype == "bfloat16" and plan.schedule.compute_dtype == "bfloat16"
    assert run.params()["kernel"].dtype == jnp.float32 and "bf16" in run.lower().as_text()
    with pytest.raises(
        SpanaxError, match="computes in bfloat16, and the program was traced with compute_dtype 'float3"
    ):
        spanax.start(linear(compute_dtype="float32"), plan)


@pytest.mark.parametrize(
    "flags", [{"dtype": "float32"}, {"remat": "full"}, {"layout": "data"}, {"attention": "flash"}, {"microbatches": 2}]
)
def test_a_plan_file_and_a_switch_that_it_contains_conflict(flags: dict[str, Any], tmp_path: Path) -> None:
    (name,) = flags
    with pytest.raises(SpanaxError, match=f"--plan already determines {name}"):
        check(TrainConfig(plan="p.json", **flags))
    spanax.plan(linear(), "cpu:8", layout="data").save(tmp_path / "p.json")
    with pytest.raises(SpanaxError, match=f"--plan already determines {name}"):
        check_answer(with_flags(CheckCommand("gpt-nano", "cpu:8"), plan=tmp_path / "p.json", **flags))


def test_an_unsupported_policy_raises_or_is_counted() -> None:
    with pytest.raises(SpanaxError, match="remat 'full' has no layer"):
        spanax.search(linear(), "cpu:8", remat=("full",))
    rejected = spanax.search(linear(), "cpu:8").rejected
    assert [reason for reason in rejected if str(reason).startswith("remat full: remat 'full' has no layer")]
    with pytest.raises(SpanaxError, match="remat 'full' has no layer"):
        plan_answer(with_flags(PlanCommand("resnet-nano", ("cpu:8",)), remat="full"))


def test_requests_that_contradict_each_other_are_errors() -> None:
    with pytest.raises(SpanaxError, match="--solve-for answers one question, without --out"):
        plan_answer(PlanCommand("gpt-nano", ("cpu:8",), solve_for="batch", out=Path("p.json")))
    with pytest.raises(SpanaxError, match="sequence_parallel needs a layout"):
        spanax.plan(linear(), "cpu:8", sequence_parallel=True)
    with pytest.raises(SpanaxError, match="prices mesh axes in the order"):
        spanax.search(linear(), "a100:2x4", mesh="model=4,fsdp=2")
    with pytest.raises(SpanaxError, match="attention 'flash' gathers keys"):
        spanax.plan(linear(), "h100:8", layout="ring", attention="flash")


TIGHT = [
    ("40 MiB", "--layout fsdp --remat dots --microbatches 1", 3),
    ("36 MiB", "--layout fsdp --remat dots --microbatches 1", 2),
    ("42 MiB", "--layout pipeline --remat dots --virtual-stages 2", 1),
    ("44 MiB", "--layout data+tensor --mesh data=2,model=4 --remat dots --microbatches 1", 3),
    ("36 MiB", "--remat none --microbatches 1", 2),
]
"""The memory of a device, requests for which nothing fits, and the number of remedies."""


def followed(line: str, advice: str) -> str:
    """A command line with the options of an advice in place of its own."""
    devices = re.match(r"(\d+) devices", advice)
    line = line if devices is None else line.replace(".toml:8", f".toml:{devices[1]}")
    for name, value in re.findall(r"(--[\w-]+) (\S+)", advice):
        line = re.sub(rf"{name} \S+", "", line) + f" {name} {value}"
    return line


@pytest.mark.parametrize("memory, flags, count", sampled(TIGHT, [TIGHT[2]]))
def test_each_remedy_fits_together_with_the_other_flags(tmp_path: Path, memory: str, flags: str, count: int) -> None:
    chip = tmp_path / "tight.toml"
    chip.write_text(f'like = "a100"\nusable_memory = "{memory}"\n')
    line = f"spanax plan gpt-nano --on {chip}:8 --global-batch-size 64 {flags}"
    reply = plan_answer(read(line))
    advice = reply.data["fits_with"]
    assert reply.data["best"] is None and len(advice) == count
    assert f"it fits with {'; or with '.join(advice)}" in reply.text
    for text in advice:
        again = plan_answer(read(followed(line, text)))
        assert again.data["best"] is not None, f"{text}: {again.data['shortfall']}"


def test_if_nothing_fits_the_message_suggests_remedies() -> None:
    program = linear()
    with pytest.raises(
        SpanaxError,
        match=r"no layout fits.*\n.*the lowest peak needs.*\n.*fix: .*(--optimizer-state bfloat16|devices|memory)",
    ):
        spanax.plan(program, dataclasses.replace(spanax.cluster("a100:8"), memory_bytes=1 << 14))


def test_a_step_of_fixed_batch_size_warns() -> None:
    def loss(model: Any, x: jax.Array) -> jax.Array:
        noise = jax.random.normal(jax.random.key(0), (16, 64))
        return (model(noise) ** 2).mean() + (model(x.reshape(16, 64)) ** 2).mean()

    with pytest.warns(UserWarning, match="replicated: it cannot be traced with 32 examples instead of 16"):
        spanax.trace(
            build=lambda rngs: nnx.Linear(64, 32, rngs=rngs), optimizer=optax.sgd(0.1), batch=array(16, 64), loss=loss
        )


def test_a_run_resumed_on_another_platform_keeps_its_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = linear()
    monkeypatch.setattr(plan_choice, "local", lambda devices: spanax.cluster("h100:8"))
    for recorded, resumed in ((None, "float32"), ("bfloat16", "bfloat16")):
        schedule = Schedule(compute_dtype=recorded)
        spanax.plan(program, "cpu:8", layout="data", schedule=schedule).save(tmp_path / "plan.json")
        again = plan_choice.in_recorded_dtype(program, tmp_path, [])
        assert spanax.plan(again, "h100:8", layout="data").schedule.compute_dtype == resumed


def test_a_new_plan_replaces_that_of_a_resumed_run() -> None:
    recorded = {"layout": "fsdp", "remat": "full", "dtype": "bfloat16", "lr": 0.1}
    assert train.without_replaced(recorded, TrainConfig(plan="p.json", resume=True)) == {"lr": 0.1}
