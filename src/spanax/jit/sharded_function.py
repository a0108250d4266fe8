"""A function of NNX objects, compiled by `spanax.jit`."""

import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, wraps
from operator import is_
from types import MethodType
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx

from spanax.errors import ObjectsError
from spanax.hardware.cluster import Cluster
from spanax.jit.call import CallForm, WithoutSpanax, changed_statics, check_static, split_call
from spanax.jit.objects import Objects, SeenObjects
from spanax.jit.placement import LossOptions, SharedPlacement, place
from spanax.jit.results import attributes, has_objects, returned, with_objects
from spanax.plan.evaluate import evaluate
from spanax.plan.place import as_planned
from spanax.plan.plan import Plan
from spanax.processes.compile_barrier import compiled_with_barrier
from spanax.processes.process_batches import global_batch
from spanax.step.compiled_function import CompiledFunction, compile_notice
from spanax.step.donation import REFERENCES, check_state, expected_references, lost, note_failure, unshared
from spanax.step.placement import place_argument, platform_of
from spanax.step.replay.callbacks import raise_deferred
from spanax.step.sharded_init import placed
from spanax.trace.batch import AUTO
from spanax.trace.program import Program
from spanax.trace.tracing import trace_function
from spanax.trace.user_mesh import is_typed, on_mesh, outside_meshes
from spanax.trace.variables import OPTIMIZER, Leaf, Owner

if TYPE_CHECKING:
    from spanax.check.report import Report

