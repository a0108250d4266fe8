"""`spanax.jit`: compiles a function of NNX objects, sharded over a mesh."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from spanax.errors import ArgumentError, ConflictError, check_type
from spanax.hardware.cluster import Cluster, cluster_of
from spanax.hardware.mesh import MeshShape
from spanax.jit.placement import LossOptions, SharedPlacement
from spanax.jit.sharded_function import LIKE, ShardedFunction
from spanax.plan.candidates.request import Request, pins_of
from spanax.plan.layout import Layout
from spanax.plan.plan import Plan
from spanax.plan.sharding.assign import Pins
from spanax.trace.batch import AUTO
from spanax.trace.rewrites.remat_policies import known_policy
from spanax.trace.variant import Variant


def jit(
    function: Callable[..., Any] | None = None,
    *,
    layout: str | Layout | None = None,
    mesh: Mapping[str, int] | str | MeshShape | Mesh | None = None,
    on: Cluster | str | None = None,
    pin: Pins | None = None,
    plan: Plan | None = None,
    remat: str | None = None,
    microbatches: int = 1,
    attention: str | None = None,
    loss_chunks: int | str | None = None,
    pad: str | Sequence[str] | None = None,
    like: ShardedFunction | None = None,
    donate: bool = True,
    static_argnums: int | Iterable[int] = (),
    static_argnames: str | Iterable[str] = (),
    batch_axes: Any = AUTO,
) -> Any:
    """Compiles a function of NNX objects and arrays, as `nnx.jit` does, with the objects sharded over a mesh.

    The first call traces the function, plans the sharding of every array, shards the objects in place, compiles, and
    runs. Later calls run the compiled function. After each call, the objects hold their new arrays, which are global
    `jax.Array`s: printing, saving, and other functions work with them as before.

    Args:
      function: a function of NNX objects and arrays, in any pytrees, by position or keyword. Arrays may be NumPy's,
        PyTorch's or JAX's.
      layout: as in `spanax.plan`.
      mesh: as in `spanax.plan`. Without layout and mesh, the fastest layout on all devices that fits.
      on: the devices to plan for; those of this process group by default.
      pin: as in `spanax.plan`.
      plan: a plan of this function, instead of a layout.
      remat: as in `spanax.trace`; this and the next three apply to losses differentiated by `spanax.value_and_grad`.
      microbatches: the number of microbatches over which gradients are accumulated.
      attention: as in `spanax.plan`.
      loss_chunks: as in `spanax.plan`.
      pad: as in `spanax.plan`; functions with `like` pad the same axes.
      like: another function whose mesh and layout this one shares, whichever runs first.
      donate: reuse the buffers of arrays that the function updates, and that only the objects hold. Without it, a call
        that fails on the devices leaves the objects as they were.
      static_argnums: the positions of arguments that are neither objects nor arrays, as in `nnx.jit`.
      static_argnames: their names.
      batch_axes: the dim with the examples of each array, as `in_axes` of `jax.vmap`: an int, None for none, or a
        sequence of these or of pytree prefixes, one for each parameter; those of objects are ignored. By default the
        function decides: dim 0, or the next one after the steps of a loop, as in `[steps, batch, ...]`.

    Raises:
      SpanaxError: the arguments contradict each other. A call raises it if the function cannot be sharded as requested;
        the objects are then unchanged.

    Example:
      >>> import numpy as np, optax
      >>> from flax import nnx
      >>> model = nnx.Linear(16, 32, rngs=nnx.Rngs(0))
      >>> optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
      >>> @jit(mesh="fsdp=8")
      ... def train_step(model, optimizer, x):
      ...     loss, gradients = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
      ...     optimizer.update(model, gradients)
      ...     return loss
      >>> first, second = (float(train_step(model, optimizer, np.ones((8, 16), "float32"))) for _ in range(2))
      >>> second < first, tuple(model.kernel.sharding.spec)
      (True, (None, 'fsdp'))
    """
    if function is None:
        return partial(
            jit, layout=layout, mesh=mesh, on=on, pin=pin, plan=plan, remat=remat, microbatches=microbatches,
            attention=attention, loss_chunks=loss_chunks, pad=pad, like=like, donate=donate,
            static_argnums=static_argnums, static_argnames=static_argnames, batch_axes=batch_axes,
        )  # fmt: skip
    request = Request(
        layout=layout, mesh=mesh, pins=pins_of(pin), pad=pad, offload=(), attention=attention, loss_chunks=loss_chunks
    )
    _check_types(plan, like, donate, microbatches)
    on = None if on is None else cluster_of(on, "on")
    others = {
        "layout": layout, "mesh": mesh, "on": on, "pin": pin, "pad": pad, "plan": plan if like is not None else None,
    }  # fmt: skip
    if (plan is not None or like is not None) and (
        names := [name for name, value in others.items() if value is not None]
    ):
        source = "plan" if like is None else "like"
        raise ConflictError(
            f"`{names[0]}` does not apply: `{source}` decides the placement.", fix=f"leave {names[0]} out"
        )
    placement = like.placement if like is not None else SharedPlacement(request, on, plan)
    numbers, keywords = _static(function, static_argnums, static_argnames)
    losses = LossOptions(Variant(remat=known_policy(remat), microbatches=microbatches), attention, loss_chunks)
    sharded = ShardedFunction(function, placement, donate, numbers, keywords, losses, like is not None, batch_axes)
    return update_wrapper(sharded, function)


def _check_types(plan: Any, like: Any, donate: Any, microbatches: Any) -> None:
    """Checks the types of the arguments that a request does not have.

    Raises:
      SpanaxError: one has an unsupported type.
    """
    path = repr(str(plan)) if isinstance(plan, str | Path) else "path"
    check_type("plan", plan, Plan, f"plan=spanax.Plan.load({path})")
    check_type("like", like, ShardedFunction, LIKE)
    for name, value in (("donate", donate), ("microbatches", microbatches)):
        if value is None or isinstance(value, bool) != (name == "donate") or not isinstance(value, int):
            raise ArgumentError.of(name, value, "donate=False" if name == "donate" else "microbatches=4")


def _static(
    function: Callable[..., Any], numbers: int | Iterable[int], names: str | Iterable[str]
) -> tuple[frozenset[int], frozenset[str]]:
    """Returns the positions and the names of static arguments; a parameter in one is in both, as in `jax.jit`.

    Raises:
      SpanaxError: a position is not an int, or a name not a str.
    """
    listed = _listed("static_argnums", numbers, int, "static_argnums=(1,)")
    positions, keywords = {*listed}, {*_listed("static_argnames", names, str, 'static_argnames=("steps",)')}
    parameters = [*inspect.signature(function).parameters.values()]
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    positions = {number % len(positional) if number < 0 else number for number in positions}
    by_name = {positional.index(name) for name in keywords if name in positional}
    by_position = {positional[number] for number in positions if number < len(positional)}
    return frozenset(positions | by_name), frozenset(keywords | by_position)


def _listed(name: str, values: Any, kind: type, fix: str) -> list[Any]:
    """Returns the values of an argument that is one value or several of a type."""
    listed = [values] if isinstance(values, kind) else [*values] if isinstance(values, Iterable) else None
    if listed is None or not all(isinstance(value, kind) for value in listed):
        raise ArgumentError.of(name, values, fix)
    return listed
