"""`spanax plan`: the contract of its answer, what-ifs, and a plan that trains."""

import dataclasses
import functools
import json
import re
from pathlib import Path
from typing import Any

import jax
import pytest
from flax import nnx

import spanax
from programs import zoo_program
from requested import with_flags
from sampling import sampled
from spanax import cli
from spanax.check.lint.lint import lint
from spanax.commands.plan.answer import answer
from spanax.commands.plan.flags import PlanCommand
from spanax.errors import SpanaxError
from spanax.models.workloads import load
from spanax.plan.advice.summary import summarize
from spanax.plan.candidate import Candidate, Search
from spanax.plan.plan import Plan
from spanax.show.search import bytes_by_collective, ranked_text, search_text
from spanax.units import MEASURES, bytes_text

SMALL = with_flags(PlanCommand("gpt-nano", ("cpu:8",)), global_batch_size=16)


def ask(**changes: Any) -> tuple[str, dict[str, Any]]:
    reply = answer(with_flags(SMALL, **changes))
    return reply.text, reply.data


@pytest.fixture(scope="module")
def answered() -> tuple[str, dict[str, Any]]:
    return ask()


def test_the_json_output_has_its_documented_keys(answered: tuple[str, dict[str, Any]]) -> None:
    data = json.loads(json.dumps(answered[1]))
    top = {"best", "candidates", "rejected", "layouts_priced", "search_seconds", "trace_seconds"}
    best = {
        "layout", "mesh", "stored_axes", "computed_axes", "remat", "microbatches", "schedule", "memory", "collectives",
        "step_seconds", "seconds", "mfu", "bottleneck", "rule",
    }  # fmt: skip
    assert top <= data.keys() and best <= data["best"].keys()
    assert data["candidates"][0]["step_seconds"] == data["best"]["step_seconds"]
    times = [item["step_seconds"] for item in data["candidates"]]
    assert times == sorted(times) and len(times) == 10
    for candidate in data["candidates"]:
        assert sum(candidate["seconds"].values()) == pytest.approx(candidate["step_seconds"])
        assert sum(size for name, size in candidate["memory"].items() if name != "peak") == candidate["memory"]["peak"]
        assert 0 < candidate["mfu"] < 1
        assert candidate["tokens_per_second"] == pytest.approx(16 * 64 / candidate["step_seconds"])
    plan = spanax.plan(load("gpt-nano", batch_size=16).trace(learning_rate=1e-3, num_steps=9), spanax.cluster("cpu:1"))
    assert data["best"]["checkpoint_bytes"] == plan.state_bytes()
    assert data["best"]["restore_bytes"] < plan.state_bytes()


class Embedded(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, precision: str | None):
        self.embed = nnx.Embed(64, 128, rngs=rngs)
        self.up, self.down = nnx.Linear(128, 512, precision=precision, rngs=rngs), nnx.Linear(512, 64, rngs=rngs)

    def __call__(self, ids: Any) -> Any:
        return self.down(nnx.relu(self.up(self.embed(ids))))


@pytest.mark.parametrize(("precision", "dtypes"), [(None, "bfloat16"), ("highest", "bfloat16 and float32")])
def test_the_dtype_of_the_matmuls_is_shown(precision: str | None, dtypes: str) -> None:
    """`nnx.Embed` without a dtype returns that of its parameters, and the values after it are in float32."""
    workload = spanax.Workload(
        build=functools.partial(Embedded, precision=precision),
        batch=jax.ShapeDtypeStruct((64, 32), "int32"),
        loss=lambda model, ids: model(ids).astype("float32").var(),
        learning_rate=1e-3,
        num_steps=9,
    )
    command = with_flags(PlanCommand("embedded", ("h100:8",)), layout="data")
    text = answer(command, lambda **sizes: workload).text
    assert f", {dtypes}, remat" in text.splitlines()[0]
    most = "bf16" if precision is None else "fp32"
    assert f"in {most}: 3 x the forward pass's matmul FLOPs" in text
    program = workload.trace(learning_rate=1e-3, num_steps=9)
    machine = spanax.cluster("h100:8")
    messages = [str(finding) for finding in lint(program, spanax.plan(program, machine, layout="data"), machine)]
    assert any("of the FLOPs are in float32" in each for each in messages) == (precision is not None)


