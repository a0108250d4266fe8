"""Rules on the program, whatever the mesh: how it is written, and what it computes in."""

import re
from collections import defaultdict
from collections.abc import Iterator

from spanax.check.lint.message import Message
from spanax.check.lint.subject import LintSubject
from spanax.plan.sharding.place import resolver_of
from spanax.plan.spmd.count_terms import count_terms
from spanax.plan.spmd.sharded_program import ShardedProgram

MANY_LAYERS = 8
"""Equal layers, written out, from which on compiling takes minutes."""


def written_out(checked: LintSubject) -> Iterator[Message]:
    """Many equal layers stand in the program one after the other, and are compiled one by one."""
    found: dict[str, set[str]] = defaultdict(set)
    for leaf in checked.plan.leaves:
        if leaf.kind == "param":
            for number in re.finditer(r"(?<=\.)\d+(?=\.)", leaf.path):
                name = f"{leaf.path[: number.start()]}*{leaf.path[number.end() :]} {leaf.shape}"
                found[name].add(number.group())
    layers = max(found.items(), key=lambda item: len(item[1]), default=("", set[str]()))
    if len(layers[1]) >= MANY_LAYERS:
        path = layers[0].partition("*")[0].rstrip(".")
        yield Message(path, f"`{path}` holds {len(layers[1])} equal layers, compiled one by one.",
                   "build=lambda rngs: spanax.stack(MyModel(rngs)), or a spanax.Stack in the model")  # fmt: skip


def wide_matmuls(checked: LintSubject) -> Iterator[Message]:
    """Most of the arithmetic is in float32, and the chip is twice as fast in bfloat16, or more."""
    rates = checked.cluster.chip.peak_flops
    if checked.cluster.chip.shared or rates.get("bf16", 0.0) < 2 * rates.get("fp32", 1.0):
        return
    works = count_terms(ShardedProgram(resolver_of(checked.program, checked.plan), checked.program.step)).matmuls
    flops: dict[str, float] = defaultdict(float)
    for dtype, count in zip(works.dtypes, works.flops * works.runs, strict=True):
        flops[dtype] += count
    total = sum(flops.values())
    if total and flops["fp32"] > total / 2:
        gain = rates["bf16"] / rates.get("fp32", rates["bf16"])
        yield Message(
            "", f"{100 * flops['fp32'] / total:.0f} % of the FLOPs are in float32; {checked.cluster.chip.name} is "
            f"{gain:.0f} times as fast in bfloat16.", "compute_dtype=bfloat16; the parameters keep theirs",
        )  # fmt: skip
