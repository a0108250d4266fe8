"""A function of NNX objects, compiled by `spanax.jit`."""

import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import is_
from types import MethodType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from spanax.check.check import check
from spanax.check.report import Report
from spanax.errors import ObjectsError
from spanax.hardware.cluster import Cluster
from spanax.jit.call import CallForm, changed_statics, check_static, split_call
from spanax.jit.objects import Objects
from spanax.jit.placement import LossOptions, SharedPlacement, place, state_shardings
from spanax.jit.results import attributes, has_objects, returned, with_objects
from spanax.jit.tracebacks import WithoutSpanax
from spanax.plan.evaluate import evaluate
from spanax.plan.plan import Plan
from spanax.plan.sharding.place import as_planned
from spanax.run.data.process_batches import global_batch
from spanax.run.distributed.compile_barrier import compiled_with_barrier
from spanax.run.state.sharded_init import placed
from spanax.run.step.compiled_function import CompiledFunction
from spanax.run.step.platform import platform_of
from spanax.run.step.validate_batch import place_argument
from spanax.show.axes import axes_text
from spanax.show.search import array_lines
from spanax.trace.function import trace_function
from spanax.trace.program import Program
from spanax.trace.user_mesh import is_typed, on_mesh, outside_meshes
from spanax.trace.variables import OPTIMIZER, Leaf, Owner

MANY = 5
"""The number of compilations of one function from which each is reported."""

NUM_OBJECTS = 2
"""The number of tuples of objects whose structure is cached, such as a model and its moving average."""

LIKE = "like=train_step, where train_step = spanax.jit(...)"
"""The fix of an argument that is not a function of `spanax.jit`."""

_UNSEEN = object()

Key = tuple[CallForm, int, tuple[Any, ...]]


@dataclass(frozen=True, eq=False)
class Executable:
    """A compiled function.

    Attributes:
      compiled: the function and its shardings.
      jitted: the jitted function.
      has_objects: whether its results contain NNX objects, or it adds Variables to its objects.
      seen: by leaf, the last sharding object that is equivalent to the planned one: comparing identities is cheaper.
    """

    compiled: CompiledFunction
    jitted: Any
    has_objects: bool
    seen: list[Any]