def test_the_text_output(answered: tuple[str, dict[str, Any]]) -> None:
    text, data = answered
    assert text.count(": 3 x the forward pass's matmul FLOPs") == 1
    for part in ("step ", "memory ", "moved ", "rule ", "\nranked by step time:\n", "layouts priced in"):
        assert part in text
    assert data["best"]["layout"] in text and max(map(len, text.splitlines())) < 400


@pytest.mark.slow
def test_the_first_line_states_what_the_step_computes_on(answered: tuple[str, dict[str, Any]]) -> None:
    text, data = answered
    first = "(fsdp=8): batch 16, sequence 64, float32, attention plain, remat none, 1 microbatch"
    assert text.splitlines()[0].endswith(first)
    assert (data["batch"], data["sequence_lengths"], data["dtypes"]) == (16, [64], ["float32"])
    assert data["attention"] == ["plain"]
    assert (
        ": batch 1,024, sequence 64, bfloat16, attention cudnn, remat" in ask(on=("h100:8",), global_batch_size=1024)[0]
    )
    text, data = ask(workload="resnet-nano", on=("h100:8",), global_batch_size=None)
    assert re.search(r"\): batch \d+, bfloat16, remat", text.splitlines()[0]) and data["sequence_lengths"] == []
    assert "attention" not in text.splitlines()[0]


def test_the_order_of_a_table_is_explained(answered: tuple[str, dict[str, Any]]) -> None:
    best = search("mlp", "cpu:8").candidates[0]
    slower, faster = (dataclasses.replace(best, step_seconds=seconds) for seconds in (2.0, 1.9))
    assert ranked_text([faster, slower]) == "ranked by step time:"
    assigned = dataclasses.replace(faster, assigned=best.assignment)
    assert ranked_text([slower, assigned]) == "ranked by step time; assignments in parentheses as if 10 % slower:"
    assert ranked_text([assigned, slower]) == "ranked by step time:"
    repeating = dataclasses.replace(faster, repeats_most=True)
    assert ranked_text([slower, repeating]).endswith("; layouts that repeat most FLOPs as if 50 % slower:")
    staged = dataclasses.replace(faster, num_stages=2)
    assert re.fullmatch(r"ranked by step time; stages as if \d+ % slower:", ranked_text([slower, staged]))


TABLES = [("mlp", "cpu:8"), ("vit", "cpu:4"), ("vit-scan", "a100:2x2")]


@pytest.mark.parametrize("name, on", sampled(TABLES, TABLES[:1]))
def test_rows_of_the_table_are_distinct(name: str, on: str) -> None:
    """Also those of sequence parallelism in a model without sequences: it would be the same layout under two names."""
    searched = search(name, on)
    text = search_text(summarize(searched), 1000)
    rows = text.partition("ranked by step time:\n")[2].partition("\n\n")[0].splitlines()[1:]
    assert len(set(rows)) == len(rows) == len(searched.candidates) > 50
    priced = {
        dataclasses.replace(candidate, layout="", sequence=False) for candidate in map(hashable, searched.candidates)
    }
    assert len(priced) == len(rows)


@functools.cache
def search(name: str, on: str) -> Search:
    return spanax.search(zoo_program(name), on, top=1000)


def hashable(candidate: Candidate) -> Candidate:
    changes: Any = {name: tuple(getattr(candidate, name).items()) for name in ("seconds", "memory", "hidden")}
    return dataclasses.replace(candidate, **changes)


def test_rows_that_differ_in_chunks_alone_are_distinct() -> None:
    searched = search("gpt", "a100:2x2")
    staged = next(candidate for candidate in searched.candidates if candidate.num_stages == 2)
    two = dataclasses.replace(staged, schedule="interleaved", num_chunks=2)
    rows = dataclasses.replace(searched, candidates=(two, dataclasses.replace(two, num_chunks=3)))
    text = search_text(dataclasses.replace(summarize(searched), search=rows), 2)
    assert text.count(f"{two.num_stages} interleaved, 2 chunks  ") == 1
    assert text.count(f"{two.num_stages} interleaved, 3 chunks  ") == 1


def test_memory_is_in_binary_units(answered: tuple[str, dict[str, Any]]) -> None:
    moved = next(line for line in answered[0].splitlines() if line.startswith("  moved"))
    size = answered[1]["best"]["collectives"]["fsdp"]["all-gather"]
    assert f"all-gather over fsdp {bytes_text(size)}" in moved and not re.search(r"\d [kMGT]B\b", answered[0])


