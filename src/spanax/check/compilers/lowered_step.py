"""Lowers the train step of a plan for a platform, without devices."""

import hashlib
import io
import re
from dataclasses import dataclass
from typing import Any

from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from spanax.hardware.mesh import MeshShape
from spanax.plan.place import as_planned
from spanax.plan.plan import Plan
from spanax.trace.program import Program
from spanax.train.run import Run


@dataclass(frozen=True, eq=False)
class Lowered:
    """A step as StableHLO with the plan's shardings.

    Attributes:
      module: the MLIR module.
      code: the module as MLIR bytecode, with source lines.
      digest: the SHA-256 of the module without source lines.
    """

    module: Any
    code: bytes
    digest: str


def abstract_mesh(shape: MeshShape, platform: str) -> AbstractMesh:
    """Returns a mesh without devices, for a JAX platform.

    Example:
      >>> abstract_mesh(MeshShape.of("data=512,model=8"), "tpu").size
      4096
    """
    kinds = (AxisType.Auto,) * len(shape.axes)
    device = AbstractDevice(platform, None, platform)
    sizes = tuple(size for _, size in shape.axes)
    return AbstractMesh(sizes, shape.names, axis_types=kinds, abstract_device=device)


def lower(program: Program, plan: Plan, platform: str, *, devices: str = "", inputs_only: bool = False) -> Lowered:
    """Returns the train step of a plan, lowered for `tpu`, `cuda` or `cpu`. Allocates nothing and uses no devices.

    Args:
      program: the program of the plan.
      plan: the plan.
      platform: the platform to lower for.
      devices: the platform to run on, `tpu`, `gpu` or `cpu`, if another platform's compiler simulates it.
      inputs_only: whether only the state and the batch have shardings.

    Raises:
      SpanaxError: the plan was made for another program, or cannot be run.
    """
    planned = as_planned(program, plan)
    mesh = abstract_mesh(plan.mesh, devices or ("gpu" if platform == "cuda" else platform))
    run = Run(planned, plan, mesh, state=[])  # type: ignore[arg-type]
    module = run.lower(platform, inputs_only=inputs_only).compiler_ir()
    code = io.BytesIO()
    module.operation.write_bytecode(code)
    text = re.sub(r" loc\(.*?\)$", "", module.operation.get_asm(enable_debug_info=False), flags=re.MULTILINE)
    return Lowered(module, code.getvalue(), hashlib.sha256(text.encode()).hexdigest())
