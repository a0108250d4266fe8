"""Traces the function that computes the initial state of model and optimizer."""

import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend import core

from spanax.compat import unsharded_tracers
from spanax.errors import BuildError, SpanaxError
from spanax.frames import is_library
from spanax.trace.user_function import READS
from spanax.trace.user_mesh import UserMesh, off_mesh, outside_meshes
from spanax.trace.variables import (
    OPTIMIZER,
    Owner,
    Variables,
    model_of,
    optimizer_of,
    plain_variables,
    take_apart,
    traced_as_data,
)


@dataclass(frozen=True)
class Eager:
    """A `build` that runs eagerly on the host, with this seed."""

    build: Callable[..., nnx.Module]
    seed: int = 0

    def model(self) -> nnx.Module:
        """Returns the model with concrete values.

        Raises:
          SpanaxError: JAX has no CPU backend.
        """
        try:
            (cpu, *_) = jax.local_devices(backend="cpu")
        except RuntimeError as error:
            raise BuildError(
                "eager_build=True runs `build` on the CPU, and JAX has no CPU backend here.",
                where=f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}",
                fix="add cpu to JAX_PLATFORMS, or trace `build` with eager_build=False",
            ) from error
        with jax.default_device(cpu):
            return model_of(self.build, self.seed)


@dataclass(frozen=True, eq=False)
class Initial:
    """The jaxpr that computes the initial values of a state.

    Its inputs are a seed or, where `build` runs eagerly, the arrays of the model.
    """

    jaxpr: core.ClosedJaxpr
    eager: Eager | None

    @property
    def seed(self) -> int | None:
        """Returns the seed that `build` ran with, or None if it is traced."""
        return None if self.eager is None else self.eager.seed

    @property
    def meta(self) -> dict[str, int]:
        """Returns the metadata that a checkpoint needs to rebuild the program."""
        return {} if self.eager is None else {"build_seed": self.eager.seed}

    def inputs(self, seed: int) -> list[Any]:
        """Returns the inputs of the jaxpr for a seed.

        Raises:
          SpanaxError: an eager `build` created arrays of other shapes or dtypes than when it was traced.
        """
        if self.eager is None:
            return [np.uint32(seed)]
        model = replace(self.eager, seed=seed).model()
        arrays = [jnp.asarray(off_mesh(value)) for value in jax.tree.leaves(nnx.split(model)[1])]
        expected = [(aval.shape, aval.dtype) for aval in self.jaxpr.in_avals]
        if [(array.shape, array.dtype) for array in arrays] != expected:
            raise BuildError(
                f"`build` created {len(expected)} arrays when it was traced, and different ones when it ran again.",
                where=f"seed={seed}",
                fix="a build that depends on the seed alone",
            )
        return arrays


@outside_meshes
@unsharded_tracers()
def initial(build: Callable[..., nnx.Module] | Eager, optimizer: Any, mesh: UserMesh) -> tuple[Variables, Initial]:
    """Returns the variables of the state, and the function that computes its initial values.

    Raises:
      SpanaxError: `build` or `optimizer` reads the value of an array that is traced.
    """
    # make_jaxpr returns only arrays; the structure is appended here, once.
    structures: list[Variables] = []

    def with_optimizer(model: nnx.Module) -> list[Any]:
        with _reading("optimizer", "read it in `build`, with eager_build=True, and store it in the model"):
            variables, values = take_apart(
                [Owner(model), Owner(optimizer_of(model, optimizer), OPTIMIZER, is_optimizer=True, name=OPTIMIZER)]
            )
        structures.append(variables)
        return values

    def from_seed(build: Callable[..., nnx.Module], seed: Any) -> list[Any]:
        with _reading("build", "eager_build=True in spanax.trace or spanax.Workload runs `build` on the host"):
            model = model_of(build, seed)
        return with_optimizer(model)

    if not isinstance(build, Eager):
        jaxpr = jax.make_jaxpr(UserMesh(mesh.mesh).traced(partial(from_seed, build)))(
            jax.ShapeDtypeStruct((), "uint32")
        )
        return structures[0], Initial(jaxpr, None)
    graphdef, state = nnx.split(build.model())
    arrays, treedef = jax.tree.flatten(state)

    def from_arrays(*arrays: Any) -> list[Any]:
        return with_optimizer(nnx.merge(graphdef, jax.tree.unflatten(treedef, arrays), copy=True))

    avals = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in map(jax.typeof, arrays)]
    jaxpr = jax.make_jaxpr(UserMesh(mesh.mesh).traced(from_arrays))(*avals)
    return structures[0], Initial(jaxpr, build)


@outside_meshes
@unsharded_tracers()
def created(make_owners: Callable[[], Sequence[Owner]], name: str) -> tuple[Variables, core.ClosedJaxpr]:
    """Returns the variables of objects that a function creates, and the jaxpr that computes them; allocates nothing.

    Args:
      make_owners: creates the objects.
      name: what errors call it.

    Raises:
      SpanaxError: it reads the value of an array that is traced, or the objects have arrays that are not numbers.
    """
    structures: list[Variables] = []

    def values() -> list[Any]:
        with _reading(name, "compute it with NumPy, or load it into the created objects"):
            with plain_variables(), traced_as_data():
                variables, values = take_apart(make_owners())
        structures.append(variables)
        return values

    jaxpr = jax.make_jaxpr(values)()
    return structures[0], jaxpr


@contextmanager
def _reading(function: str, fix: str) -> Iterator[None]:
    """Converts reads of a traced value into an error with the line of the read, and adds a note to other errors."""
    try:
        yield
    except READS as error:
        raise BuildError(
            f"`{function}` reads the value of a traced array, and has none before the run starts.",
            where=_line(error),
            fix=fix,
        ) from error
    except SpanaxError:
        raise
    except Exception as error:
        # A library may fail on a traced array with another error; only the user knows whether it did.
        error.add_note(f"`{function}` is traced, so its arrays have no values. If it needs them: {fix}")
        raise


def _line(error: Exception) -> str:
    """Returns the innermost line of user code that raised."""
    frames = traceback.extract_tb(error.__traceback__)
    (last,) = [frame for frame in frames if not is_library(frame.filename)][-1:] or frames[-1:]
    return f"{Path(last.filename).name}:{last.lineno}, in {last.name}: {last.line}"
