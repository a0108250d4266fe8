"""A fingerprint of what a program computes, equal across processes and machines.

A value is identified by its operation and, recursively, its operands, down to parameters, batch and constants. Names,
source lines, the order of independent operations, rematerialization and shardings do not count. Where Spanax writes the
step around a loss, the optimizer and its schedule do not count either: `--lr` may change.
"""

import dataclasses
import enum
import functools
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import jax
import numpy as np
from jax.extend import core

from spanax.schema import parsed
from spanax.trace.jaxpr.graph import BODIES, REMAT, Body, Graph, Op
from spanax.trace.jaxpr.marks import GRADIENT, METRIC
from spanax.trace.optimizers.learning_rates import LEARNING_RATE
from spanax.trace.traced import Traced
from spanax.trace.variables import Leaf

FORMAT = "1"
"""Of these texts; another one is not compared."""

VERSIONS = ("jax", "flax", "optax")
"""Packages that write another program of the same code from time to time."""

IDENTITIES = frozenset(
    "sharding_constraint reshard mesh_cast pvary device_put optimization_barrier copy copy_p name".split()
)
"""Operations that pass on the values they read."""

OPAQUE = frozenset({"shard_map"})
"""Operations whose shapes inside follow from a mesh: they are known by the primitives that they run."""

LEFT_OUT = re.compile(
    r".*(sharding|layout|mesh|device|debug|source|src_info|metadata|name)s?|srcs|copy_semantics|inline|linear|unroll|"
    r"_split_transpose|donated_invars|keep_unused|compiler_options_kvs|policy|prevent_cse|differentiated"
)
"""Parameters of operations that change no number."""

GRAD_NORM = "grad_norm"
"""The metric that follows from the gradients."""

MOST_LISTED = 6

_ADDRESS = re.compile(r" at 0x[0-9a-f]+|0x[0-9a-f]+|<locals>\.")


@dataclasses.dataclass(frozen=True)
class Computation:
    """What a train step computes of its state and batch.

    Attributes:
      versions: of the packages that wrote the program, and of this form.
      loss: stands for the loss and its metrics.
      gradients: stands for the gradients of all parameters.
      state: stands for all other state after a step: statistics, random numbers; of a `train_step` of the user's own
        also parameters and optimizer.
      operations: how many there are of each primitive.
    """

    versions: Mapping[str, str]
    loss: str
    gradients: str
    state: str
    operations: Mapping[str, int]

    @staticmethod
    def of(step: Traced, leaves: Sequence[Leaf]) -> "Computation":
        """What a traced step computes; `leaves` are those of its state."""
        graph, num_state = step.graph, len(leaves)
        values = _Values(graph).of_all()
        gradients = {mark: value for mark, value in graph.marks.items() if mark.startswith(GRADIENT)}
        after = zip(leaves, graph.body.outputs, strict=False)
        others = {leaf.path: value for leaf, value in after if not gradients or leaf.kind == "other"}
        results = jax.tree.unflatten(step.result, graph.body.outputs[num_state:])
        named = dict(results) if isinstance(results, Mapping) else {"": results}
        rates = {LEARNING_RATE, *(mark.removeprefix(METRIC) for mark in graph.marks if mark.startswith(METRIC))}
        metrics = {name: value for name, value in named.items() if not gradients or name not in {GRAD_NORM, *rates}}
        roots = [*gradients.values(), *others.values(), *jax.tree.leaves(metrics)]

        def text(group: Any) -> str:
            found, treedef = jax.tree.flatten(group)
            return _digest(str(treedef), *(values[value] for value in found))

        return Computation(
            {"format": FORMAT} | {name: version(name) for name in VERSIONS},
            text(metrics),
            text(gradients),
            text(others),
            dict(sorted(_operations(graph, roots).items())),
        )

    @staticmethod
    def from_json(data: Any) -> "Computation":
        """The computation that was recorded as plain values.

        Raises:
          ValueError: they are none.
        """
        return parsed(Computation, data)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return dataclasses.asdict(self)

    def other_versions(self, before: "Computation") -> list[str]:
        """Versions that differ: then equal code may have another text, and is not compared."""
        names = sorted({*self.versions, *before.versions})
        pairs = [(name, before.versions.get(name, "none"), self.versions.get(name, "none")) for name in names]
        return [f"{name} {old}, now {new}" for name, old, new in pairs if old != new]

    def differences(self, before: "Computation") -> list[str]:
        """What differs from an earlier computation, for the user; empty where nothing does.

        Example:
          >>> one = Computation({}, "a", "b", "c", {"tanh": 2, "mul": 4})
          >>> one.differences(Computation({}, "d", "b", "c", {"sin": 2, "mul": 4}))
          ['the loss', 'operations: sin 2, now 0; tanh 0, now 2']
        """
        parts = {"the loss": "loss", "the gradients": "gradients", "the state after a step": "state"}
        found = [what for what, name in parts.items() if getattr(self, name) != getattr(before, name)]
        counts = [
            f"{name} {before.operations.get(name, 0)}, now {self.operations.get(name, 0)}"
            for name in sorted({*self.operations, *before.operations})
            if self.operations.get(name) != before.operations.get(name)
        ]
        if found and counts:
            found.append(f"operations: {'; '.join(counts[:MOST_LISTED])}{'; ...' * (len(counts) > MOST_LISTED)}")
        elif found:
            found.append("the same operations on other numbers or in another order")
        return found


