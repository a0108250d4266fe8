"""The corpus: every other file of this folder is a model as people write them, and nothing of Spanax in it.

A file has `build`, `batch(size)` and a `loss(model, batch)`, or a `train_step` of its own; it may have an `optimizer`
(an optax transformation), `optimizers` (a function from the model), `wrt` (what is trained), `mesh` (a function that
returns the mesh that it is written for), a `tolerance` for all that is compared, and `looser` for single arrays by the
end of their path. The small models of tests/zoo.py belong to the corpus, too.
"""

import functools
import importlib
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import spanax
import zoo
from spanax.plan.plan import Plan, Schedule
from spanax.trace.program import Program

FILES = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem not in ("corpus", "test_byo"))
STEPS, SIZE, MICROBATCHES = 3, 16, 4

# Adam divides by the size of a gradient, and so blows up the rounding of those near zero: eps is far above it here.
CALM = optax.adamw(1e-2, eps=0.1)

MESHES = {
    "data": "data=4", "zero1": "fsdp=4", "zero2": "fsdp=4", "fsdp": "fsdp=4", "hsdp": "data=2,fsdp=2",
    "tensor": "model=2", "data+tensor": "data=2,model=2", "fsdp+tensor": "fsdp=2,model=2",
    "fsdp+tensor+seq": "fsdp=2,model=2", "context": "data=2,context=2", "ring": "data=2,context=2",
    "ulysses": "data=2,context=2", "spatial": "data=2,context=2", "expert": "data=2,expert=2",
    "pipeline": "pipe=2,data=2", "pipeline+tensor": "pipe=2,model=2", "3d": "pipe=2,data=2,model=2",
}  # fmt: skip
"""Every preset on a mesh as small as it gets."""


def model(name: str) -> Any:
    """A model of the corpus, with its loss and its data as attributes."""
    return importlib.import_module(f"byo.{name}") if name in FILES else zoo.ZOO[name]


def microbatches(preset: str) -> int:
    return MICROBATCHES if "pipe" in MESHES[preset] else 1


def optimizer(name: str) -> Any:
    """What `spanax.trace` takes, and makes an `nnx.Optimizer` of the model."""
    case = model(name)
    if hasattr(case, "optimizers"):
        return case.optimizers
    inputs = getattr(case, "optimizer", CALM)
    chosen, wrt = CALM if inputs is zoo.ADAMW else inputs, getattr(case, "wrt", nnx.Param)
    return lambda model: nnx.Optimizer(model, chosen, wrt=wrt)


@functools.cache
def program(name: str, count: int = 1) -> Program:
    """A model of the corpus, traced."""
    case = model(name)
    step = {"train_step": case.train_step} if hasattr(case, "train_step") else {"loss": case.loss}
    arguments = {"build": case.build, "optimizer": optimizer(name), "batch": case.batch(SIZE)}
    with under_its_mesh(case):
        return spanax.trace(**arguments, microbatches=count, **step)


def under_its_mesh(case: Any) -> AbstractContextManager[Any]:
    """The mesh that a model is written for, if it is written for one."""
    return jax.set_mesh(case.mesh()) if hasattr(case, "mesh") else nullcontext()


def planned(name: str, preset: str) -> Plan:
    mesh, count = MESHES[preset], microbatches(preset)
    asked = {"schedule": Schedule(pipeline="1f1b", microbatches=count)} if count > 1 else {}
    cluster = spanax.cluster("cpu", spanax.MeshShape.of(mesh).size)
    return spanax.plan(program(name, 1), cluster, layout=preset, mesh=mesh, **asked)


def batch(name: str, step: int) -> Any:
    rows = model(name).batch(STEPS * SIZE)
    return jax.tree.map(lambda leaf: leaf[step * SIZE : (step + 1) * SIZE], rows)


def numbers(array: jax.Array) -> np.ndarray:
    is_key = jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)
    host = np.asarray(jax.random.key_data(array) if is_key else array)
    return host.astype(np.complex128 if host.dtype.kind == "c" else np.float64)


def trained_without_spanax(name: str, born: list[jax.Array]) -> dict[str, np.ndarray]:
    """The losses, and the state after the last step, of an ordinary loop of NNX on one device."""
    case, built = model(name), program(name)
    module, state = built.variables.merge(born)

    def loss(module: Any, batch: Any) -> Any:
        returned = case.loss(module, batch)
        return returned if isinstance(returned, tuple) else (returned, {})

    @nnx.jit
    def step(module: Any, state: Any, batch: Any) -> Any:
        if hasattr(case, "train_step"):
            return case.train_step(module, state, batch)["loss"]
        trained = nnx.DiffState(0, getattr(case, "wrt", nnx.Param))
        (value, _), grads = nnx.value_and_grad(loss, argnums=trained, has_aux=True)(module, batch)
        state.update(module, grads)
        return value

    with under_its_mesh(case):
        losses = [float(step(module, state, batch(name, index))) for index in range(STEPS)]
    nnx.pop(module, nnx.Intermediate)
    arrays = jax.tree.leaves(nnx.split((module, state))[1])
    result = {leaf.path: numbers(array) for leaf, array in zip(built.leaves, arrays, strict=True)}
    return {"loss": np.array(losses)} | result
