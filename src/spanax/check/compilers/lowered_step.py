"""Program: the step of a plan lowered for a platform, without a device; what every level compiles, and its hash."""

import hashlib
import io
import re
from dataclasses import dataclass
from typing import Any

from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from spanax.hardware.mesh import MeshShape
from spanax.plan.plan import Plan
from spanax.plan.sharding.place import as_planned
from spanax.run.run import Run
from spanax.trace.program import Program


@dataclass(frozen=True, eq=False)
class Lowered:
    """A step as StableHLO with the plan's shardings in it.

    `code` is MLIR bytecode with source lines, `digest` the SHA-256 of the program without them.
    """

    module: Any
    code: bytes
    digest: str


def abstract_mesh(shape: MeshShape, platform: str) -> AbstractMesh:
    """A mesh of any size, without devices: no more is known of them than what JAX calls their platform.

    Example:
      >>> abstract_mesh(MeshShape.of("data=512,model=8"), "tpu").size
      4096
    """
    kinds = (AxisType.Auto,) * len(shape.axes)
    device = AbstractDevice(platform, None, platform)
    sizes = tuple(size for _, size in shape.axes)
    return AbstractMesh(sizes, shape.names, axis_types=kinds, abstract_device=device)


def lower(program: Program, plan: Plan, platform: str, *, devices: str = "", inputs_only: bool = False) -> Lowered:
    """The train step that a plan runs, lowered for `tpu`, `cuda` or `cpu`. Nothing is allocated, no device is asked.

    Args:
      program: what is trained.
      plan: how.
      platform: what it is lowered for.
      devices: what it is to run on, `tpu`, `gpu` or `cpu`, where another platform's compiler stands in for them.
      inputs_only: nothing but the state and the batch has a sharding in it.

    Raises:
      SpanaxError: the plan was made for another program, or cannot be run.
    """
    planned = as_planned(program, plan)
    mesh = abstract_mesh(plan.mesh, devices or ("gpu" if platform == "cuda" else platform))
    run = Run(planned, plan, mesh, state=[])  # type: ignore[arg-type]
    module = run.lower(platform, inputs_only=inputs_only).compiler_ir()
    code = io.BytesIO()
    module.operation.write_bytecode(code)
    plain = re.sub(r" loc\(.*?\)$", "", module.operation.get_asm(enable_debug_info=False), flags=re.MULTILINE)
    return Lowered(module, code.getvalue(), hashlib.sha256(plain.encode()).hexdigest())