@pytest.mark.slow
def test_simulated_devices_have_no_stages_and_rented_ones_may() -> None:
    assert all(candidate["stages"] == 1 for candidate in ask(top=50, remat="none")[1]["candidates"])
    staged = ask(on=("a100:2x2",), top=200, remat="none", pipeline=True)[1]["candidates"]
    assert any(candidate["stages"] > 1 for candidate in staged)
    assert all(candidate["stages"] == 1 for candidate in ask(on=("a100:2x2",), top=200, remat="none")[1]["candidates"])


def test_if_nothing_fits_the_nearest_layouts_are_reported() -> None:
    reply = answer(with_flags(SMALL, workload="llama3-8b", on=("l4:2",), global_batch_size=2, remat="full"))
    text, data = reply.text, reply.data
    assert reply.exit_code == 2 and data["best"] is None and data["nearest"][0]["memory"]["peak"] > data["usable_bytes"]
    assert text.startswith("nothing fits") and "needs" in text and "left out" in text


def test_a_requested_layout_is_compared_with_the_best() -> None:
    text, data = ask(layout="tensor", mesh="model=8", remat="none")
    assert data["best"]["mesh"] == {"model": 8} and any("longer than" in line for line in data["warnings"])
    assert "note: tensor" in text


@pytest.mark.parametrize(
    "on, layout, mesh, schedule, whole",
    [
        ("cpu:8", "pipeline+tensor", None, None, {"pipe": 2, "model": 4}),
        ("cpu:8", "3d", "pipe=2,data=2,model=2", "zero-bubble", {"pipe": 2, "data": 2, "model": 2}),
        ("v5e:2x4", None, "pipe=2,fsdp=4", "gpipe", {"pipe": 2, "fsdp": 4}),
        ("h100:2x4", "pipeline+data+zero1", None, "interleaved", {"pipe": 2, "data": 2, "fsdp": 2}),
    ],
)
def test_requested_stages_are_priced_as_they_are_planned(
    tmp_path: Path, on: str, layout: str | None, mesh: str | None, schedule: str | None, whole: dict[str, int]
) -> None:
    asked = functools.partial(ask, on=(on,), remat="none", pipeline_schedule=schedule)
    text, data = asked(layout=layout, mesh=mesh, out=tmp_path / "plan.json")
    best = data["best"]
    assert (best["stages"], best["mesh"]) == (2, whole) and "longer than the best, " in text
    where = {"cpu:8": "inside a node", "v5e:2x4": "inside a slice", "h100:2x4": "across nodes"}[on]
    assert f"layers are partitioned into 2 stages {where}" in best["rule"]
    plan = spanax.Plan.load(tmp_path / "plan.json")
    assert (plan.schedule.num_stages, plan.schedule.microbatches) == (2, best["microbatches"])
    named = text.splitlines()[0].partition(" on ")[0]
    assert (named, dict(plan.mesh.axes)) == (best["layout"], whole) and named == plan.layout.name
    assert f"{best['microbatches']} microbatches, 2 stages {schedule or '1f1b'}" in text.splitlines()[0]
    again, _ = asked(layout=best["layout"], mesh=str(plan.mesh))
    assert again.splitlines()[0] == text.splitlines()[0]
    assert plan.price is not None and best["collectives"] == plan.price.moved
    assert best["collectives"]["pipe"]["collective-permute"] > 0
    assert plan.price.step_seconds == pytest.approx(best["step_seconds"])


def test_two_plans_differ_in_cost_and_placement(tmp_path: Path) -> None:
    first, second = tmp_path / "tensor.json", tmp_path / "fsdp.json"
    ask(layout="tensor", mesh="model=8", remat="none", out=first)
    ask(layout="fsdp", mesh="fsdp=8", remat="none", out=second)
    reply = answer(PlanCommand(diff=(first, second)))
    lines = [" ".join(line.split()) for line in reply.text.splitlines()]
    starts = ("tensor on model=8 fsdp on fsdp=8", "seconds step", "memory peak", "what moves all-gather over fsdp: ")
    for start in starts:
        assert any(line.startswith(start) for line in lines), start
    assert any(re.fullmatch(r"bytes moved all-gather over fsdp 0 B .* MiB", line) for line in lines)
    assert "layout: tensor -> fsdp" in lines and lines[-len(reply.data["changes"]) :] == reply.data["changes"]
    same = answer(PlanCommand(diff=(first, first)))
    assert same.text == "the plans are the same" and not same.data["changes"]