@dataclasses.dataclass(frozen=True)
class _Values:
    """The texts of the values of a graph."""

    graph: Graph

    def of_all(self) -> dict[int, str]:
        """Of every value of the outermost body."""
        texts = {value: _digest("input", str(index)) for index, value in enumerate(self.graph.body.inputs)}
        self._run(self.graph.body, texts)
        return texts

    def _run(self, body: Body, texts: dict[int, str]) -> list[str]:
        """Adds the values of a body to those of its inputs; returns those of its outputs."""

        def read(value: int) -> str:
            if value not in texts:
                texts[value] = _of_constant(self.graph.constants[value])
            return texts[value]

        for op in body.ops:
            ins = [read(value) for value in op.inputs]
            if op.name in IDENTITIES and len(op.inputs) == len(op.outputs):
                outs = ins
            elif op.name in REMAT and op.bodies:
                (inner,) = op.bodies
                outs = self._run(inner, dict(zip(inner.inputs, ins, strict=True)))
            else:
                text = self._of_op(op, ins)
                outs = [_digest(text, str(index), self._aval(value)) for index, value in enumerate(op.outputs)]
            texts.update(zip(op.outputs, outs, strict=True))
        return [read(value) for value in body.outputs]

    def _of_op(self, op: Op, ins: Sequence[str]) -> str:
        if op.name in OPAQUE:
            return _digest(op.name, *_primitives(list(op.params.values())), *ins)
        bodies = []
        for body in op.bodies:
            known = {value: _digest("argument", str(index)) for index, value in enumerate(body.inputs)}
            bodies.append(_digest(*self._run(body, known)))
        held = BODIES.get(op.name, ())
        params = {key: value for key, value in op.params.items() if key not in held}
        return _digest(op.name, _plain(params), *bodies, *ins)

    def _aval(self, value: int) -> str:
        return _of_aval(self.graph.avals[value])


def _digest(*texts: str) -> str:
    found = hashlib.blake2b(digest_size=12)
    for text in texts:
        found.update(f"{len(text)}:{text}".encode())
    return found.hexdigest()


def _of_aval(aval: Any) -> str:
    return f"{getattr(aval, 'dtype', aval)}{getattr(aval, 'shape', ())}"


