"""Flattens model and optimizer into a list of arrays and merges them back: the only interface to Flax NNX."""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import jax
import jax.numpy as jnp
from flax import errors as nnx_errors
from flax import nnx
from flax.nnx import pytreelib
from jax.extend import core

from spanax.errors import BuildError, ObjectsError, OptimizerError, SpanaxError, StepError

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
NAMED = (*POSITIONAL, inspect.Parameter.KEYWORD_ONLY)

OPTIMIZER = "optimizer"
"""The first part of the path of an optimizer's arrays."""

OPTIMIZER_STATE = "opt_state"
"""Flax's attribute for Optax state, also inside a module; its Variables may have the type of their parameters."""

ANNOTATION = "out_sharding"
"""The metadata of a Variable that names its dims; Flax stores the older names under this one."""


@dataclass(frozen=True)
class Leaf:
    """One array of the state or of the batch.

    `path` is as NNX prints it (an optimizer's arrays begin with `optimizer.`), `kind` is `param`, `optimizer`,
    `other` or `batch`, `axes` names each dim (None: no name), `annotation` is the sharding annotation of the model, if
    any: names by dim. `weak_type` is JAX's: operations with other arrays have the dtype of the others.

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
    weak_type: bool = False

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of the global array."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype).size * itemsize(self.dtype)


@dataclass(frozen=True, eq=False)
class Variables:
    """The structure of a model and its optimizer: NNX's graph definition, the treedef, and the leaves in its order.

    `is_hijax`: whether `merge` returns hijax Variables. `names`: a leaf's path from the user's argument.
    """

    graphdef: Any
    treedef: Any
    leaves: tuple[Leaf, ...]
    is_hijax: bool = False
    prefixes: tuple[str, ...] = ("", OPTIMIZER)
    names: tuple[str, ...] = ()

    def abstract(self) -> list[jax.ShapeDtypeStruct]:
        """Returns the shape and dtype of every leaf."""
        return [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=leaf.weak_type) for leaf in self.leaves]

    def of_shapes(self, shapes: Sequence[tuple[int, ...]]) -> "Variables":
        """Returns a copy with other leaf shapes."""
        pairs = zip(self.leaves, shapes, strict=True)
        return replace(self, leaves=tuple(replace(leaf, shape=shape) for leaf, shape in pairs))

    def merge(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Returns new objects, such as a model and its optimizer, with these values."""
        state = jax.tree.unflatten(self.treedef, values)
        if self.is_hijax:
            return nnx.merge(self.graphdef, nnx.with_vars(state, hijax=True))
        # A copy: without it, statistics and RNG counts cannot be written under a trace.
        return nnx.merge(self.graphdef, state, copy=True)

    def split(self, *nodes: Any, by: str = "the train step") -> list[Any]:
        """Returns the values of the objects after a step, in the order of the leaves; `by` names it in an error.

        Raises:
          SpanaxError: the step changed the set of variables, or the shape or dtype of one.
        """
        _, state = nnx.split(nodes)
        if self.is_hijax:
            state = nnx.with_vars(state, hijax=False)
        before = [leaf.path for leaf in self.leaves]
        after = [path for path, _, _ in named_values(state, self.prefixes)]
        if before != after:
            moved = [path for path, other in zip_longest(after, before) if path != other]
            odd = sorted(set(before) ^ set(after)) or [path for path in moved if path is not None]
            raise changed_variables(by, odd, f"{len(before)} arrays before the step, {len(after)} after")
        values = jax.tree.leaves(state)
        for leaf, value in zip(self.leaves, values, strict=True):
            if value.shape != leaf.shape or value.dtype != leaf.dtype:
                raise StepError(
                    f"the train step turned `{leaf.path}` from {leaf.dtype}{list(leaf.shape)} "
                    f"into {value.dtype}{list(value.shape)}.",
                    fix="keep the shape and dtype of every variable, for example with .astype(...)",
                )
        return values


