"""`spanax.jit`: compiles a function of NNX objects, sharded over a mesh."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from spanax.errors import ArgumentError, ConflictError, UnknownNameError, check_type, nearest
from spanax.hardware.cluster import Cluster, cluster_of, local
from spanax.hardware.mesh import MeshShape
from spanax.jit.placement import LossOptions, SharedPlacement
from spanax.jit.sharded_function import LIKE, ShardedFunction
from spanax.plan.candidates.request import Request, pins_of
from spanax.plan.layout import Layout
from spanax.plan.plan import Plan
from spanax.plan.presets import check_names
from spanax.plan.sharding.assign import Pins
from spanax.trace.batch import AUTO
from spanax.trace.jaxpr.remat_policies import known_policy
from spanax.trace.variant import Variant


def jit(  # noqa: PLR0913
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
    compiler_options: Mapping[str, Any] | None = None,
    **keywords: Any,
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
      on: the devices to plan for; a call on other ones warns. By default those of this process group, or the first of
        them if the size of the mesh divides their number.
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
      compiler_options: as in `jax.jit`, in addition to those of the plan.
      **keywords: those of `nnx.jit`. `donate_argnums` and `donate_argnames` mean `donate=True`, or False if empty; any
        other raises an error that names its replacement.

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
            compiler_options=compiler_options, **keywords,
        )  # fmt: skip
    donate = _donates(donate, keywords)
    check_type("compiler_options", compiler_options, Mapping, 'compiler_options={"xla_embed_ir_in_executable": True}')
    request = Request(
        layout=layout, mesh=mesh, pins=pins_of(pin), pad=pad, offload=(), attention=attention, loss_chunks=loss_chunks
    )
    check_names(layout, None if mesh is None else MeshShape.of(mesh))
    _check_types(plan, like, donate, microbatches)
    on = None if on is None else cluster_of(on, "on")
    others = {
        "layout": layout, "mesh": mesh, "on": on, "pin": pin, "pad": pad, "plan": plan if like is not None else None,
    }  # fmt: skip
    if (plan is not None or like is not None) and (
        unused := [name for name, value in others.items() if value is not None]
    ):
        source = "plan" if like is None else "like"
        raise ConflictError(
            f"`{unused[0]}` does not apply: `{source}` decides the placement.", fix=f"leave {unused[0]} out"
        )
    if isinstance(mesh, Mesh) and on is None:
        on = local([*mesh.devices.flat])
    placement = like.placement if like is not None else SharedPlacement(request, on, plan)
    numbers, names = _static(function, static_argnums, static_argnames)
    losses = LossOptions(Variant(remat=known_policy(remat), microbatches=microbatches), attention, loss_chunks)
    sharded = ShardedFunction(
        function, placement, donate, numbers, names, losses, like is not None, batch_axes,
        compiler_options=dict(compiler_options or {}),
    )  # fmt: skip
    return update_wrapper(sharded, function)


REPLACEMENTS = {
    "in_shardings": "leave it out: the plan shards arguments; pin= and layout= change it",
    "out_shardings": "leave it out: the plan shards results; pin= and layout= change it",
    "device": 'mesh="data=1"',
    "backend": "JAX_PLATFORMS, or leave it out",
    "keep_unused": "leave it out: objects keep arrays that the function does not use",
    "inline": "leave it out: within another jit, the function is traced as written",
    "abstracted_axes": "leave it out: each shape is compiled once",
    "graph": "leave it out: objects are traced as graphs",
    "graph_updates": "leave it out: objects are updated in place",
}
"""What replaces the keywords of `nnx.jit` that do not apply."""

DONATED = ("donate_argnums", "donate_argnames")


def _donates(donate: bool, keywords: Mapping[str, Any]) -> bool:
    """Returns whether buffers are donated, given the remaining keywords of `nnx.jit`.

    Raises:
      SpanaxError: a keyword is unknown or does not apply.
    """
    for name, value in keywords.items():
        if name not in (*REPLACEMENTS, *DONATED):
            known = [*inspect.signature(jit).parameters][1:-1]
            raise UnknownNameError(f"spanax.jit has no argument `{name}`.", fix=nearest(name, [*known, *DONATED]))
        if name in REPLACEMENTS and value is not None and value is not False:
            raise ConflictError(f"`{name}` of nnx.jit does not apply: the plan decides.", fix=REPLACEMENTS[name])
    listed = [keywords[name] for name in DONATED if keywords.get(name) is not None]
    is_donated = any(isinstance(value, int | str) or len([*value]) > 0 for value in listed)
    if is_donated and donate is False:
        raise ConflictError("`donate=False` contradicts donate_argnums or donate_argnames.", fix="leave them out")
    return donate if is_donated or not listed else False


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
    positions = {*listed}
    keywords = {*_listed("static_argnames", names, str, 'static_argnames=("steps",)')}
    parameters = [*inspect.signature(function).parameters.values()]
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    positions = {number % len(positional) if number < 0 else number for number in positions}
    by_name = {positional.index(name) for name in keywords if name in positional}
    by_position = {positional[number] for number in positions if number < len(positional)}
    return frozenset(positions | by_name), frozenset(keywords | by_position)


def _listed(name: str, values: Any, kind: type, fix: str) -> list[Any]:
    """Returns the values of an argument that is one value or several of a type."""
    if isinstance(values, kind):
        return [values]
    listed = [*values] if isinstance(values, Iterable) else None
    if listed is None or not all(isinstance(value, kind) for value in listed):
        raise ArgumentError.of(name, values, fix)
    return listed
