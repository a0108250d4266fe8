"""Terms: the predicted communication of a layout, compared with XLA's program and with theory."""

import doctest
import functools
from collections import defaultdict
from typing import Any

import pytest

import hlo_bytes
import spanax
import zoo
from sampling import sampled
from spanax.models import gpt
from spanax.plan.evaluate import Moved, evaluate
from spanax.plan.place import resolver_of
from spanax.plan.plan import Schedule
from spanax.plan.sharding import operands, partition
from spanax.plan.spmd import count_terms, sharded_program
from spanax.train.run import Run

# A vocabulary so large that moving what was looked up in it takes less than moving the table.
GPT = gpt.GPTConfig(vocab_size=2048, seq_len=32, num_layers=2, num_heads=8, embed_dim=64, remat=True)
CASES = {
    "gpt": zoo.Case(
        lambda rngs: gpt.GPT(GPT, rngs), gpt.loss, zoo.batches(inputs=zoo.ints(2048, 32), targets=zoo.ints(2048, 32))
    ),
    "cnn": zoo.ZOO["cnn"],
    "moe": zoo.ZOO["moe"],
    "mixtral": zoo.ZOO["mixtral"],
    "indexed-moe": zoo.ZOO["indexed-moe"],
}
CELLS = [
    ("gpt", "fsdp", "fsdp=8"),
    ("gpt", "zero2", "data=2,fsdp=4"),
    ("gpt", "tensor+seq", "data=2,model=4"),
    ("gpt", "", "data=2,fsdp=2,context=2"),
    ("cnn", "hsdp", "data=2,fsdp=4"),
    ("moe", "expert", "data=4,expert=2"),
    ("moe", "expert", "expert=8"),
    ("mixtral", "", "expert=4,context=2"),
    ("mixtral", "expert", "data=2,expert=4"),
    ("moe", "", "expert=4,model=2"),
    ("indexed-moe", "expert", "data=2,expert=4"),
    ("moe", "tensor", "model=8"),
]
MERGED_BYTES, MERGED_SHARE = 128, 2e-3
"""XLA makes one of equal sums of single numbers, and may sum a bias's gradient where all of it is at hand."""


@functools.cache
def planned(model: str, layout: str, mesh: str) -> tuple[spanax.Program, spanax.Plan]:
    case = CASES[model]
    program = spanax.trace(build=case.build, optimizer=case.optimizer, batch=case.batch(16), loss=case.loss)
    return program, spanax.plan(program, spanax.cluster("cpu:8"), layout=layout or None, mesh=mesh)


def predicted(model: str, layout: str, mesh: str) -> dict[tuple[str, str], float]:
    program, plan = planned(model, layout, mesh)
    return count_terms.count_terms(
        sharded_program.ShardedProgram(resolver_of(program, plan), program.step)
    ).moved_bytes(plan.mesh)


@functools.cache
def compiled(model: str, layout: str, mesh: str) -> dict[tuple[str, str], int]:
    program, plan = planned(model, layout, mesh)
    text = Run(program, plan, plan.mesh.build(), state=[]).lower().compile().as_text()
    return hlo_bytes.by_axis(text, dict(plan.mesh.axes))


def apart(cell: tuple[str, str, str]) -> dict[tuple[str, str], tuple[float, float]]:
    """Predicted and compiled bytes by kind and axes, where they are not the same."""
    ours, theirs = defaultdict[tuple[str, str], float](float), compiled(*cell)
    for (kind, axes), num_bytes in predicted(*cell).items():
        if kind == "reduce-scatter":  # XLA writes it on CPU as an all-reduce, and slices
            kind, num_bytes = "all-reduce", num_bytes * planned(*cell)[1].mesh.ways(axes.split("+"))
        ours[kind, axes] += num_bytes
    both = {key: (ours.get(key, 0), theirs.get(key, 0)) for key in {*ours, *theirs}}
    return {key: result for key, result in both.items() if not is_close(*result)}


def is_close(predicted: float, compiled: float) -> bool:
    return abs(predicted - compiled) <= max(MERGED_BYTES, MERGED_SHARE * compiled)


# The cells of which something is left out below, and the two hardest; `slow` is all of them.
QUICK = [*CELLS[:4], CELLS[5], *CELLS[7:9]]


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("cell", sampled([(cell,) for cell in CELLS], [(cell,) for cell in QUICK]), ids=" ".join)
def test_predicted_communication_equals_that_of_xla(cell: tuple[str, str, str]) -> None:
    assert apart(cell) == {}
    assert sum(compiled(*cell).values()) > 10_000


def gathered_again(
    counter: count_terms._TermCounter, group: count_terms.OpGroup, shift: partition.Reshard, key: tuple[Any, ...] | None
) -> count_terms.Move:
    return count_terms.Move(key, group.runs)