def test_a_complete_training_run() -> None:
    _, data = ask(tokens=1e9, budget_hours=1e9, layout="fsdp", remat="none")
    steps = 1e9 / (16 * 64)
    assert data["budget"]["hours"] == pytest.approx(steps * data["best"]["step_seconds"] / 3600)
    assert data["budget"]["device_hours"] == pytest.approx(8 * data["budget"]["hours"]) and data["budget"]["within"]
    assert ask(tokens=1e9, budget_hours=1e-9, layout="fsdp", remat="none")[1]["budget"]["within"] is False


@pytest.mark.parametrize(
    ("why", "schedule", "name", "problem"),
    [
        ("fsdp+tensor", None, "fsdp+tensor on fsdp=4,model=2", ""),
        ("data=2,fsdp=4", None, "hsdp on data=2,fsdp=4", ""),
        ("pipeline", None, "pipeline on pipe=2,data=4", ""),
        ("pipeline+fsdp", "interleaved", "pipeline+fsdp on pipe=2,fsdp=4", ""),
        ("data=3", None, "", "needs 3 devices"),
    ],
)
def test_a_layout_is_shown_beside_the_best(why: str, schedule: str | None, name: str, problem: str) -> None:
    text, data = ask(why=why, pipeline_schedule=schedule, remat="none", loss_chunks=4)
    answer, best = data["why"], data["best"]
    assert problem in answer["problem"] and bool(answer["problem"]) == bool(problem) == ("rows" not in answer)
    if problem:
        return
    assert answer["plans"][1] == name and name in text and "difference" in text
    assert (schedule or "") in answer["schedules"][1]
    rows = {(row["group"], row["term"]): row for row in answer["rows"]}
    assert rows["seconds", "step"]["first"] == best["step_seconds"] < rows["seconds", "step"]["second"]
    moved = {term: row["first"] for (group, term), row in rows.items() if group == "bytes moved" and row["first"]}
    assert moved == bytes_by_collective(best["collectives"])
    for group, total in (("seconds", "step"), ("memory", "peak")):
        for side in ("first", "second"):
            terms = [row[side] for (each, term), row in rows.items() if each == group and term != total]
            assert sum(terms) == pytest.approx(rows[group, total][side])


@pytest.mark.parametrize(
    ("why", "terms"),
    [
        (
            "fsdp+tensor",
            [
                r"all-gather over fsdp: forward blocks\.up\.kernel",
                r"all-gather over fsdp: backward blocks\.up\.kernel",
                r"all-reduce over model: forward batch,seq,embed at gpt\.py:\d+ \(Block.__call__\)",
            ],
        ),
        (
            "pipeline",
            [
                r"all-reduce over data: backward blocks\.up\.kernel",
                r"collective-permute over pipe: forward batch,seq,embed",
                r"collective-permute over pipe: backward batch,seq,embed at gpt\.py:\d+ \(GPT.__call__\)",
            ],
        ),
    ],
)
def test_what_moves_is_named_by_its_path_or_line(why: str, terms: list[str]) -> None:
    """The bytes by value sum to those by collective, also those that stages send to each other."""
    text, data = ask(on=("h100:8",), why=why)
    rows = data["why"]["rows"]
    sums = [(row["term"], row["second"]) for row in rows if row["group"] == "bytes moved"]
    for name, size in sums:
        parts = {
            row["term"]: row["second"]
            for row in rows
            if row["group"] == "what moves" and row["term"].startswith(f"{name}: ")
        }
        assert sum(parts.values()) == pytest.approx(size, abs=len(parts)), name
    moved = {row["term"] for row in rows if row["group"] == "what moves" and row["second"]}
    for line in terms:
        assert any(re.match(line, term) for term in moved), (line, moved)
    assert not any(name in term for name in ("stack.py", "accumulation.py") for term in moved)
    assert not any(re.search(r"\), | more$|kernel, ", term) for term in moved), "each value has its own row"
    shown = re.findall(r"^what moves +(.+?): .* ([+-][\d.]+) (\w+)$", text, re.MULTILINE)
    passes = {re.sub(r": (\w+) .*", r": \1 ", row["term"]) for row in rows if row["group"] == "what moves"}
    assert all(each in text for each in passes), "each collective has a row of each pass"
    units = MEASURES["bytes"].units
    for row in (row for row in rows if row["group"] == "bytes moved"):
        more = sum(float(number) * units[unit] for name, number, unit in shown if name == row["term"])
        assert more == pytest.approx(row["second"] - row["first"], rel=0.01, abs=8), f"the rows of {row['term']} add up"


