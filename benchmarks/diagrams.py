"""Writes the diagrams of the documentation, docs/images/*.svg, from plans of Spanax.

python benchmarks/diagrams.py [NAME ...]
"""

import argparse
import functools
import math
from collections.abc import Callable
from pathlib import Path

import spanax
from drawings.canvas import Diagram, svg_text
from drawings.collectives import collectives_diagram
from drawings.schedules import schedules_diagram
from drawings.shards import shards_diagram
from spanax.hardware.cluster import Cluster
from spanax.hardware.mesh import MeshShape
from spanax.models.workloads import load
from spanax.plan.evaluate import evaluate
from spanax.plan.pipeline.ticks import ticks
from spanax.plan.place import as_planned, resolver_of
from spanax.plan.plan import Plan
from spanax.plan.sharding.placement import Placement
from spanax.plan.sharding.resolve import Spec
from spanax.trace.program import Program

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
BATCH_SIZE = 16
UP = "blocks.up.kernel"
MOMENT = f"optimizer.opt_state.0.mu.{UP}"


@functools.cache
def traced(workload: str, batch_size: int = BATCH_SIZE) -> Program:
    return load(workload, batch_size=batch_size).trace(learning_rate=1e-4, num_steps=100, compute_dtype="bfloat16")


@functools.cache
def planned(layout: str, mesh: str, workload: str = "gpt-nano", attention: str = "plain") -> Plan:
    """The plan of a workload on a node of H100s."""
    return spanax.plan(traced(workload), machine(mesh), layout=layout, mesh=mesh, attention=attention)


def machine(mesh: str) -> Cluster:
    return spanax.cluster(f"h100:{MeshShape.of(mesh).size}")


def activation(plan: Plan, names: tuple[str, ...], path: str, workload: str = "gpt-nano") -> Placement:
    """The activation of a step with these axes: the largest that the plan places, in the step that it runs."""
    program = as_planned(traced(workload), plan)
    step, graph = program.step, program.step.graph
    constraints = resolver_of(traced(workload), plan).of(program).constraints(step)
    sizes = {
        value: math.prod(graph.shape(value))
        for value in range(len(graph.avals))
        if step.axes.of(value) == names and constraints[value] is not None
    }
    value = max(sizes, key=lambda value: sizes[value])
    return array(path, graph.shape(value), names, constraints[value].computed, plan.mesh, "bfloat16")


def array(
    path: str, shape: tuple[int, ...], axes: tuple[str, ...], spec: Spec, mesh: MeshShape, dtype: str = "float32"
) -> Placement:
    """Returns the placement of an array that a plan does not list."""
    local = tuple(size // mesh.ways(by) for size, by in zip(shape, spec, strict=True))
    num_bytes = math.prod(local) * {"bfloat16": 2, "float32": 4}[dtype]
    return Placement(path, tuple(shape), dtype, "activation", axes, spec, local, num_bytes, "")


def stored(layout: str, mesh: str, *paths: str, workload: str = "gpt-nano") -> Diagram:
    plan = planned(layout, mesh, workload)
    return shards_diagram([plan[path] for path in paths], plan.mesh, f"Layout {layout} on {mesh} ({workload})")


def moved(layout: str, mesh: str, workload: str = "gpt-nano", attention: str = "plain") -> Diagram:
    plan = planned(layout, mesh, workload, attention)
    price = evaluate(traced(workload), plan, machine(mesh)).prediction
    return collectives_diagram(price.moved, plan.mesh, f"Collectives of {layout} on {mesh} ({workload})")


def tensor(layout: str, mesh: str = "model=4") -> Diagram:
    plan = planned(layout, mesh)
    residual = activation(plan, ("batch", "seq", "embed"), "residual stream")
    hidden = activation(plan, ("batch", "seq", "mlp"), "inside the MLP")
    leaves = [residual, plan[UP], hidden, plan["blocks.down.kernel"]]
    return shards_diagram(leaves, plan.mesh, f"Layout {layout} on {mesh} (gpt-nano)")


def context(layout: str) -> Diagram:
    plan = planned(layout, "context=4")
    residual = activation(plan, ("batch", "seq", "embed"), "residual stream")
    return shards_diagram([plan["inputs"], residual, plan[UP]], plan.mesh, f"Layout {layout} on context=4 (gpt-nano)")


def specs() -> Diagram:
    """The specs of docs/by-hand.md."""
    mesh, dims = MeshShape.of("data=4,model=2"), ("rows", "columns")
    shown: list[Spec] = [(("data",), ()), (("data",), ("model",)), ((), ("model",)), (("data", "model"), ())]
    leaves = [array("x", (64, 32), dims, spec, mesh) for spec in shown]
    return shards_diagram(leaves, mesh, "Four specs on data=4,model=2")


def schedules() -> Diagram:
    """The schedules without chunks of docs/pipelines.md, with as many stages and microbatches as its table."""
    tables = [ticks(name, 4, 8) for name in ("gpipe", "1f1b", "zero-bubble")]
    return schedules_diagram(tables, "Schedules of 4 stages and 8 microbatches")


def interleaved() -> Diagram:
    tables = [ticks("1f1b", 4, 4), ticks("interleaved", 4, 4, 2)]
    return schedules_diagram(tables, "Interleaved stages, with 4 microbatches")


DIAGRAMS: dict[str, Callable[[], Diagram]] = {
    "specs": specs,
    "data": lambda: stored("data", "data=4", "inputs", UP, MOMENT),
    "data-collectives": lambda: moved("data", "data=4"),
    "fsdp": lambda: stored("fsdp", "fsdp=4", "inputs", UP, MOMENT),
    "fsdp-collectives": lambda: moved("fsdp", "fsdp=4"),
    "hsdp": lambda: stored("hsdp", "data=2,fsdp=4", "inputs", UP, MOMENT),
    "tensor": lambda: tensor("tensor"),
    "tensor-collectives": lambda: moved("tensor", "model=4"),
    "sequence": lambda: tensor("tensor+seq"),
    "sequence-collectives": lambda: moved("tensor+seq", "model=4"),
    "fsdp-tensor": lambda: stored("fsdp+tensor", "fsdp=4,model=2", "inputs", UP, "blocks.down.kernel"),
    "context": lambda: context("context"),
    "context-collectives": lambda: moved("context", "context=4"),
    "ring-collectives": lambda: moved("ring", "context=4"),
    "expert": lambda: stored(
        "expert", "expert=4", "inputs", "blocks.experts.up", "blocks.attention.q.kernel", workload="moe-nano"
    ),
    "expert-collectives": lambda: moved("expert", "expert=4", "moe-nano"),
    "pipeline": lambda: stored("pipeline", "pipe=4", "inputs", UP, "embed"),
    "pipeline-collectives": lambda: moved("pipeline", "pipe=4"),
    "schedules": schedules,
    "interleaved": interleaved,
}
"""By name of the file, the diagram."""


def draw(name: str) -> str:
    """Returns the SVG of a diagram."""
    return svg_text(DIAGRAMS[name]())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(DIAGRAMS)}; default: all")
    names = parser.parse_args().names or list(DIAGRAMS)
    if unknown := [name for name in names if name not in DIAGRAMS]:
        parser.error(f"unknown diagrams: {', '.join(unknown)}")
    for name in names:
        text = draw(name)
        (IMAGES / f"{name}.svg").write_text(text)
        print(f"{name}.svg: {len(text.encode()) / 1000:.1f} kB")


if __name__ == "__main__":
    main()
