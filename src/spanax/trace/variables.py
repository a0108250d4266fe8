"""Flattens model and optimizer into a list of arrays and merges them back: the only interface to Flax NNX.

NNX has renamed its annotations four times in a year; only this file knows their names.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import errors as nnx_errors
from flax import nnx
from jax.extend import core

from spanax.errors import SpanaxError
from spanax.trace.raw_arrays import traced_as_data

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
NAMED = (*POSITIONAL, inspect.Parameter.KEYWORD_ONLY)

OPTIMIZER_STATE = "opt_state"
"""The attribute of Optax's state in Flax, also inside a module; its Variables may have the type of their parameters."""

ANNOTATIONS = ("out_sharding", "sharding_names", "sharding_metadata", "sharding")


@dataclass(frozen=True)
class Leaf:
    """One array of the state or of the batch.

    `path` is as NNX prints it (an optimizer's arrays begin with `optimizer.`), `kind` is `param`, `optimizer`,
    `other` or `batch`, `axes` names each dim (None: no name), `annotation` is the sharding the model's author
    wrote, if any: names by dim.

    Example:
      >>> import numpy as np
      >>> Leaf("up.kernel", (64, 256), np.dtype("float32"), "param", ("embed", "mlp")).num_bytes
      65536
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    kind: str
    axes: tuple[str | None, ...] = ()
    annotation: tuple[Any, ...] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole array."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype).size * itemsize(self.dtype)


@dataclass(frozen=True, eq=False)
class Variables:
    """How a model and its optimizer are taken apart: NNX's graph, the tree, and the leaves in its order.

    `is_hijax`: the model and optimizer that `merge` returns have hijax Variables.
    """

    graphdef: Any
    treedef: Any
    leaves: tuple[Leaf, ...]
    is_hijax: bool = False

    def abstract(self) -> list[jax.ShapeDtypeStruct]:
        """Shape and dtype of every leaf."""
        return [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in self.leaves]

    def of_shapes(self, shapes: Sequence[tuple[int, ...]]) -> "Variables":
        """The same with leaves of other shapes."""
        pairs = zip(self.leaves, shapes, strict=True)
        return replace(self, leaves=tuple(replace(leaf, shape=shape) for leaf, shape in pairs))

    def merge(self, values: Sequence[Any]) -> tuple[nnx.Module, nnx.Optimizer]:
        """A model and optimizer of their own that hold these values."""
        state = jax.tree.unflatten(self.treedef, values)
        if self.is_hijax:
            return nnx.merge(self.graphdef, nnx.with_vars(state, hijax=True))
        # A copy: without it, statistics and RNG counts cannot be written under a trace.
        return nnx.merge(self.graphdef, state, copy=True)

    def split(self, model: nnx.Module, optimizer: nnx.Optimizer) -> list[Any]:
        """The values of a model and optimizer after a step, in the order of the leaves.

        Raises:
          SpanaxError: the step changed what the model consists of, or a variable's shape or dtype.
        """
        nnx.pop(model, nnx.Intermediate)  # what `sow` left behind is not state
        _, state = nnx.split((model, optimizer))
        if self.is_hijax:
            state = nnx.with_vars(state, hijax=False)
        before = [leaf.path for leaf in self.leaves]
        after = [path for path, _, _ in _named_values(state)]
        if before != after:
            odd = sorted(set(before) ^ set(after))
            raise changed_variables("the train step", odd, f"{len(before)} arrays before the step, {len(after)} after")
        values = jax.tree.leaves(state)
        for leaf, value in zip(self.leaves, values, strict=True):
            if value.shape != leaf.shape or value.dtype != leaf.dtype:
                raise SpanaxError(
                    f"the train step turned `{leaf.path}` from {leaf.dtype}{list(leaf.shape)} "
                    f"into {value.dtype}{list(value.shape)}.",
                    fix="keep the shape and dtype of every variable, for example with .astype(...)",
                )
        return values


def lowered(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function without the equations of hijax Variables, which only JAX's own transformations understand."""

    def run(*args: Any) -> Any:
        traced = jax.jit(function).trace(*args)
        values = core.jaxpr_as_fun(traced.lojax.jaxpr)(*jax.tree.leaves(args))
        return jax.tree.unflatten(traced.out_tree, values)

    return run


def changed_variables(by: str, odd: Sequence[str], where: str = "") -> SpanaxError:
    """The error that a model consists of other variables after a step than before."""
    return SpanaxError(
        f"{by} changed the model's variables: {', '.join(odd[:3])}.",
        where=where,
        fix="create every variable in the model's __init__, or use nnx.Intermediate for what is thrown away",
    )