def test_the_seconds_of_a_term_are_those_of_what_it_computes() -> None:
    _, data = ask(on=("h100:2x4",), why="pipeline")
    rows = data["why"]["rows"]
    for term in ("matmuls", "memory", "kernel starts", "update"):
        for side in ("first", "second"):
            (total,) = [row[side] for row in rows if (row["group"], row["term"]) == ("seconds", term)]
            parts = [row[side] for row in rows if row["group"] == "seconds of" and row["term"].startswith(f"{term}: ")]
            assert sum(parts) == pytest.approx(total), term
    of_head = r"matmuls: forward batch,seq,vocab at gpt\.py:\d+ \(GPT.__call__\)"
    assert any(re.fullmatch(of_head, row["term"]) for row in rows)


def test_the_fewest_devices() -> None:
    text, data = ask(
        workload="gpt2-xl", on=("l4:8",), global_batch_size=64, solve_for="devices", remat="full", layout="fsdp"
    )
    assert text.startswith(f"the fewest l4 on which it fits are {data['answer']}; --solve-for offloads on request only")
    assert data["of"] == "devices" and data["answer"] == data["devices"]
    with pytest.raises(SpanaxError, match="needs --tokens"):
        ask(budget_hours=1.0)


def test_a_fixed_number_of_microbatches(tmp_path: Path) -> None:
    _, data = ask(microbatches=4, global_batch_size=64, layout="fsdp", remat="none", out=tmp_path / "plan.json")
    assert {candidate["microbatches"] for candidate in data["candidates"]} == {data["best"]["microbatches"]} == {4}
    assert Plan.load(tmp_path / "plan.json").schedule.microbatches == 4
    sizes = {"global_batch_size": 256, "seq_len": 4096}
    _, data = ask(microbatches=2, layout="data", on=("l4:1",), solve_for="batch", remat="none", **sizes)
    assert data["best"]["microbatches"] == 2
    with pytest.raises(SpanaxError, match="3 microbatches do not divide the batch of 16"):
        ask(microbatches=3)
    with pytest.raises(SpanaxError, match="--microbatches is 0"):
        ask(microbatches=0)


def test_one_array_explained() -> None:
    text, data = ask(explain="blocks.up.kernel", layout="fsdp", remat="none")
    assert data["explained"]["path"] == "blocks.up.kernel" and "fsdp" in str(data["explained"]["spec"])
    assert "blocks.up.kernel float32[4, 128, 512]" in text
    (moved,) = data["explained"]["collectives"].values()
    assert set(moved) == {"all-gather", "reduce-scatter"} and "all-gather over fsdp" in text
    with pytest.raises(SpanaxError, match="did you mean 'blocks.up.kernel'"):
        ask(explain="blocks.up.kernl", layout="fsdp", remat="none")


@pytest.mark.slow
def test_a_plan_searched_for_simulated_devices_trains(
    devices: list[jax.Device], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    cli.main(["plan", "gpt-nano", "--on", "cpu:8", "--global-batch-size", "16", "--remat", "full", "--out", str(file)])
    plan = Plan.load(file)
    assert plan.schedule.remat == "full" and plan.why
    args = f"train gpt-nano --global-batch-size 16 --steps 2 --plan {file} --output-dir {tmp_path}/run --eval-batches 1"
    cli.main(args.split())
    assert plan.layout.name in capsys.readouterr().out
    events = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert events[-1]["event"] == "done" and events[0]["layout"] == plan.layout.name


def test_a_searched_plan_with_stages_runs() -> None:
    from spanax.plan.candidate import plan_of
    from spanax.plan.place import as_planned

    found = search("gpt", "a100:2x2")
    staged = next(each for each in found.candidates if each.num_stages > 1 and each.num_chunks == 1)
    plan = plan_of(found, staged)
    assert plan.mesh.ways(["pipe"]) == staged.num_stages and plan.mesh.size == 4
    assert plan.layout.splits("pipe") == ("layers",)
    assert as_planned(found.program_of(staged), plan).microbatches == staged.microbatches
