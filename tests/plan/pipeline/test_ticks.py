"""Ticks: the table of a schedule does every task once, after what it needs, and keeps what is still needed."""

import pytest

from spanax.plan.pipeline.bubble import num_in_flight, num_pending, step_seconds
from spanax.plan.pipeline.ticks import COLUMNS, NONE, Ticks, ticks

CASES = [
    (schedule, stages, count, 2 if schedule == "interleaved" else 1)
    for schedule in ("gpipe", "1f1b", "interleaved", "zero-bubble")
    for stages in (2, 3, 4)
    for count in (stages, 2 * stages, 4 * stages)
]


@pytest.fixture(params=CASES, ids=lambda case: "-".join(map(str, case)), scope="module")
def table(request: pytest.FixtureRequest) -> Ticks:
    return ticks(*request.param)


def test_every_task_runs_once_after_its_dependencies(table: Ticks) -> None:
    when = table._when
    parts, counts = range(table.num_parts), range(table.num_microbatches)
    kinds = "FBW" if table.is_split else "FB"
    assert set(when) == {(kind, m, part) for kind in kinds for m in counts for part in parts}
    for (kind, m, part), tick in when.items():
        if kind == "F" and part:
            assert when["F", m, part - 1] < tick
        if kind == "B":
            after = when["F", m, part] if part + 1 == table.num_parts else when["B", m, part + 1]
            assert after < tick
        if kind == "W":
            assert when["B", m, part] < tick


def test_ticks_and_idle_ticks_are_those_of_the_formula(table: Ticks) -> None:
    weights = 1.0 if table.is_split else 0.0
    counts = (table.num_stages, table.num_microbatches, table.num_chunks)
    seconds = step_seconds(table.schedule, *counts, weight_seconds=weights)
    assert table.num_ticks == int(seconds)
    work = table.num_microbatches * table.num_chunks * (3 if table.is_split else 2)
    assert table.num_idle == (table.num_ticks - work,) * table.num_stages
    assert table.bubble_fraction == pytest.approx(1 - work / table.num_ticks)


def test_the_number_of_stored_activations_equals_the_schedule(table: Ticks) -> None:
    counts = (table.num_stages, table.num_microbatches, table.num_chunks)
    assert table.num_in_flight == num_in_flight(table.schedule, *counts)


def test_a_slot_is_free_before_it_is_written_and_read_as_it_was_written(table: Ticks) -> None:
    column = {name: index for index, name in enumerate(COLUMNS)}
    slots: dict[tuple[str, int, int], tuple[int, int]] = {}
    for tick, row in enumerate(table.table):
        for stage, cells in enumerate(row):
            task = table.tasks[tick][stage]
            if task is None:
                assert cells[column["kind"]] == NONE
                continue
            index = (task.microbatch, task.chunk * table.num_stages + stage)
            if task.kind == "F":
                assert ("residual", stage, cells[column["residual"]]) not in slots
                slots["residual", stage, cells[column["residual"]]] = index
            else:
                assert slots["residual", stage, cells[column["residual"]]] == index
            if task.kind in "FB" and cells[column["received"]] != NONE:
                assert slots.pop((task.kind, stage, cells[column["received"]])) == index
            if cells[column["split"]] != NONE and task.kind == "B":
                assert slots.setdefault(("split", stage, cells[column["split"]]), index) == index
            if task.kind == "W":
                assert slots.pop(("split", stage, cells[column["split"]])) == index
            if task.kind == ("W" if table.is_split else "B"):
                del slots["residual", stage, cells[column["residual"]]]
        for stage, cells in enumerate(row):
            for kind, name, step in (("F", "arrives_forward", -1), ("B", "arrives_backward", 1), ("B", "seeds", 0)):
                slot = cells[column[name]]
                if slot == NONE:
                    continue
                source = (stage + step) % table.num_stages
                sent = table.tasks[tick][source]
                assert sent is not None and sent.kind == ("F" if name == "seeds" else kind)
                part = sent.chunk * table.num_stages + source
                arrived = part if name == "seeds" else part + (1 if kind == "F" else -1)
                assert (kind, stage, slot) not in slots
                slots[kind, stage, slot] = (sent.microbatch, arrived)
    assert not slots


def test_the_table_is_drawn() -> None:
    assert str(ticks("zero-bubble", 2, 2)).splitlines() == [
        "stage 0: F0 F1 .  B0 W0 B1 W1",
        "stage 1: .  F0 B0 F1 B1 W0 W1",
    ]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
@pytest.mark.parametrize(("stages", "count"), [(2, 4), (4, 4), (4, 16), (8, 16)])
def test_pending_weight_gradients_are_those_of_the_table(schedule: str, stages: int, count: int) -> None:
    table = ticks(schedule, stages, count, 2 if schedule == "interleaved" else 1)
    assert num_pending(schedule, stages, count) == max(table.num_split - 1, 0)