def model_of(build: Callable[..., nnx.Module], seed: Any) -> nnx.Module:
    """The model that `build` makes; under a trace, nothing is allocated.

    Raises:
      SpanaxError: `build` is not a function that returns a model.
    """
    if isinstance(build, nnx.Module):
        raise SpanaxError(
            f"`build` is a {type(build).__name__} that has been built.",
            fix="what makes it: build=MyModel, or build=lambda rngs: MyModel(config, rngs=rngs)",
        )
    with plain_variables(), traced_as_data():
        model = _built(build, seed)
    if not isinstance(model, nnx.Module):
        raise SpanaxError(
            f"`build` returned a {type(model).__name__}, not an nnx.Module.",
            where=f"build={getattr(build, '__name__', build)!r}",
            fix="return the model itself: def build(rngs): return MyModel(rngs=rngs)",
        )
    return model


@contextmanager
def plain_variables() -> Iterator[None]:
    """New Variables are neither sharded, nor hijax types or references: the state is a list of arrays."""
    with nnx.use_eager_sharding(False), nnx.var_defaults(hijax=False, ref=False):
        yield


def wants_hijax() -> bool:
    """Whether the user's new Variables are hijax types (`nnx.var_defaults(hijax=True)`) that a train step can write."""
    return bool(nnx.var_defaults().hijax) and _is_writable()


@functools.cache
def _is_writable() -> bool:
    """Whether hijax Variables can be written inside JAX's transformations; Flax 0.12.12 refuses."""

    def write() -> Any:
        variable = nnx.Variable(jnp.zeros(()), hijax=True, ref=False)
        variable[...] = jnp.ones(())
        return variable[...]

    try:
        jax.eval_shape(write)
    except nnx_errors.ImmutableVariableError:
        return False
    return True