@dataclass(eq=False)
class ShardedFunction:
    """A function of NNX objects and arrays that runs sharded over a mesh; see `spanax.jit`.

    Attributes:
      function: the function as written.
      placement: the mesh and layout, shared by functions of the same objects.
      donate: whether the buffers of updated arrays are reused.
      static_argnums: the positions of static arguments.
      static_argnames: the names of static arguments.
      losses: the form of the function's losses.
      is_like: whether another function decides the placement.
      compiler_options: as in `jax.jit`.
    """

    function: Callable[..., Any]
    placement: SharedPlacement
    donate: bool = True
    static_argnums: frozenset[int] = frozenset()
    static_argnames: frozenset[str] = frozenset()
    losses: LossOptions = LossOptions()
    is_like: bool = False
    compiler_options: dict[str, Any] = field(default_factory=dict)
    _executables: dict[Key, Executable] = field(default_factory=dict, repr=False)
    _structures: dict[Any, int] = field(default_factory=dict, repr=False)
    _objects: list[tuple[Objects, int]] = field(default_factory=list, repr=False)
    _prepared: tuple[Program, Plan] | None = field(default=None, repr=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function: updates its objects in place and returns its results.

        Raises:
          SpanaxError: the arguments cannot be sharded as requested; the objects are unchanged then.
        """
        with WithoutSpanax():
            form, nodes, arrays = self._split(args, kwargs)
            objects, structure = self._structure_of(nodes)
            if objects.is_traced or any(isinstance(array, jax.core.Tracer) for array in arrays):
                return self.function(*args, **kwargs)  # another transformation traces it
            key = form, structure, tuple(map(_type, arrays))
            if key not in self._executables:
                self._executables[key] = self._compiled(key, objects, arrays)
            return outside_meshes(self._run)(self._executables[key], objects, arrays)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Returns the function as a method of an object."""
        return self if instance is None else MethodType(self, instance)

    def prepare(self, *args: Any, **kwargs: Any) -> Plan:
        """Traces and plans the function for these arguments without running it; shapes may stand for arrays.

        Example:
          >>> import optax, spanax
          >>> @spanax.jit(mesh="data=8")
          ... def predict(model, x):
          ...     return model(x)
          >>> model = nnx.eval_shape(lambda: nnx.Linear(4, 2, rngs=nnx.Rngs(0)))
          >>> str(predict.prepare(model, jax.ShapeDtypeStruct((8, 4), "float32")).mesh)
          'data=8'
        """
        with WithoutSpanax():
            form, nodes, arrays = self._split(args, kwargs)
            self._prepared = self._planned(form, nodes, arrays)
            return self._prepared[1]

    @property
    def num_compilations(self) -> int:
        """The number of programs compiled so far: one for each structure and shape of the arguments."""
        return len(self._executables)

    @property
    def program(self) -> Program:
        """The traced function, as of its last compilation."""
        return self._latest[0]

    @property
    def plan(self) -> Plan:
        """The sharding of every array, as of the last compilation."""
        return self._latest[1]

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the lowered function as JAX does: for these arguments, or without any for those of the last call."""
        if args or kwargs:
            self.prepare(*args, **kwargs)
        program, plan = self._latest
        mesh = self.placement.mesh
        assert mesh is not None
        state = tuple(leaf.sharding(mesh) for leaf in plan.leaves)
        compiled = CompiledFunction(program, plan, mesh, state, self.donate, options=self.compiler_options)
        return outside_meshes(compiled.jitted.lower)(*compiled.arguments())

    def check(self, on: Cluster | str | None = None, **options: Any) -> Report:
        """Compares the plan with XLA's program, as `spanax.check` does.

        Args:
          on: the devices to plan and check for; by default, those that the function was planned for.
          **options: as in `spanax.check`.
        """
        program, plan = self._latest
        placement = self.placement if on is None else SharedPlacement(self.placement.request, on)
        return check(
            program,
            plan if on is None else placement.plan_for(program, self.losses, is_like=False),
            placement.cluster(),
            **options,
        )

    def explain(self, path: str | None = None) -> str:
        """Returns the named axes and the sharding of every array as text.

        Args:
          path: an array; returns its sharding, the reason for it, and the collectives that move it.
        """
        program, plan = self._latest
        if path is None:
            return "\n".join([axes_text(program), "", str(plan)])
        leaf, evaluation = plan[path], evaluate(program, plan, self.placement.cluster())
        return "\n".join(array_lines(leaf, evaluation.collectives_of(path) if leaf.kind != "batch" else {}))

    @property
    def _latest(self) -> tuple[Program, Plan]:
        if self._prepared is None:
            raise ObjectsError(
                f"`{self._name}` has no plan before it is called.", fix=f"{self._name}.prepare(...) with its arguments"
            )
        return self._prepared

    @property
    def _name(self) -> str:
        return getattr(self.function, "__name__", "function")

    @cached_property
    def _parameters(self) -> tuple[str, ...]:
        return tuple(inspect.signature(self.function).parameters)

    def _split(self, args: Any, kwargs: Any) -> tuple[CallForm, tuple[Any, ...], list[Any]]:
        form, nodes, arrays = split_call(args, kwargs, self.static_argnums, self.static_argnames, self._parameters)
        if form.statics:
            check_static(form, self._parameters)
        return form, nodes, arrays

    def _structure_of(self, nodes: tuple[Any, ...]) -> tuple[Objects, int]:
        for entry in self._objects:
            if entry[0].is_of(nodes):
                return entry
        objects = Objects.of(nodes)
        entry = objects, self._structures.setdefault(objects.graphdef, len(self._structures))
        self._objects = [entry, *(old for old in self._objects if not old[0].has_nodes(nodes))][:NUM_OBJECTS]
        return entry

    def _planned(self, form: CallForm, nodes: tuple[Any, ...], arrays: Sequence[Any]) -> tuple[Program, Plan]:
        """Returns the traced function and its plan."""
        object_names, array_names = form.names(self._parameters)

        def function(nodes: tuple[Any, ...], arrays: list[Any]) -> Any:
            args, kwargs = form.arguments(nodes, arrays)
            before = attributes(nodes)
            return returned(self.function(*args, **kwargs), nodes, before)

        shapes = [_shape(array) for array in arrays]
        if not nodes and not shapes:
            raise ObjectsError(
                f"`{self._name}` has no objects and no arrays to shard.",
                fix="spanax.init(make_objects, like=train_step) to create sharded objects",
            )
        program = trace_function(
            function, owners(nodes, object_names), shapes, short_names(array_names), self.losses.variant
        )
        values = [*jax.tree.leaves(nnx.state(nodes)), *arrays]
        plan = self.placement.plan_for(program, self.losses, is_like=self.is_like, values=values)
        return as_planned(program, plan), plan

    def _compiled(self, key: Key, objects: Objects, arrays: Sequence[Any]) -> Executable:
        program, plan = self._planned(key[0], objects.nodes, arrays)
        self._check_structure(key, program)
        self._prepared = program, plan
        self._report(key, program)
        mesh = self.placement.mesh
        assert mesh is not None
        shardings = state_shardings(plan, mesh, objects.arrays())
        compiled = CompiledFunction(
            program, plan, mesh, shardings, self.donate, self.placement.user_mesh, self.compiler_options
        )
        jitted = outside_meshes(_callable)(compiled, mesh)
        leaves = jax.tree.unflatten(program.step.result, [0] * program.step.num_results)
        return Executable(compiled, jitted, has_objects(leaves), [_UNSEEN] * len(shardings))

    def _check_structure(self, key: Key, program: Program) -> None:
        """Checks that the objects have the arrays of the first call with the same arguments; they may have more.

        Raises:
          SpanaxError: an array is missing, or has another shape or dtype.
        """
        arrays = {leaf.path: (leaf.shape, leaf.dtype) for leaf in program.leaves}
        first = next((executable for (form, *_), executable in self._executables.items() if form == key[0]), None)
        for leaf in () if first is None else first.compiled.program.leaves:
            if arrays.get(leaf.path) != (leaf.shape, leaf.dtype):
                shape, dtype = arrays.get(leaf.path, (None, None))
                raise ObjectsError(
                    f"the objects passed to `{self._name}` have another structure than in its first call.",
                    where=f"`{leaf.path}` was {leaf.dtype}{list(leaf.shape)} and is "
                    + ("missing" if shape is None else f"{dtype}{list(shape)}"),
                    fix="a function of its own for them: spanax.jit(function, like=...)",
                )

    def _report(self, key: Key, program: Program) -> None:
        """Warns if the function was compiled many times."""
        count = len(self._executables) + 1
        if count < MANY:
            return
        last = [*self._executables][-1]
        names = [leaf.path for leaf in program.batch]
        changed = [
            f"{name} {_text(old)} -> {_text(new)}"
            for name, old, new in zip(names, last[2], key[2], strict=False)
            if old != new
        ]
        changed += changed_statics(last[0], key[0], self._parameters)
        reason = ", ".join(changed[:3]) or "the structure of the objects changed"
        warnings.warn(f"`{self._name}` is compiled for the {count}th time: {reason}", stacklevel=4)

    def _run(self, executable: Executable, objects: Objects, arrays: Sequence[Any]) -> Any:
        compiled, state = executable.compiled, objects.arrays()
        moved = self._placed(executable, state, arrays)
        before, read = [state[index] for index in compiled.updated], [state[index] for index in compiled.constant]
        if jax.process_count() > 1:
            leaves = compiled.program.batch
            arrays = [_for_group(*each) for each in zip(arrays, leaves, compiled.batch, strict=True)]
            arrays = global_batch(arrays, compiled.batch, [leaf.path for leaf in leaves])
        batch = [place_argument(array, sharding) for array, sharding in zip(arrays, compiled.batch, strict=True)]
        after, results = executable.jitted(before, read, batch)
        if moved:
            objects.update(moved, [state[index] for index in moved])
        objects.update(compiled.updated, after)
        if compiled.is_simulated:
            jax.block_until_ready(results or after)
        if compiled.user_mesh is not None:
            results = [on_mesh(result, compiled.user_mesh) for result in results]
        call = jax.tree.unflatten(compiled.program.step.result, results)
        return with_objects(call, objects.by_path) if executable.has_objects else call.results

    def _placed(self, executable: Executable, state: list[Any], arrays: Sequence[Any]) -> list[int]:
        """Places the arrays that are not sharded as compiled, in `state`, and returns their indices."""
        compiled, seen, moved = executable.compiled, executable.seen, list[int]()
        shardings = [getattr(array, "sharding", None) for array in state]
        for index in () if all(map(is_, shardings, seen)) else range(len(state)):
            if shardings[index] is not seen[index]:
                leaf, array = compiled.program.leaves[index], state[index]
                state[index] = place(leaf.path, array, leaf, compiled.stored[index], compiled.mesh)
                seen[index] = state[index].sharding
                if state[index] is not array:
                    moved.append(index)
        distinct = {*map(id, state)}
        if self.donate and (len(distinct) < len(state) or not distinct.isdisjoint(map(id, arrays))):
            moved += _copy_shared(state, arrays)
        return moved


def _callable(compiled: CompiledFunction, mesh: jax.sharding.Mesh) -> Any:
    """Returns what runs a compiled function."""
    arguments = compiled.arguments()
    if compiled.user_mesh is not None:  # only a compiled program accepts arrays on another mesh of the same devices
        return compiled.jitted.lower(*arguments).compile()
    return compiled_with_barrier(compiled.jitted, arguments, platform_of(mesh))


def owners(nodes: Sequence[Any], names: Sequence[str]) -> list[Owner]:
    """Returns the objects as owners of arrays: paths begin with their names, but not those of the first module.

    The arrays of the first optimizer begin with `optimizer`, as in `spanax.trace`.
    """
    prefixes, is_used = [], {"": False, OPTIMIZER: False}
    for node, name in zip(nodes, names, strict=True):
        is_optimizer = isinstance(node, nnx.Optimizer)
        usual = OPTIMIZER if is_optimizer else "" if isinstance(node, nnx.Module) else name
        prefixes.append(name if is_used.get(usual, False) else usual)
        is_used[usual] = True
    kinds = [isinstance(node, nnx.Optimizer) and not isinstance(node, nnx.ModelAndOptimizer) for node in nodes]
    return [Owner(node, prefix, kind) for node, prefix, kind in zip(nodes, prefixes, kinds, strict=True)]


def short_names(names: Sequence[str]) -> list[str]:
    """Returns the names of arrays without the name of the argument, if they are the items of one dict."""
    heads, tails = ({part[index] for part in (name.partition(".") for name in names)} for index in (0, 2))
    if len(heads) != 1 or any(not tail or tail[0].isdecimal() for tail in tails):
        return list(names)
    return [name.partition(".")[2] for name in names]


def _copy_shared(state: list[Any], arrays: Sequence[Any]) -> list[int]:
    """Replaces arrays that are in several places by copies, and returns their indices: a buffer is donated once."""
    copied, seen = [], {id(array) for array in arrays if isinstance(array, jax.Array)}
    for index, array in enumerate(state):
        if id(array) in seen:
            state[index] = jnp.copy(array)
            copied.append(index)
        seen.add(id(array))
    return copied


def _shape(array: Any) -> jax.ShapeDtypeStruct:
    if isinstance(array, jax.ShapeDtypeStruct):
        return array
    aval = jax.typeof(array)
    sharding = array.sharding if isinstance(array, jax.Array) and is_typed(array) else None
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False), sharding=sharding)


def _for_group(array: Any, leaf: Leaf, sharding: jax.sharding.NamedSharding) -> Any:
    """Returns a global array or a random key as a global array, and any other array as a NumPy array."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return array
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return placed(array, sharding) if is_key else np.asarray(array, leaf.dtype)


def _type(array: Any) -> Any:
    """Returns what a program compiled for an array depends on."""
    if isinstance(array, int | float | complex):
        return type(array)
    return array.shape, array.dtype, getattr(array, "weak_type", False)


def _text(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else f"{kind[1]}{list(kind[0])}"
