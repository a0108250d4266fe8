"""A fingerprint of what a program computes, equal across processes and machines.

A value is identified by its operation and, recursively, its operands, down to parameters, batch and constants. Names,
source lines, the order of independent operations, rematerialization and shardings are ignored. Where Spanax writes the
step around a loss, the optimizer and its schedule are ignored too: `--learning-rate` may change.
"""

import dataclasses
import enum
import functools
import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import jax
import numpy as np
from jax.extend import core

from spanax.schema import parsed
from spanax.trace.axes.axes import Traced
from spanax.trace.jaxpr.graph import BODIES, GRADIENT, METRIC, REMAT, Body, Graph, Op
from spanax.trace.optimizers.wrapped import LEARNING_RATE
from spanax.trace.variables import Leaf

FORMAT = "1"
"""Version of the fingerprint format; other versions are not compared."""

VERSIONS = ("jax", "flax", "optax")
"""Packages whose releases may trace the same code to another program."""

IDENTITIES = frozenset(
    "sharding_constraint reshard mesh_cast pvary device_put optimization_barrier copy copy_p name".split()
)
"""Operations whose results are their operands."""

OPAQUE = frozenset({"shard_map"})
"""Operations whose inner shapes depend on a mesh: they are identified by the primitives that they run."""

LEFT_OUT = re.compile(
    r".*(sharding|layout|mesh|device|debug|source|src_info|metadata|name)s?|srcs|copy_semantics|inline|linear|unroll|"
    r"_split_transpose|donated_invars|keep_unused|compiler_options_kvs|policy|prevent_cse|differentiated"
)
"""Parameters of operations that do not affect the result."""

GRAD_NORM = "grad_norm"
"""The metric that is computed from the gradients."""

MOST_LISTED = 6

_ADDRESS = re.compile(r" at 0x[0-9a-f]+|0x[0-9a-f]+|<locals>\.")


@dataclasses.dataclass(frozen=True)
class Computation:
    """The fingerprint of what a train step computes from its state and batch.

    Attributes:
      versions: of the packages that traced the program, and of the fingerprint format.
      loss: digest of the loss and its metrics.
      gradients: digest of the gradients of all parameters.
      state: digest of all other state after a step: statistics, random numbers; for a user-defined `train_step` also
        parameters and optimizer.
      operations: number of operations of each primitive.
    """

    versions: Mapping[str, str]
    loss: str
    gradients: str
    state: str
    operations: Mapping[str, int]

    @staticmethod
    def of(step: Traced, leaves: Sequence[Leaf]) -> "Computation":
        """Returns the computation of a traced step; `leaves` are the leaves of its state."""
        graph = step.graph
        values = {value: _digest("input", str(index)) for index, value in enumerate(graph.body.inputs)}
        _run(graph, graph.body, values)
        gradients = {mark: value for mark, value in graph.marks.items() if mark.startswith(GRADIENT)}
        after = zip(leaves, graph.body.outputs, strict=False)
        other_state = {leaf.path: value for leaf, value in after if not gradients or leaf.kind == "other"}
        result_by_name = dict(step.results) if isinstance(step.results, Mapping) else {"": step.results}
        rates = {LEARNING_RATE, *(mark.removeprefix(METRIC) for mark in graph.marks if mark.startswith(METRIC))}
        metrics = {
            name: value for name, value in result_by_name.items() if not gradients or name not in {GRAD_NORM, *rates}
        }
        roots = [*gradients.values(), *other_state.values(), *jax.tree.leaves(metrics)]

        def text(group: Any) -> str:
            indices, treedef = jax.tree.flatten(group)
            return _digest(str(treedef), *(values[value] for value in indices))

        return Computation(
            {"format": FORMAT} | {name: version(name) for name in VERSIONS},
            text(metrics),
            text(gradients),
            text(other_state),
            dict(sorted(_operations(graph, roots).items())),
        )

    @staticmethod
    def from_json(data: Any) -> "Computation":
        """Returns the computation from plain values.

        Raises:
          ValueError: the values do not describe a computation.
        """
        return parsed(Computation, data)

    def to_json(self) -> dict[str, Any]:
        """Returns the computation as plain values."""
        return dataclasses.asdict(self)

    def other_versions(self, before: "Computation") -> list[str]:
        """Returns the versions that differ; equal code may then have another digest, and is not compared."""
        names = sorted({*self.versions, *before.versions})
        pairs = [(name, before.versions.get(name, "none"), self.versions.get(name, "none")) for name in names]
        return [f"{name} {old}, now {new}" for name, old, new in pairs if old != new]

    def differences(self, before: "Computation") -> list[str]:
        """Returns the differences from an earlier computation as messages; empty if equal.

        Example:
          >>> computation = Computation({}, "a", "b", "c", {"tanh": 2, "mul": 4})
          >>> computation.differences(Computation({}, "d", "b", "c", {"sin": 2, "mul": 4}))
          ['the loss', 'operations: sin 2, now 0; tanh 0, now 2']
        """
        parts = {"the loss": "loss", "the gradients": "gradients", "the state after a step": "state"}
        messages = [part for part, name in parts.items() if getattr(self, name) != getattr(before, name)]
        counts = [
            f"{name} {before.operations.get(name, 0)}, now {self.operations.get(name, 0)}"
            for name in sorted({*self.operations, *before.operations})
            if self.operations.get(name) != before.operations.get(name)
        ]
        if messages and counts:
            messages.append(f"operations: {'; '.join(counts[:MOST_LISTED])}{'; ...' * (len(counts) > MOST_LISTED)}")
        elif messages:
            messages.append("the same operations on other numbers or in another order")
        return messages