MANY = 5
"""The number of compilations of one function from which each is reported."""

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
      references: the number of references to each donated array that only the objects hold.
    """

    compiled: CompiledFunction
    jitted: Any
    has_objects: bool
    seen: list[Any]
    references: list[int]


@dataclass(eq=False)
class ShardedFunction:
    """A function of NNX objects and arrays that runs sharded over a mesh; see `spanax.jit`.

    Attributes:
      function: the function as written.
      placement: the mesh and layout, shared by functions of the same objects.
      donate: whether the buffers of updated arrays are reused.
      static_argnums: the positions of static arguments.
      static_argnames: the names of static arguments.
      losses: the options of the function's losses.
      is_like: whether another function decides the placement.
      batch_axes: the dims of the arrays with the examples, as in `spanax.jit`.
      compiler_options: as in `jax.jit`.
    """

    function: Callable[..., Any]
    placement: SharedPlacement
    donate: bool = True
    static_argnums: frozenset[int] = frozenset()
    static_argnames: frozenset[str] = frozenset()
    losses: LossOptions = LossOptions()
    is_like: bool = False
    batch_axes: Any = AUTO
    compiler_options: dict[str, Any] = field(default_factory=dict)
    _executables: dict[Key, Executable] = field(default_factory=dict, repr=False)
    _seen: SeenObjects = field(default_factory=SeenObjects, repr=False)
    _latest: CompiledFunction | None = field(default=None, repr=False)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Runs the function: updates its objects in place and returns its results.

        Raises:
          SpanaxError: the arguments cannot be sharded as requested; the objects are unchanged then.
        """
        with WithoutSpanax(), self.placement.turns:
            with nnx.update_context("spanax.jit"):
                pass  # `nnx.cached_partial` requires that a function takes its cache, which is not needed here
            form, nodes, arrays = self._split(args, kwargs)
            objects, structure = self._seen.of(nodes)
            if objects.is_traced or any(isinstance(array, jax.core.Tracer) for array in arrays):
                return self.function(*args, **kwargs)  # another transformation traces it
            key = form, structure, tuple(map(_type, arrays))
            if key not in self._executables:
                self._executables[key] = self._compiled(key, objects, arrays)
                self._seen.accept(nodes, structure)
            return outside_meshes(self._run)(self._executables[key], objects, arrays)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Returns the function as a method of an object."""
        return self if instance is None else MethodType(self, instance)

    def __deepcopy__(self, memo: Any) -> "ShardedFunction":
        """Returns the function itself, as for any function."""
        return self

    def __reduce__(self) -> str:
        """Returns the name by which pickle finds the function in its module, as for any function."""
        return str(getattr(self, "__qualname__", self._name))

    def prepare(self, /, *args: Any, **kwargs: Any) -> Plan:
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
        with WithoutSpanax(), self.placement.turns:
            form, nodes, arrays = self._split(args, kwargs)
            self._latest = self._planned(form, Objects.of(nodes), arrays)
            return self._latest.plan

    @property
    def num_compilations(self) -> int:
        """The number of programs compiled so far: one for each structure and shape of the arguments."""
        return len(self._executables)

    @property
    def program(self) -> Program:
        """The traced function, as of the last call or `prepare`."""
        return self._described.program

    @property
    def plan(self) -> Plan:
        """The sharding of every array, as of the last call or `prepare`."""
        return self._described.plan

    def lower(self, /, *args: Any, **kwargs: Any) -> Any:
        """Returns the lowered function as JAX does: for these arguments, or without any for those of the last call."""
        if args or kwargs:
            self.prepare(*args, **kwargs)
        compiled = self._described
        return outside_meshes(compiled.jitted.lower)(*compiled.arguments())

    def check(self, on: Cluster | str | None = None, **options: Any) -> "Report":
        """Compares the plan with XLA's program, as `spanax.check` does.

        Args:
          on: the devices to plan and check for; by default, those that the function was planned for.
          **options: as in `spanax.check`.
        """
        from spanax.check.check import check  # a call of the function needs none of it

        program = self.program
        plan = self.plan
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
        from spanax.show.placement import axes_text
        from spanax.show.search import array_lines

        program = self.program
        plan = self.plan
        if path is None:
            return "\n".join([axes_text(program), "", str(plan)])
        leaf = plan[path]
        evaluation = evaluate(program, plan, self.placement.cluster())
        return "\n".join(array_lines(leaf, evaluation.collectives_of(path) if leaf.kind != "batch" else {}))

    @property
    def _described(self) -> CompiledFunction:
        if self._latest is None:
            raise ObjectsError(
                f"`{self._name}` has no plan before it is called.", fix=f"{self._name}.prepare(...) with its arguments"
            )
        return self._latest

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

    def _planned(self, form: CallForm, objects: Objects, arrays: Sequence[Any]) -> CompiledFunction:
        """Returns the traced function and its plan, to be compiled."""
        object_names, array_names = form.names(self._parameters)

        @wraps(self.function, updated=())
        def function(nodes: tuple[Any, ...], arrays: list[Any]) -> Any:
            args, kwargs = form.arguments(nodes, arrays)
            before = attributes(nodes)
            return returned(self.function(*args, **kwargs), nodes, before)

        shapes = [_shape(array) for array in arrays]
        if not objects.nodes and not shapes:
            raise ObjectsError(
                f"`{self._name}` has no objects and no arrays to shard.",
                fix="spanax.init(make_objects, like=train_step) to create sharded objects",
            )
        program = trace_function(
            function,
            owners(objects.nodes, object_names),
            shapes,
            array_names,
            self.losses.variant,
            form.example_dims(self.batch_axes, self._parameters, shapes),
        )
        placement = self.placement
        plan = placement.plan_for(program, self.losses, objects.arrays(), arrays, is_like=self.is_like)
        assert placement.mesh is not None
        return CompiledFunction(
            as_planned(program, plan), plan, placement.mesh, self.donate, placement.user_mesh, self.compiler_options
        )

    def _compiled(self, key: Key, objects: Objects, arrays: Sequence[Any]) -> Executable:
        compiled = self._planned(key[0], objects, arrays)
        self._report(key, compiled.program, objects)
        if kind := self.placement.other_kind():
            where = f"{compiled.mesh.size} devices of kind '{kind}'"
            warnings.warn(
                f"`{self._name}` is planned for {self.placement.cluster()}, and runs on {where}.", stacklevel=3
            )
        platform = platform_of(compiled.mesh)
        with compile_notice(f"`{self._name}`", compiled.plan):
            jitted = outside_meshes(compiled_with_barrier)(
                compiled.jitted, compiled.arguments(), platform, self._name, compiled.program.batch, is_eager=True
            )
        step = compiled.program.step
        leaves = jax.tree.unflatten(step.result, [0] * step.num_results)
        return Executable(compiled, jitted, has_objects(leaves), [_UNSEEN] * len(compiled.state), [])

    def _report(self, key: Key, program: Program, objects: Objects) -> None:
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
        before, after = map(_leaf_types, (self._executables[last].compiled.program, program))
        cast = (path for path in after if path in before and before[path] != after[path])
        changed += [f"{path} {before[path]} -> {after[path]}" for path in cast]
        names = key[0].names(self._parameters)[0]
        if last[1] != key[1] and last[0].names(self._parameters)[0] == names:
            prefixes = [owner.prefix for owner in owners(objects.nodes, names)]
            changed += self._seen.changes(last[1], objects, prefixes)
        reason = ", ".join(changed[:3]) or "the structure of the objects changed"
        warnings.warn(f"`{self._name}` is compiled for the {count}th time: {reason}", stacklevel=4)

    def _run(self, executable: Executable, objects: Objects, arrays: Sequence[Any]) -> Any:
        self._latest = compiled = executable.compiled
        state = objects.arrays()
        leaves = compiled.program.leaves
        check_state(leaves, state, compiled.donated[0] if compiled.donated else 0)
        moved = self._placed(executable, state)
        donated = [state[index] for index in compiled.donated]
        read = [state[index] for index in compiled.read]
        donated = unshared(donated, executable.references or [REFERENCES] * len(donated))
        if jax.process_count() > 1:
            batch_leaves = compiled.program.batch
            arrays = [_for_group(*each) for each in zip(arrays, batch_leaves, compiled.batch, strict=True)]
            arrays = global_batch(arrays, compiled.batch, [leaf.path for leaf in batch_leaves])
        batch = [place_argument(array, sharding) for array, sharding in zip(arrays, compiled.batch, strict=True)]
        try:
            after, results = executable.jitted(donated, read, batch)
            if compiled.is_simulated or (compiled.has_callbacks and not self.donate):
                jax.block_until_ready(results or after)
                raise_deferred()
        except Exception as error:
            note_failure(error)
            _raise_if_lost(compiled, state, donated, error)
            raise
        if compiled.updated and isinstance(after[0], jax.core.Tracer):
            raise ObjectsError(
                f"`{self._name}` updates objects while another function is traced that does not take them.",
                fix="pass its objects as arguments of the other function, too",
            )
        if moved:
            objects.update(moved, [state[index] for index in moved])
        objects.update(compiled.updated, after)
        if not executable.references:
            counts = dict(zip(compiled.updated, expected_references(after, results), strict=True))
            executable.references.extend(counts[index] for index in compiled.donated)
        if compiled.user_mesh is not None:
            results = [on_mesh(result, compiled.user_mesh) for result in results]
        call = jax.tree.unflatten(compiled.program.step.result, results)
        return with_objects(call, objects.by_path) if executable.has_objects else call.results

    def _placed(self, executable: Executable, state: list[Any]) -> list[int]:
        """Places the arrays that are not sharded as compiled, in `state`, and returns their indices."""
        compiled = executable.compiled
        seen = executable.seen
        moved = list[int]()
        shardings = [getattr(array, "sharding", None) for array in state]
        for index in () if all(map(is_, shardings, seen)) else range(len(state)):
            if shardings[index] is not seen[index]:
                leaf = compiled.program.leaves[index]
                array = state[index]
                state[index] = place(leaf.path, array, compiled.stored[index], compiled.mesh)
                seen[index] = state[index].sharding
                if state[index] is not array:
                    moved.append(index)
        return moved


def _raise_if_lost(compiled: CompiledFunction, state: Sequence[Any], donated: Sequence[Any], error: Exception) -> None:
    """Raises if arrays did not exist before a call that failed; one that fails on the devices deletes all it donates.

    Raises:
      SpanaxError: an array did not exist.
    """
    deleted_now = {*map(id, donated)} if all(array.is_deleted() for array in donated) else set[int]()
    for leaf, array in zip(compiled.program.leaves, state, strict=True):
        if array.is_deleted() and id(array) not in deleted_now:
            raise lost(leaf.path) from error


def owners(nodes: Sequence[Any], names: Sequence[str]) -> list[Owner]:
    """Returns the objects as owners of arrays: paths begin with their names, but not those of the first module.

    The arrays of the first optimizer begin with `optimizer`, as in `spanax.trace`.
    """
    prefixes = []
    is_used = {"": False, OPTIMIZER: False}
    for node, name in zip(nodes, names, strict=True):
        is_optimizer = isinstance(node, nnx.Optimizer)
        usual = "" if isinstance(node, nnx.Module) else name
        if is_optimizer:
            usual = OPTIMIZER
        prefixes.append(name if is_used.get(usual, False) else usual)
        is_used[usual] = True
    kinds = [isinstance(node, nnx.Optimizer) and not isinstance(node, nnx.ModelAndOptimizer) for node in nodes]
    return [Owner(*each) for each in zip(nodes, prefixes, kinds, names, strict=True)]


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


def _leaf_types(program: Program) -> dict[str, str]:
    return {leaf.path: _text((leaf.shape, leaf.dtype)) for leaf in program.leaves}


def _text(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else f"{kind[1]}{list(kind[0])}"