def with_defaults(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, called with the kind of Variables that is the default now."""
    defaults = nnx.var_defaults()

    @functools.wraps(function)
    def under(*args: Any, **kwargs: Any) -> Any:
        with nnx.var_defaults(hijax=defaults.hijax, ref=defaults.ref):
            return function(*args, **kwargs)

    return under


def check_optimizer(optimizer: Any) -> None:
    """Raises if `optimizer` is neither an optax transformation nor a function from the model to an optimizer."""
    if not _is_optax(optimizer) and (wrong := _no_optimizer(optimizer)):
        raise SpanaxError(
            f"`optimizer` is {wrong}.",
            fix="an optax transformation (optax.adamw(3e-4)), or a function from the model to an nnx.Optimizer",
        )


def optimizer_of(model: nnx.Module, optimizer: Any) -> nnx.Optimizer:
    """The optimizer of a model, as `spanax.trace` takes it.

    Raises:
      SpanaxError: the function returned no optimizer.
    """
    with plain_variables(), traced_as_data():
        made = optimizer if _is_optax(optimizer) else optimizer(model)
        if not (_is_optax(made) or isinstance(made, nnx.Pytree | dict | list | tuple)):  # one may hold several
            raise SpanaxError(
                f"`optimizer` returned a {type(made).__name__}, not an nnx.Optimizer.",
                where=f"optimizer={getattr(optimizer, '__name__', optimizer)!r}",
                fix="optimizer=lambda model: nnx.Optimizer(model, optax.adamw(3e-4), wrt=nnx.Param)",
            )
        return nnx.Optimizer(model, made, wrt=nnx.Param) if _is_optax(made) else made


def _no_optimizer(optimizer: Any) -> str | None:
    """What is wrong with something that is no optax transformation and cannot be a function from the model to one."""
    if isinstance(optimizer, nnx.Module) or not callable(optimizer):
        return f"a {type(optimizer).__name__}"
    name = getattr(optimizer, "__name__", type(optimizer).__name__)
    if getattr(optimizer, "__module__", "").partition(".")[0] == "optax":
        return f"optax.{name}, which was not called"
    parameters = _parameters(optimizer)
    wanted = [p.name for p in parameters if p.default is p.empty and p.kind in NAMED]
    if parameters and len(wanted) <= 1:
        return None
    return f"{name}, which wants {', '.join(wanted) or 'nothing'}, and is given the model"


def _is_optax(optimizer: Any) -> bool:
    is_module = isinstance(optimizer, nnx.Module)
    return not is_module and hasattr(optimizer, "init") and hasattr(optimizer, "update")


def _built(build: Callable[..., nnx.Module], seed: Any) -> nnx.Module:
    """What `build` makes, given an `nnx.Rngs` where it wants one: any parameter without default, or `rngs`."""
    parameters = _parameters(build)
    rngs = nnx.Rngs(jax.random.key(seed))
    beside = [p.name for p in parameters if p.default is p.empty and p.kind in NAMED and p.name != "rngs"]
    takes_rngs = any(p.name == "rngs" for p in parameters)
    if len(beside) > (not takes_rngs):
        raise SpanaxError(
            f"`build` wants {', '.join(beside)}; it is given an nnx.Rngs, and nothing else.",
            where=f"build={getattr(build, '__name__', build)!r}",
            fix="build=lambda rngs: MyModel(config, rngs=rngs)",
        )
    if takes_rngs:
        return build(rngs=rngs)
    return build(rngs) if num_wanted(build) else build()


def num_wanted(function: Callable[..., Any]) -> int:
    """How many arguments a function wants that have no default and may be given by position."""
    return sum(p.default is p.empty and p.kind in POSITIONAL for p in _parameters(function))


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(_plain(function)).parameters.values())
    except (TypeError, ValueError):
        return []


def _plain(build: Callable[..., Any]) -> Callable[..., Any]:
    """A callable whose signature is the one to read: NNX's metaclass hides that of a module's __init__."""
    if isinstance(build, functools.partial):
        return functools.partial(_plain(build.func), *build.args, **build.keywords)
    return functools.partial(build.__init__, None) if inspect.isclass(build) else build


def take_apart(model: nnx.Module, optimizer: nnx.Optimizer) -> tuple[Variables, list[Any]]:
    """The variables of a model and its optimizer, and their values in order."""
    graphdef, state = nnx.split((model, optimizer))
    values, treedef = jax.tree.flatten(state)
    leaves = []
    trained = _trained_arrays(model, optimizer)
    for (path, owner, variable), value in zip(_named_values(state), values, strict=True):
        is_param = isinstance(variable, nnx.Param) or path in trained
        is_optimizer = owner == 1 or OPTIMIZER_STATE in path.split(".")
        kind = "optimizer" if is_optimizer else "param" if is_param else "other"
        # An array of NumPy's (a table of indices in int64) is what JAX makes of it as soon as it is used.
        try:
            aval = jax.typeof(value)
        except TypeError as error:
            raise SpanaxError(
                f"`{path}` is {'an array' if hasattr(value, 'dtype') else 'data'} of "
                f"{getattr(value, 'dtype', type(value).__name__)}; the state consists of numbers.",
                fix="a tuple of str, or another static attribute",
            ) from error
        leaves.append(Leaf(path, aval.shape, aval.dtype, kind, (), _annotation(variable)))
    return Variables(graphdef, treedef, tuple(leaves)), values


def _trained_arrays(model: nnx.Module, optimizer: Any) -> set[str]:
    """The paths of the raw arrays that an `nnx.Optimizer` trains, as its `wrt` selects them."""
    if not isinstance(optimizer, nnx.Optimizer):
        return set()
    named = _named_values([nnx.state(model, optimizer.wrt)])
    return {path for path, _, value in named if not isinstance(value, nnx.Variable)}


def itemsize(dtype: Any) -> int:
    """Bytes of one element; a typed PRNG key counts the words it is made of."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype))
        return words.size * words.dtype.itemsize
    return dtype.itemsize


def _named_values(state: Any) -> list[tuple[str, int, Any]]:
    """(path, 0 for the model or 1 for the optimizer, the Variable) of every array, in the tree's order."""
    named = []
    is_variable = lambda node: isinstance(node, nnx.Variable)  # noqa: E731
    for path, variable in jax.tree_util.tree_flatten_with_path(state, is_leaf=is_variable)[0]:
        owner, *names = (str(getattr(key, "key", getattr(key, "idx", key))) for key in path)
        value = variable.get_value() if is_variable(variable) else variable
        prefix = ["optimizer"] if owner == "1" else []
        for inner, _ in jax.tree_util.tree_flatten_with_path(value)[0]:
            tail = jax.tree_util.keystr(inner, simple=True, separator=".")
            named.append((".".join(prefix + names + ([tail] if tail else [])), int(owner), variable))
    return named


def _annotation(variable: Any) -> tuple[Any, ...] | None:
    """What the model's author wrote about the sharding of a variable, by dim, with logical rules applied."""
    if not isinstance(variable, nnx.Variable):
        return None
    metadata = variable.get_metadata()
    for name in ANNOTATIONS:
        found = metadata.get(name)
        if found is not None:
            names = tuple(getattr(found, "spec", found))
            rules = dict(metadata.get("sharding_rules") or ())
            return tuple(rules.get(name, name) if isinstance(name, str) else name for name in names)
    return None