def unsummed(*args: object, **kwargs: object) -> list[partition.Reshard]:
    return []


BREAKAGES = [
    (sharded_program, "operand_sharding", lambda *args: None, ("gpt", "fsdp", "fsdp=8")),
    (count_terms._TermCounter, "_moved", gathered_again, ("gpt", "tensor+seq", "data=2,model=4")),
    (count_terms._TermCounter, "add_ends", lambda tally: None, ("gpt", "zero2", "data=2,fsdp=4")),
    (partition, "reductions", unsummed, ("moe", "expert", "data=4,expert=2")),
    (sharded_program, "transition", unsummed, ("moe", "expert", "data=4,expert=2")),
]


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("where, name, broken, cell", BREAKAGES, ids=lambda part: part if type(part) is str else "")
def test_an_omitted_cost_term_is_detected(
    where: object, name: str, broken: object, cell: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, broken)
    assert apart(cell)


def test_fsdp_gathers_weights_twice_and_scatters_their_gradients_once() -> None:
    """Source: Rajbhandari et al., "ZeRO", 2020 (arXiv 1910.02054), section 7.2: three times the parameters."""
    program, plan = planned("gpt", "fsdp", "fsdp=8")
    moved = predicted("gpt", "fsdp", "fsdp=8")
    in_layers = sum(leaf.num_bytes for leaf in program.leaves if leaf.path.startswith("blocks."))
    (around,) = (leaf.num_bytes for leaf in program.leaves if leaf.path == "positions")
    (norm,) = (leaf.num_bytes for leaf in program.leaves if leaf.path == "norm.scale")
    (table,) = (leaf.num_bytes for leaf in program.leaves if leaf.path == "embed")
    scattered = in_layers + around + 2 * norm + table
    assert moved["reduce-scatter", "fsdp"] == scattered / 8
    assert moved["all-gather", "fsdp"] - (in_layers + scattered) < 0.02 * scattered
    # What was looked up, and its gradient, go instead of the table and its own.
    looked_up = 16 * GPT.seq_len * GPT.embed_dim * 4 / 8
    assert moved["all-to-all", "fsdp"] == 2 * looked_up


def test_a_table_smaller_than_its_rows_is_gathered() -> None:
    """If its rows were sharded, each device would look up some of them, and the results would be summed."""
    program, _ = planned("moe", "tensor", "model=8")
    (table,) = (leaf.num_bytes for leaf in program.leaves if leaf.path == "embed.embedding")
    moved = predicted("moe", "tensor", "model=8")
    looked_up = 16 * 32 * 32 * 4
    assert looked_up == 4 * table and moved["all-gather", "model"] <= 2 * table
    strategies = operands.strategies
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operands, "strategies", lambda *arguments: strategies(*arguments)[:1])
        split = predicted("moe", "tensor", "model=8")
    assert split["all-reduce", "model"] == moved["all-reduce", "model"] + looked_up


@pytest.mark.parametrize(("layout", "kind"), [("fsdp", "reduce-scatter"), ("zero1", "all-gather")])
def test_the_traffic_of_weights_is_the_sum_over_leaves(layout: str, kind: str) -> None:
    program, plan = planned("gpt", layout, "fsdp=8")
    resolver, total = resolver_of(program, plan), 0.0
    for index, leaf in enumerate(program.leaves):
        if leaf.kind == "param":
            of_leaf = count_terms.count_terms(
                sharded_program.ShardedProgram(resolver, program.step), program.step.leaf_aliases(index)
            )
            total += of_leaf.moved_bytes(plan.mesh).get((kind, "fsdp"), 0.0)
    assert total > 0 and total == pytest.approx(predicted("gpt", layout, "fsdp=8")[kind, "fsdp"])


def test_per_step_costs_do_not_grow_with_microbatches() -> None:
    for layout, kind in (("zero1", "all-gather"), ("data", "all-reduce")):
        axes = "data" if layout == "data" else "fsdp"
        each, four = (moved_in(layout, f"{axes}=4", count)[axes][kind] for count in (1, 4))
        assert 0 < four <= each * 1.001
    each, four = (moved_in("fsdp", "fsdp=4", count)["fsdp"]["all-gather"] for count in (1, 4))
    assert four == pytest.approx(4 * each, rel=0.05)


def moved_in(layout: str, mesh: str, microbatches: int) -> Moved:
    program, _ = planned("gpt", "data", "data=8")
    machine = spanax.cluster("cpu:4")
    plan = spanax.plan(program, machine, layout=layout, mesh=mesh, schedule=Schedule(microbatches=microbatches))
    return evaluate(program, plan, machine).collectives


def test_a_reader_of_hlo_that_reads() -> None:
    """The bytes above are compared with the output of this reader, whose examples run here."""
    result = doctest.testmod(hlo_bytes)
    assert result.attempted > 5 and not result.failed