def lowered(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function lowered to equations without hijax Variables, which only JAX's transformations support."""

    def run(*args: Any) -> Any:
        traced = jax.jit(function).trace(*args)
        values = core.jaxpr_as_fun(traced.lojax.jaxpr)(*jax.tree.leaves(args))
        return jax.tree.unflatten(traced.out_tree, values)

    return run


def changed_variables(by: str, odd: Sequence[str], where: str = "") -> SpanaxError:
    """Returns the error for a model whose set of variables changed in a step."""
    return StepError(
        f"{by} changed the model's variables: {', '.join(odd[:3])}.",
        where=where,
        fix="create variables in the model's __init__, and remove recorded values: nnx.pop(model, nnx.Intermediate)",
    )


def model_of(build: Callable[..., nnx.Module], seed: Any) -> nnx.Module:
    """Returns the model that `build` creates; under a trace, nothing is allocated.

    Raises:
      SpanaxError: `build` is not a function that returns a model.
    """
    if isinstance(build, nnx.Module):
        raise BuildError(
            f"`build` is a {type(build).__name__} instance.",
            fix="a function that returns it: build=MyModel, or build=lambda rngs: MyModel(config, rngs=rngs)",
        )
    with plain_variables(), traced_as_data():
        model = built_from(build, nnx.Rngs(jax.random.key(seed)))
    if not isinstance(model, nnx.Module):
        raise BuildError(
            f"`build` returned a {type(model).__name__}, not an nnx.Module.",
            where=f"build={getattr(build, '__name__', build)!r}",
            fix="return the model itself: def build(rngs): return MyModel(rngs=rngs)",
        )
    return model


@contextmanager
def plain_variables() -> Iterator[None]:
    """Creates new Variables unsharded, and not as hijax types or references: the state is a list of arrays."""
    with nnx.use_eager_sharding(False), nnx.var_defaults(hijax=False, ref=False):
        yield


def with_sharding_default(objects: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns objects that were created under `plain_variables`, with the user's default for eager sharding.

    The default is part of the structure of a state, and Flax has no function that changes it.
    """
    for _, node in nnx.iter_graph(objects):
        if isinstance(node, nnx.Variable):
            node._var_metadata["eager_sharding"] = nnx.using_eager_sharding()
    return objects


def wants_hijax() -> bool:
    """Returns whether new Variables default to hijax types (`nnx.var_defaults(hijax=True)`) that a step can write."""
    return bool(nnx.var_defaults().hijax) and _is_writable()


@functools.cache
def _is_writable() -> bool:
    """Returns whether hijax Variables can be written inside JAX's transformations; in Flax 0.12.12 they cannot."""

    def write() -> Any:
        variable = nnx.Variable(jnp.zeros(()), hijax=True, ref=False)
        variable[...] = jnp.ones(())
        return variable[...]

    try:
        jax.eval_shape(write)
    except nnx_errors.ImmutableVariableError:
        return False
    return True


def check_optimizer(optimizer: Any) -> None:
    """Raises if `optimizer` is neither an optax transformation nor a function from the model to an optimizer."""
    if not _is_optax(optimizer) and (wrong := _no_optimizer(optimizer)):
        raise OptimizerError(
            f"`optimizer` is {wrong}.",
            fix="an optax transformation (optax.adamw(3e-4)), or a function from the model to an nnx.Optimizer",
        )


def optimizer_of(model: nnx.Module, optimizer: Any) -> nnx.Optimizer:
    """Returns the optimizer of a model from the `optimizer` argument of `spanax.trace`.

    Raises:
      SpanaxError: the function did not return an optimizer.
    """
    with plain_variables(), traced_as_data():
        result = optimizer if _is_optax(optimizer) else optimizer(model)
        if not (_is_optax(result) or isinstance(result, nnx.Pytree | dict | list | tuple)):  # may contain several
            raise OptimizerError(
                f"`optimizer` returned a {type(result).__name__}, not an nnx.Optimizer.",
                where=f"optimizer={getattr(optimizer, '__name__', optimizer)!r}",
                fix="optimizer=lambda model: nnx.Optimizer(model, optax.adamw(3e-4), wrt=nnx.Param)",
            )
        return nnx.Optimizer(model, result, wrt=nnx.Param) if _is_optax(result) else result


def _no_optimizer(optimizer: Any) -> str | None:
    """Returns why `optimizer` is not a function from the model to an optimizer, or None if it may be."""
    if isinstance(optimizer, nnx.Module) or not callable(optimizer):
        return f"a {type(optimizer).__name__}"
    name = getattr(optimizer, "__name__", type(optimizer).__name__)
    if getattr(optimizer, "__module__", "").partition(".")[0] == "optax":
        return f"optax.{name}, which was not called"
    parameters = _parameters(optimizer)
    required = [p.name for p in parameters if p.default is p.empty and p.kind in NAMED]
    if parameters and len(required) <= 1:
        return None
    return f"{name}, which requires {', '.join(required) or 'no argument'}, but receives the model"


def _is_optax(optimizer: Any) -> bool:
    is_module = isinstance(optimizer, nnx.Module)
    return not is_module and hasattr(optimizer, "init") and hasattr(optimizer, "update")


def built_from(build: Callable[..., Any], rngs: nnx.Rngs) -> Any:
    """Calls `build`, with the rngs for its parameter without default or named `rngs`, if any."""
    parameters = _parameters(build)
    required = [p.name for p in parameters if p.default is p.empty and p.kind in NAMED and p.name != "rngs"]
    takes_rngs = any(p.name == "rngs" for p in parameters)
    if len(required) > (not takes_rngs):
        raise BuildError(
            f"`build` requires {', '.join(required)}, but receives only an nnx.Rngs.",
            where=f"build={getattr(build, '__name__', build)!r}",
            fix="build=lambda rngs: MyModel(config, rngs=rngs)",
        )
    if takes_rngs:
        return build(rngs=rngs)
    return build(rngs) if num_wanted(build) else build()


def num_wanted(function: Callable[..., Any]) -> int:
    """Returns the number of positional parameters without default."""
    return sum(p.default is p.empty and p.kind in POSITIONAL for p in _parameters(function))


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(_plain(function)).parameters.values())
    except (TypeError, ValueError):
        return []


def _plain(build: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a callable with the signature of `build`: NNX's metaclass hides that of a module's __init__."""
    if isinstance(build, functools.partial):
        return functools.partial(_plain(build.func), *build.args, **build.keywords)
    return functools.partial(build.__init__, None) if inspect.isclass(build) else build


@dataclass(frozen=True)
class Owner:
    """An object whose arrays are part of the state.

    `prefix` begins the paths of its arrays; `name` is the user's argument. An optimizer's have the kind `optimizer`.
    """

    node: Any
    prefix: str = ""
    is_optimizer: bool = False
    name: str = "model"


def take_apart(owners: Sequence[Owner]) -> tuple[Variables, list[Any]]:
    """Returns the variables of objects, such as a model and its optimizer, and their values in order.

    Raises:
      SpanaxError: an array of the state is not numeric.
    """
    nodes = tuple(owner.node for owner in owners)
    graphdef, state = nnx.split(nodes)
    values, treedef = jax.tree.flatten(state)
    prefixes = [owner.prefix for owner in owners]
    leaves = []
    trained = _trained_arrays(owners)
    for (path, index, variable), value in zip(named_values(state, prefixes), values, strict=True):
        kind = "param" if isinstance(variable, nnx.Param) or path in trained else "other"
        if owners[index].is_optimizer or OPTIMIZER_STATE in path.split("."):
            kind = "optimizer"
        aval = type_of(path, value)
        leaves.append(Leaf(path, aval.shape, aval.dtype, kind, (), _annotation(variable)))
    names = tuple(path for path, _, _ in named_values(state, [owner.name for owner in owners]))
    return Variables(graphdef, treedef, tuple(leaves), False, tuple(prefixes), names), values


def _trained_arrays(owners: Sequence[Owner]) -> set[str]:
    """Returns the paths of the raw arrays that an `nnx.Optimizer` trains, selected by its `wrt`."""
    trained: set[str] = set()
    models = [owner for owner in owners if not owner.is_optimizer]
    for optimizer in (owner.node for owner in owners if isinstance(owner.node, nnx.Optimizer)):
        # In one tuple: an owner may be a Variable, which has no parts that a filter could select.
        state = nnx.state(tuple(owner.node for owner in models), optimizer.wrt)
        named = named_values(state, [owner.prefix for owner in models])
        trained |= {path for path, _, value in named if not isinstance(value, nnx.Variable)}
    return trained


def type_of(path: str, value: Any) -> Any:
    """Returns the abstract value of an array of the state.

    A NumPy array (a table of indices in int64) has the dtype that JAX converts it to on first use.

    Raises:
      SpanaxError: it is not numeric.
    """
    try:
        return jax.typeof(value)
    except TypeError as error:
        raise ObjectsError(
            f"`{path}` is {'an array' if hasattr(value, 'dtype') else 'data'} of "
            f"{getattr(value, 'dtype', type(value).__name__)}; the state consists of numbers.",
            fix="a tuple of str, or another static attribute",
        ) from error


def itemsize(dtype: Any) -> int:
    """Returns the bytes of one element; for a typed PRNG key, those of its words."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype))
        return words.size * words.dtype.itemsize
    return dtype.itemsize


def stored_value(leaf: Any) -> Any:
    """Returns the value of a Variable as stored: before the hooks and methods that compute what is read of it."""
    return leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf


def named_values(state: Any, prefixes: Sequence[str]) -> list[tuple[str, int, Any]]:
    """Returns (path, index of the owner, Variable) of every array, in tree order."""
    named = []
    is_variable = lambda node: isinstance(node, nnx.Variable)  # noqa: E731
    for path, variable in jax.tree_util.tree_flatten_with_path(state, is_leaf=is_variable)[0]:
        owner, *names = (str(getattr(key, "key", getattr(key, "idx", key))) for key in path)
        prefix = [prefixes[int(owner)]] if prefixes[int(owner)] else []
        for inner, _ in jax.tree_util.tree_flatten_with_path(stored_value(variable))[0]:
            tail = jax.tree_util.keystr(inner, simple=True, separator=".")
            named.append((".".join(prefix + names + ([tail] if tail else [])), int(owner), variable))
    return named


def _annotation(variable: Any) -> tuple[Any, ...] | None:
    """Returns the sharding annotation of a variable, by dim, with logical axis rules applied."""
    if not isinstance(variable, nnx.Variable):
        return None
    metadata = variable.get_metadata()
    sharding = metadata.get(ANNOTATION)
    if sharding is None:
        return None
    rules = dict(metadata.get("sharding_rules") or ())
    return tuple(
        rules.get(name, name) if isinstance(name, str) else name for name in getattr(sharding, "spec", sharding)
    )


@contextmanager
def traced_as_data() -> Iterator[None]:
    """Registers tracers as data, so that attributes with traced arrays are state as concrete arrays are.

    Flax 0.12 decides by the type of a value whether an attribute is data, and treats a tracer as static: it is not
    state then and leaks with the graph definition, and a constructor under `nnx.vmap` does not stack it.
    """
    added = _tracer_types() - pytreelib.DATA_REGISTRY
    for tracer in added:
        nnx.register_data_type(tracer)
    try:
        yield
    finally:
        # Outside `build`, a module may store a traced value without changing the set of its variables.
        pytreelib.DATA_REGISTRY.difference_update(added)


@functools.cache
def _tracer_types() -> frozenset[type]:
    """Returns the types of tracers under a trace, and under `vmap` within a trace."""
    types = set[type]()

    def note(x: jax.Array) -> jax.Array:
        types.add(type(x))
        return x

    jax.eval_shape(lambda x: jax.vmap(note)(note(x)), jax.ShapeDtypeStruct((1,), "float32"))
    return frozenset(types)
