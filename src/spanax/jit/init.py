"""`spanax.init`: creates NNX objects sharded, each array on the devices that store it."""

import inspect
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

from spanax.errors import ArgumentError, ObjectsError
from spanax.jit.call import is_object
from spanax.jit.sharded_function import LIKE, ShardedFunction, owners
from spanax.step.sharded_init import init_sharded
from spanax.trace.initial_state import created
from spanax.trace.user_mesh import on_mesh, outside_meshes
from spanax.trace.variables import Owner, with_sharding_default

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def init(make_objects: Callable[[], Any], *, like: ShardedFunction, batch: Any = ()) -> Any:
    """Creates NNX objects with the shardings of a function of `spanax.jit`, without ever storing them unsharded.

    `make_objects` is traced, so it allocates nothing. Each array is then computed on the devices that store it,
    with the values that `make_objects()` creates. Modules, Variables and random state that several objects share are
    shared in the result as well.

    Args:
      make_objects: returns an object, or a tuple of them in the order of the first parameters of `like`.
      like: the function that the objects are created for; it is planned if necessary, but not compiled.
      batch: arrays or shapes for the other parameters of `like`: the argument if there is one such parameter, or else
        a tuple of arguments by position, or a dict by name.

    Returns:
      What `make_objects()` returns, with sharded arrays.

    Raises:
      SpanaxError: `make_objects` reads the value of an array or returns other values than objects, the batch does not
        match the parameters of `like`, or the objects cannot be sharded as requested.

    Example:
      >>> import jax, optax, spanax
      >>> from flax import nnx
      >>> @spanax.jit(mesh="fsdp=8")
      ... def train_step(model, optimizer, x):
      ...     loss, gradients = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
      ...     optimizer.update(model, gradients)
      ...     return loss
      >>> def make_objects():
      ...     model = nnx.Linear(16, 32, rngs=nnx.Rngs(0))
      ...     return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
      >>> model, optimizer = init(make_objects, like=train_step, batch=jax.ShapeDtypeStruct((8, 16), "float32"))
      >>> tuple(model.kernel.sharding.spec), model.kernel.addressable_shards[0].data.shape
      ((None, 'fsdp'), (16, 4))
    """
    if not isinstance(like, ShardedFunction):
        raise ArgumentError.of("like", like, LIKE)
    parameters = [*inspect.signature(like.function).parameters.values()]
    positional = [parameter.name for parameter in parameters if parameter.kind in POSITIONAL]
    is_tuple: list[bool] = []

    def make_owners() -> list[Owner]:
        objects = make_objects()
        is_tuple.append(isinstance(objects, tuple))
        nodes = objects if isinstance(objects, tuple) else (objects,)
        return owners(nodes, _names(nodes, positional))

    variables, jaxpr = created(make_owners, "make_objects")
    abstract = variables.merge(variables.abstract())
    args, keywords = _arguments(parameters, len(abstract), batch)
    plan = like.prepare(*abstract, *args, **keywords)
    mesh = like.placement.mesh
    assert mesh is not None
    shardings = [plan[leaf.path].sharding(mesh) for leaf in variables.leaves]
    arrays = outside_meshes(init_sharded)(jaxpr, [], shardings)
    if like.placement.user_mesh is not None:
        arrays = [on_mesh(array, like.placement.user_mesh) for array in arrays]
    objects = with_sharding_default(variables.merge(arrays))
    return objects if is_tuple[0] else objects[0]


def _names(nodes: Sequence[Any], positional: Sequence[str]) -> list[str]:
    """Returns the names of the parameters that objects are passed to.

    Raises:
      SpanaxError: one is not an object, or there are more of them than parameters.
    """
    others = [type(node).__name__ for node in nodes if not is_object(node)]
    if others or not nodes:
        raise ObjectsError(
            f"`make_objects` returned {', '.join(others) or 'nothing'}, not NNX objects.",
            fix="return the model, or a tuple such as (model, optimizer)",
        )
    if len(nodes) > len(positional):
        raise ObjectsError(
            f"`make_objects` returned {len(nodes)} objects for {len(positional)} positional parameters of `like`.",
            where=", ".join(positional),
            fix="return the first arguments of the function, in their order",
        )
    return list(positional[: len(nodes)])


def _arguments(
    parameters: Sequence[inspect.Parameter], num_objects: int, batch: Any
) -> tuple[list[Any], dict[str, Any]]:
    """Returns the arguments after the objects, by position and by name.

    Raises:
      SpanaxError: the batch does not match the parameters.
    """
    others = parameters[num_objects:]
    required = [each for each in others if each.default is each.empty and each.kind not in VARIADIC]
    if len(required) == 1:
        (parameter,) = required
        values = {parameter.name: batch}
    elif isinstance(batch, dict):
        values = dict(batch)
    else:
        names = [parameter.name for parameter in others if parameter.kind in POSITIONAL]
        arguments = batch if isinstance(batch, tuple) else (batch,)
        values = dict(zip(names, arguments, strict=False))
        if len(arguments) > len(names):
            values |= {str(index): argument for index, argument in enumerate(arguments[len(names) :], len(names))}
    missing = [parameter.name for parameter in required if parameter.name not in values]
    unknown = [name for name in values if name not in {parameter.name for parameter in others}]
    problems = [*(f"`{name}` is missing" for name in missing), *(f"`{name}` is unknown" for name in unknown)]
    if problems:
        raise ObjectsError(
            f"`batch` does not match the parameters of `like` after its {num_objects} objects.",
            where=", ".join(problems),
            fix="the argument, or a tuple or dict of several",
        )
    leading = takewhile(lambda each: each.kind in POSITIONAL and each.name in values, others)
    return [values.pop(each.name) for each in leading], values
