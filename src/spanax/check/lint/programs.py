"""Lint rules on the program: unrolled layers, replicated kernels, matmuls in float32, and the training signal."""

import re
from collections import defaultdict
from collections.abc import Iterator

from spanax.check.lint.subject import LintSubject, Message
from spanax.plan.place import resolver_of
from spanax.plan.sharding.own_kernels import gathered
from spanax.plan.sharding.resolve import Constraints, axes_of
from spanax.plan.spmd.count_terms import count_terms
from spanax.plan.spmd.sharded_program import ShardedProgram
from spanax.trace.analysis.training_signal import Flaw
from spanax.trace.jaxpr.dim_maps.table import OPAQUE_KERNELS
from spanax.trace.jaxpr.graph import OWN_KERNEL

MANY_LAYERS = 8
"""Unrolled equal layers are reported from this number; compilation may then take minutes."""


def unrolled_layers(subject: LintSubject) -> Iterator[Message]:
    """The program has many equal layers that are compiled one by one instead of in one scan."""
    numbers: dict[str, set[str]] = defaultdict(set)
    for leaf in subject.plan.leaves:
        if leaf.kind == "param":
            for number in re.finditer(r"(?<=\.)\d+(?=\.)", leaf.path):
                name = f"{leaf.path[: number.start()]}*{leaf.path[number.end() :]} {leaf.shape}"
                numbers[name].add(number.group())
    layers = max(numbers.items(), key=lambda item: len(item[1]), default=("", set[str]()))
    if len(layers[1]) >= MANY_LAYERS:
        path = layers[0].partition("*")[0].rstrip(".")
        yield Message(
            path,
            f"`{path}` has {len(layers[1])} equal layers that are compiled one by one.",
            "build=lambda rngs: spanax.stack(MyModel(rngs)), or a spanax.Stack in the model",
        )


def replicated_kernels(subject: LintSubject) -> Iterator[Message]:
    """A kernel (Pallas, Mosaic, FFI) needs whole operands that the plan shards, for lack of `spanax.partition_like`."""
    step = subject.program.step
    mesh = subject.plan.mesh
    constraints = Constraints(resolver_of(subject.program, subject.plan), step)
    for op in step.graph.ops():
        if op.name == OWN_KERNEL:
            for reason, num_bytes in gathered(step.graph, op, constraints, mesh).items():
                yield Message(
                    "",
                    f"the kernel `{op.params['run']}` at {op.where} gathers {reason}.",
                    "a layout that does not shard this dim, or a reference that computes it row by row",
                    int(num_bytes),
                )
        if op.name not in OPAQUE_KERNELS:
            continue
        axes = set[str]()
        total = 0.0
        for value in op.inputs:
            constraint = constraints[value]
            sharded = set[str]() if constraint is None else axes_of(constraint.spec)
            axes |= sharded
            total += step.graph.num_bytes(value) * (1 - 1 / mesh.ways(sorted(sharded)))
        if axes:
            yield Message(
                "",
                f"`{op.name}` at {op.where} runs replicated: {mesh.ways(sorted(axes))} devices gather its operands "
                "and repeat its work at every call.",
                "spanax.partition_like(kernel, reference), with the same function in operations of jax.numpy",
                int(total),
            )


def float32_matmuls(subject: LintSubject) -> Iterator[Message]:
    """Most FLOPs are in float32, on a chip that is at least twice as fast in bfloat16."""
    rates = subject.cluster.chip.peak_flops
    if subject.cluster.chip.shared or rates.get("bf16", 0.0) < 2 * rates.get("fp32", 1.0):
        return
    matmuls = count_terms(ShardedProgram(resolver_of(subject.program, subject.plan), subject.program.step)).matmuls
    flops: dict[str, float] = defaultdict(float)
    for dtype, count in zip(matmuls.dtypes, matmuls.flops * matmuls.runs, strict=True):
        flops[dtype] += count
    total = sum(flops.values())
    if total and flops["fp32"] > total / 2:
        speedup = rates["bf16"] / rates.get("fp32", rates["bf16"])
        yield Message(
            "",
            f"{100 * flops['fp32'] / total:.0f} % of the FLOPs are in float32; {subject.cluster.chip.name} is "
            f"{speedup:.0f} times as fast in bfloat16.",
            "compute_dtype=bfloat16; parameters stay in their own dtype",
        )


def no_gradient(subject: LintSubject) -> Iterator[Message]:
    """Every gradient is zero: the loss is constant, or computed from comparisons or integers."""
    yield from _messages(subject, Flaw.NO_GRADIENT)


def partial_gradient(subject: LintSubject) -> Iterator[Message]:
    """The loss uses parameters whose gradient is zero, because of a stop_gradient, an argmax, or an integer cast."""
    yield from _messages(subject, Flaw.NO_GRADIENT_IN_PART)


def batch_ignored(subject: LintSubject) -> Iterator[Message]:
    """The loss, or the update of the parameters, does not depend on the batch."""
    yield from _messages(subject, Flaw.NO_BATCH)


def constant_random_key(subject: LintSubject) -> Iterator[Message]:
    """Random numbers for the examples come from a constant key, such as an nnx.Rngs(0) created in the loss."""
    yield from _messages(subject, Flaw.SAME_NUMBERS)


def unused_parameters(subject: LintSubject) -> Iterator[Message]:
    """The optimizer updates parameters that the loss does not use."""
    yield from _messages(subject, Flaw.UNUSED)


def _messages(subject: LintSubject, flaw: Flaw) -> Iterator[Message]:
    for problem in subject.flaws:
        if problem.flaw is flaw:
            yield Message(problem.path, problem.message, problem.fix.rstrip("."))