def _run(graph: Graph, body: Body, texts: dict[int, str]) -> list[str]:
    """Adds the digests of the values of a body to those of its inputs, and returns those of its outputs."""

    def read(value: int) -> str:
        if value not in texts:
            texts[value] = _of_constant(graph.constants[value])
        return texts[value]

    for op in body.ops:
        operands = [read(value) for value in op.inputs]
        if op.name in IDENTITIES and len(op.inputs) == len(op.outputs):
            results = operands
        elif op.name in REMAT and op.bodies:
            (inner,) = op.bodies
            results = _run(graph, inner, dict(zip(inner.inputs, operands, strict=True)))
        else:
            text = _of_op(graph, op, operands)
            avals = [_of_aval(graph.avals[value]) for value in op.outputs]
            results = [_digest(text, str(index), aval) for index, aval in enumerate(avals)]
        texts.update(zip(op.outputs, results, strict=True))
    return [read(value) for value in body.outputs]


def _of_op(graph: Graph, op: Op, ins: Sequence[str]) -> str:
    if op.name in OPAQUE:
        return _digest(op.name, *_primitives(list(op.params.values())), *ins)
    bodies = []
    for body in op.bodies:
        digests = {value: _digest("argument", str(index)) for index, value in enumerate(body.inputs)}
        bodies.append(_digest(*_run(graph, body, digests)))
    params = {key: value for key, value in op.params.items() if key not in BODIES.get(op.name, ())}
    return _digest(op.name, _plain(params), *bodies, *ins)


def _digest(*texts: str) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for text in texts:
        digest.update(f"{len(text)}:{text}".encode())
    return digest.hexdigest()


def _of_aval(aval: Any) -> str:
    return f"{getattr(aval, 'dtype', aval)}{getattr(aval, 'shape', ())}"


def _of_constant(value: Any) -> str:
    """Returns the digest of a constant; floats are rounded so that machines with other math libraries agree."""
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    array = np.asarray(value)
    if array.dtype == object:  # a value of a user-defined type
        return _of_object(value)
    aval = f"{array.dtype}{array.shape}"
    if not jax.dtypes.issubdtype(array.dtype, np.inexact):
        return _digest("constant", aval, hashlib.blake2b(np.ascontiguousarray(array).tobytes()).hexdigest())
    parts = [array.real, array.imag] if jax.dtypes.issubdtype(array.dtype, np.complexfloating) else [array]
    flat = np.concatenate([part.astype(np.float64).ravel() for part in parts])
    if flat.size <= 2:
        return _digest("constant", aval, *(f"{number:.6g}" for number in flat))
    is_finite = np.isfinite(flat)
    flat = np.where(is_finite, flat, 0.0)
    weights = 1.0 + np.arange(flat.size) * 7919 % 101 / 101
    scale = float(np.abs(flat).sum())
    shares = [float((flat * row).sum()) / scale if scale else 0.0 for row in (weights, weights[::-1], weights**2)]
    return _digest(
        "constant", aval, str(int(is_finite.sum())), f"{scale:.3g}", *(f"{share + 0.0:.3f}" for share in shares)
    )


def _plain(value: Any) -> str:
    """Returns the text of an operation's parameter without parts that differ between processes."""
    if value is None or isinstance(value, bool | int | str | bytes | np.generic | np.dtype):
        return f"{type(value).__name__} {value!r}" if isinstance(value, str | bytes) else str(value)
    if isinstance(value, float | complex):
        return f"{value:.6g}"
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, core.ClosedJaxpr | core.Jaxpr):
        return _of_jaxpr(value)
    if isinstance(value, Mapping):
        pairs = sorted((str(key), item) for key, item in value.items() if not LEFT_OUT.fullmatch(str(key)))
        return _digest(*(f"{key}={_plain(item)}" for key, item in pairs))
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
    type_name = f"{type(value).__module__}.{type(value).__qualname__}"
    if dataclasses.is_dataclass(value):
        return _digest(
            type_name, _plain({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
        )
    text = _ADDRESS.sub("", repr(value))
    return type_name if text.startswith(f"<{type_name}") else f"{type_name} {text}"


def _of_jaxpr(jaxpr: Any) -> str:
    """Returns the digest of a jaxpr inside an operation whose bodies are not traversed, equation by equation."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    numbers: dict[Any, str] = {}

    def number(var: Any) -> str:
        if isinstance(var, core.Literal):
            return _of_constant(var.val)
        return numbers.setdefault(var, str(len(numbers)))

    lines = [",".join(f"{number(var)} {_of_aval(var.aval)}" for var in (*jaxpr.constvars, *jaxpr.invars))]
    for eqn in jaxpr.eqns:
        ins = map(number, eqn.invars)
        outs = (f"{number(var)} {_of_aval(var.aval)}" for var in eqn.outvars)
        lines.append(f"{eqn.primitive.name} {_plain(dict(eqn.params))} {','.join(ins)} {','.join(outs)}")
    return _digest(*lines, *map(number, jaxpr.outvars))


def _primitives(value: Any) -> list[str]:
    """Returns the names of the primitives in the jaxprs of a parameter."""
    if isinstance(value, tuple | list):
        return [name for item in value for name in _primitives(item)]
    jaxpr = getattr(value, "jaxpr", value)
    if not isinstance(jaxpr, core.Jaxpr):
        return []
    return [name for eqn in jaxpr.eqns for name in (eqn.primitive.name, *_primitives(list(eqn.params.values())))]


def _operations(graph: Graph, roots: Sequence[int]) -> Counter[str]:
    """Returns the number of operations per primitive that `roots` depend on, including those of bodies."""
    bodies = lambda op: (inner for body in op.bodies for inner in graph.within(body).ops())  # noqa: E731
    names = (inner.name for op in graph.slice(roots) for inner in (op, *bodies(op)))
    return Counter(name for name in names if name not in IDENTITIES)
