"""The traced forward pass of one sequence, and what each of its values depends on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax

from spanax.decoding.derive.associative_scans import as_loops
from spanax.errors import DecodeError, RangeError, SpanaxError, first_line
from spanax.trace.jaxpr.graph import OWN_KERNEL, Body, Graph, Op
from spanax.trace.jaxpr.interpret import Values, evaluate, read, run, with_bodies
from spanax.trace.jaxpr.provenance import Origin, origins
from spanax.trace.kernels.runs import by_reference
from spanax.trace.program import Program
from spanax.trace.tracing import trace_function
from spanax.trace.variables import Owner, take_apart

CONTEXT = Origin.PARAM
TOKENS = Origin.BATCH


@dataclass(frozen=True, eq=False)
class Forward:
    """The forward pass of one sequence from tokens [1, length] to logits [1, length, vocabulary].

    Attributes:
      program: the traced pass; its last output is the logits.
      length: the number of positions.
      per_token: whether each array after the parameters has an element for each token; the first one is the tokens.
    """

    program: Program
    length: int
    per_token: tuple[bool, ...]

    @property
    def graph(self) -> Graph:
        """The operations of the pass."""
        return self.program.step.graph

    @property
    def logits(self) -> int:
        """The value of the logits."""
        return self.graph.body.outputs[-1]

    @property
    def vocabulary(self) -> int:
        """The number of tokens that have a logit."""
        return int(self.graph.shape(self.logits)[-1])

    @property
    def parameters(self) -> tuple[int, ...]:
        """The inputs that are arrays of the model."""
        return self.graph.body.inputs[: len(self.program.leaves)]

    @property
    def arrays(self) -> tuple[int, ...]:
        """The other inputs, of which the tokens are the first."""
        return self.graph.body.inputs[len(self.program.leaves) :]

    @property
    def token_arrays(self) -> tuple[int, ...]:
        """The inputs that have an element for each token, of which the tokens are the first."""
        return tuple(value for value, is_row in zip(self.arrays, self.per_token, strict=True) if is_row)

    @cached_property
    def _origins(self) -> list[int]:
        seeds = zip(self.arrays, self.per_token, strict=True)
        return origins(self.graph, {value: TOKENS if is_per_token else CONTEXT for value, is_per_token in seeds})

    def follows_tokens(self, value: int) -> bool:
        """Whether a value depends on tokens."""
        return bool(self._origins[value] & TOKENS)

    def follows_context(self, value: int) -> bool:
        """Whether a value depends on inputs that are the same for all tokens, and on no token."""
        return self._origins[value] == CONTEXT

    def positions(self, value: int) -> tuple[int, ...]:
        """Returns the dims of a value along which its rows belong to the positions of the sequence."""
        classes = self.program.step.axes.classes
        sequence = classes[self.arrays[0]][1]
        dims = enumerate(zip(classes[value], self.graph.shape(value), strict=True))
        return tuple(dim for dim, (label, size) in dims if label == sequence and size == self.length)


def forward_of(
    function: Callable[..., Any],
    model: Any,
    arrays: Sequence[jax.ShapeDtypeStruct],
    names: Sequence[str],
    per_token: Sequence[bool],
) -> Forward:
    """Returns the forward pass of one sequence, in evaluation mode.

    Args:
      function: returns the logits, given the model and the arrays.
      model: the model.
      arrays: shape and dtype of the tokens, [1, length], and of other arrays of one sequence; or of more.
      names: a name for each array.
      per_token: whether each array has an element for each token.

    Raises:
      SpanaxError: the function cannot be traced, does not return logits, or reads more positions than the model has.
    """
    length = arrays[0].shape[1]
    traced = partial(_traced, function, model, arrays, names, per_token)
    try:
        program = traced(length)
    except SpanaxError:
        raise
    except (TypeError, ValueError) as error:
        if num_positions := _num_positions(traced, model, length):
            raise _too_long(num_positions, length) from error
        raise DecodeError(
            f"the forward pass of {length} tokens fails.",
            where=first_line(error),
            fix="fewer tokens, if the model has fewer positions; a function of the model, for other inputs",
        ) from error
    forward = Forward(program, length, tuple(per_token))
    _check_positions(forward)
    return forward


def resized(forward: Forward, function: Callable[..., Any], model: Any, length: int, rows: int = 1) -> Forward | None:
    """Returns the forward pass of another number of tokens and sequences; None if the model has none.

    Args:
      forward: the forward pass.
      function: as in `forward_of`.
      model: as in `forward_of`.
      length: the number of tokens.
      rows: the number of sequences.
    """
    leaves = forward.program.batch
    arrays = [jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype) for leaf in leaves]
    try:
        program = _traced(function, model, arrays, [leaf.path for leaf in leaves], forward.per_token, length)
    except Exception:  # of a model of certain lengths, such as multiples of a chunk
        return None
    return Forward(program, length, forward.per_token)


def _traced(
    function: Callable[..., Any],
    model: Any,
    arrays: Sequence[jax.ShapeDtypeStruct],
    names: Sequence[str],
    per_token: Sequence[bool],
    length: int,
) -> Program:
    """Returns the program of the logits of a number of tokens; the other arguments are those of `forward_of`."""

    def call(nodes: Sequence[Any], values: Sequence[Any]) -> Any:
        evaluating(nodes[0])
        return logits_of(function(nodes[0], *values), values[0].shape)

    shapes = [
        jax.ShapeDtypeStruct((array.shape[0], length, *array.shape[2:]), array.dtype) if is_row else array
        for array, is_row in zip(arrays, per_token, strict=True)
    ]
    with as_loops():
        program = trace_function(call, [Owner(model)], shapes, names, batch_axes=(0,) * len(arrays))
    plain = _by_references(program.step.graph)
    if plain is None:
        return program
    return trace_function(plain, [Owner(model)], shapes, names, batch_axes=(0,) * len(arrays))


def _by_references(graph: Graph) -> Callable[..., Any] | None:
    """Returns a forward pass with kernels of the user's own computed by their references; None if it has no kernels.

    A kernel computes blocks of positions; its reference computes one as well.
    """
    runs = {op: by_reference(op.params["run"]) for op in graph.ops() if op.name == OWN_KERNEL}
    if not runs or None in runs.values():
        return None

    def computed(op: Op, ins: Sequence[Any]) -> Sequence[Any] | None:
        if op in runs:
            results: Sequence[Any] = runs[op](*ins)
            return results
        return with_bodies(op, ins, inside) if op.bodies else None

    def inside(body: Body, args: Sequence[Any]) -> list[Any]:
        return evaluate(graph.within(body), args, computed)

    return lambda nodes, values: evaluate(graph, [*take_apart([Owner(nodes[0])])[1], *values], computed)[-1]


def evaluating(model: Any) -> Any:
    """Returns a model after it was put in evaluation mode."""
    model.eval()
    model.set_attributes(decode=False, raise_if_not_found=False)  # of Flax's own cache, which is not used
    return model


def _check_positions(forward: Forward) -> None:
    """Checks that positions do not exceed the rows of a table, as of learned embeddings: JAX would clamp them.

    Raises:
      RangeError: they do.
    """
    graph = forward.graph
    inputs = {*graph.body.inputs}
    for op in graph.body.ops:
        if op.name != "gather" or op.inputs[0] not in inputs:
            continue
        ops = graph.slice([op.inputs[1]])
        if any(inputs.intersection(each.inputs) for each in ops):
            continue
        values: Values = {}
        run(graph, ops, values)
        (indices,) = read(graph, values, [op.inputs[1]])
        dims = op.params["dimension_numbers"].start_index_map
        rows = [graph.shape(op.inputs[0])[dim] for dim in dims]
        if (indices.reshape(-1, len(dims)).max(0) >= jax.numpy.array(rows)).any():
            raise _too_long(min(rows), forward.length, op.where)


def _num_positions(traced: Callable[[int], Program], model: Any, length: int) -> int | None:
    """Returns the size of an array of the model that is the most tokens it takes; None if there is none.

    Twice as many fail too, unlike where tokens must be a multiple of a chunk.
    """

    def fails(length: int) -> bool:
        try:
            traced(length)
        except Exception:  # of the user's function
            return True
        return False

    sizes = {size for array in take_apart([Owner(model)])[1] for size in array.shape if size < length}
    longest = (size for size in sorted(sizes, reverse=True) if not fails(size) and fails(size + 1) and fails(2 * size))
    return next(longest, None)


def _too_long(num_positions: int, length: int, where: str = "") -> RangeError:
    return RangeError(
        f"the model has {num_positions} positions, fewer than {length} tokens.",
        where=where,
        fix=f"at most {num_positions} tokens: a shorter prompt, fewer new tokens, or a smaller `length`",
    )


def logits_of(results: Any, shape: tuple[int, int]) -> Any:
    """Returns the logits [rows, positions, vocabulary] among the results of a model.

    They are named so, or all arrays of this form are alike, as those of several heads are; then the first.

    Raises:
      DecodeError: there are none, or it is not clear which they are.
    """
    leaves = jax.tree_util.tree_leaves_with_path(results)
    arrays = [array for _, array in leaves]
    is_score = [
        jax.numpy.issubdtype(getattr(array, "dtype", None), jax.numpy.floating)
        and array.ndim == 3
        and array.shape[:2] == shape
        for array in arrays
    ]
    candidates = [leaf for leaf, is_one in zip(leaves, is_score, strict=True) if is_one]
    named = [array for path, array in candidates if jax.tree_util.keystr(path, simple=True).endswith("logits")]
    if len(named) == 1:
        return named[0]
    if len({array.shape for _, array in candidates}) == 1:  # the first of several heads
        return candidates[0][1]
    found = ", ".join(str(list(getattr(array, "shape", ()))) for array in arrays) or "nothing"
    raise DecodeError(
        f"a model that generates returns logits [batch, tokens, vocabulary]; of tokens {list(shape)}, this one returns "
        f"{found}.",
        fix="pass a function of the model: spanax.decode(model, lambda model, tokens: model(tokens).logits)",
    )