def _of_constant(value: Any) -> str:
    """A constant; floating ones to as many digits as machines with other math libraries agree in."""
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    array = np.asarray(value)
    if array.dtype == object:  # a value of a type of the user's own
        return _of_object(value)
    kind = f"{array.dtype}{array.shape}"
    if not jax.dtypes.issubdtype(array.dtype, np.inexact):
        return _digest("constant", kind, hashlib.blake2b(np.ascontiguousarray(array).tobytes()).hexdigest())
    parts = [array.real, array.imag] if jax.dtypes.issubdtype(array.dtype, np.complexfloating) else [array]
    flat = np.concatenate([part.astype(np.float64).ravel() for part in parts])
    if flat.size <= 2:
        return _digest("constant", kind, *(f"{number:.6g}" for number in flat))
    is_finite = np.isfinite(flat)
    flat = np.where(is_finite, flat, 0.0)
    weights = 1.0 + np.arange(flat.size) * 7919 % 101 / 101
    scale = float(np.abs(flat).sum())
    shares = [float((flat * one).sum()) / scale if scale else 0.0 for one in (weights, weights[::-1], weights**2)]
    return _digest(
        "constant", kind, str(int(is_finite.sum())), f"{scale:.3g}", *(f"{share + 0.0:.3f}" for share in shares)
    )


def _plain(value: Any) -> str:
    """A parameter of an operation without what differs from process to process."""
    if value is None or isinstance(value, bool | int | str | bytes | np.generic | np.dtype):
        return f"{type(value).__name__} {value!r}" if isinstance(value, str | bytes) else str(value)
    if isinstance(value, float | complex):
        return f"{value:.6g}"
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, core.ClosedJaxpr | core.Jaxpr):
        return _of_jaxpr(value)
    if isinstance(value, Mapping):
        pairs = sorted((str(key), one) for key, one in value.items() if not LEFT_OUT.fullmatch(str(key)))
        return _digest(*(f"{key}={_plain(one)}" for key, one in pairs))
    if isinstance(value, tuple | list):
        return _digest(type(value).__name__ if hasattr(value, "_fields") else "", *map(_plain, value))
    if isinstance(value, set | frozenset):
        return _digest(*sorted(map(_plain, value)))
    if isinstance(value, np.ndarray | jax.Array):
        return _of_constant(value)
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return _of_aval(value)
    return _of_object(value)


def _of_object(value: Any) -> str:
    if isinstance(value, functools.partial):
        return _digest(_plain(value.func), _plain(value.args), _plain(value.keywords))
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return _ADDRESS.sub("", f"{value.__module__}.{value.__qualname__}")
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if dataclasses.is_dataclass(value):
        return _digest(kind, _plain({field.name: getattr(value, field.name) for field in dataclasses.fields(value)}))
    text = _ADDRESS.sub("", repr(value))
    return kind if text.startswith(f"<{kind}") else f"{kind} {text}"


def _of_jaxpr(jaxpr: Any) -> str:
    """A program inside of an operation whose bodies are not followed, equation by equation."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    numbers: dict[Any, str] = {}

    def number(var: Any) -> str:
        if isinstance(var, core.Literal):
            return _of_constant(var.val)
        return numbers.setdefault(var, str(len(numbers)))

    lines = [",".join(f"{number(var)} {_of_aval(var.aval)}" for var in (*jaxpr.constvars, *jaxpr.invars))]
    for eqn in jaxpr.eqns:
        ins, outs = map(number, eqn.invars), (f"{number(var)} {_of_aval(var.aval)}" for var in eqn.outvars)
        lines.append(f"{eqn.primitive.name} {_plain(dict(eqn.params))} {','.join(ins)} {','.join(outs)}")
    return _digest(*lines, *map(number, jaxpr.outvars))


def _primitives(value: Any) -> list[str]:
    """The names of the primitives in everything that a parameter holds."""
    if isinstance(value, tuple | list):
        return [name for one in value for name in _primitives(one)]
    jaxpr = getattr(value, "jaxpr", value)
    if not isinstance(jaxpr, core.Jaxpr):
        return []
    return [name for eqn in jaxpr.eqns for name in (eqn.primitive.name, *_primitives(list(eqn.params.values())))]


def _operations(graph: Graph, roots: Sequence[int]) -> Counter[str]:
    """How many operations of each primitive some values need, those of bodies included."""
    needed, found = set(roots), Counter[str]()

    def count(op: Op, add: Callable[[str], None]) -> None:
        if op.name not in IDENTITIES:
            add(op.name)
        for body in op.bodies:
            for inner in body.ops:
                count(inner, add)

    for op in reversed(graph.body.ops):
        if needed.intersection(op.outputs):
            needed.update(op.inputs)
            count(op, lambda name: found.update([name]))
    return found
