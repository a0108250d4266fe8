"""Rewrites a loss so that its logits are computed in chunks of tokens, together with their gradients.

The rewrite precedes differentiation. Where the loss is linear in its per-token terms, the weight of each token is known
in advance; a chunk computes its gradients in the forward pass and nothing is computed twice.

The part that handles logits token by token begins with a matmul with a weight, and ends where tokens are
reduced or the vocabulary dim is gone. An operation that is independent per row can be evaluated on some of the rows.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import dropwhile
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from spanax.errors import VariantError
from spanax.trace.jaxpr.dim_maps.relations import Family, Kind
from spanax.trace.jaxpr.graph import CALLS, LOSS_CHUNKS, Graph, Op, from_jaxpr
from spanax.trace.jaxpr.interpret import Values, evaluate, read, run
from spanax.trace.jaxpr.linear import is_linear
from spanax.trace.rewrites.traced_once import jaxpr_of

CHUNKED = frozenset({Family.ELEMENTWISE, Family.VIEW, Family.RESIZE, Family.REDUCTION, Family.CUMULATIVE})
CHUNKED |= {Family.GATHER, Family.IOTA, Family.OTHER}
"""Operations that are chunked where their rows are independent; others end a region."""

HALF = 2
"""A value with at least 1 / HALF as many elements as the logits must be chunked."""


@dataclass(frozen=True, eq=False)
class Region:
    """Operations that are independent per row of one dim.

    Attributes:
      heads: the products that it begins with.
      ops: the operations, in order; includes the products.
      dims: the token dim of each chunked value.
      fixed: inputs shared by all rows.
      scanned: inputs that are chunked.
      outs: values read outside the region.
      logits: number of elements of the largest product.
    """

    heads: tuple[Op, ...]
    ops: tuple[Op, ...]
    dims: dict[int, int]
    fixed: tuple[int, ...]
    scanned: tuple[int, ...]
    outs: tuple[int, ...]
    logits: int

    def most_chunks(self, graph: Graph) -> int:
        """Returns the greatest common divisor of the sizes of the token dims."""
        return math.gcd(*(graph.shape(value)[dim] for value, dim in self.dims.items()))


@dataclass(frozen=True)
class Mismatch:
    """Logits that cannot be chunked, and why."""

    why: str
    op: Op


def regions(graph: Graph, batch: frozenset[int]) -> list[Region] | Mismatch | None:
    """Returns the regions of the largest logits; why there are none; or None without logits.

    Args:
      graph: a loss.
      batch: the inputs that belong to the batch.
    """
    heads = sorted(_heads(graph, batch), key=lambda head: -math.prod(graph.shape(head[0].outputs[0])))
    selected: list[Region] = []
    mismatches: dict[Op, Mismatch] = {}
    for op, dims in heads:
        if any(op in region.ops for region in selected):
            continue
        candidates = [_Growing(graph, {op: dim}).region() for dim in dims]
        valid = [region for region in candidates if isinstance(region, Region)]
        if valid:
            selected.append(max(valid, key=lambda region: (divisor := region.most_chunks(graph)) & -divisor))
        else:
            mismatches[op] = next(region for region in candidates if isinstance(region, Mismatch))
    order = graph.positions
    if not selected:
        return mismatches[max(mismatches, key=order.__getitem__)] if mismatches else None
    large = [region for region in selected if HALF * region.logits >= selected[0].logits]
    return _independent(graph, sorted(large, key=lambda region: [order[op] for op in region.ops]))


def _heads(graph: Graph, batch: frozenset[int]) -> Iterator[tuple[Op, list[int]]]:
    """Yields products of activations and a weight, each with the token dims of the result, last first."""
    dependent = set(batch)
    for op in graph.body.ops:
        if not dependent.isdisjoint(op.inputs):
            dependent.update(op.outputs)
        if op.name != "dot_general" or not jnp.issubdtype(graph.avals[op.outputs[0]].dtype, jnp.floating):
            continue
        contracted, batched = op.params["dimension_numbers"]
        is_activation = [v in dependent for v in op.inputs]
        if any(batched) or sum(is_activation) != 1:
            continue
        side = is_activation.index(True)
        free = [len(graph.shape(value)) - len(dims) for value, dims in zip(op.inputs, contracted, strict=True)]
        first = 0 if side == 0 else free[0]
        dims = [dim for dim in range(first, first + free[side]) if graph.shape(op.outputs[0])[dim] > 1]
        if dims and free[1 - side]:
            yield op, dims[::-1]


def _independent(graph: Graph, candidates: list[Region]) -> list[Region]:
    """Returns regions of which none shares operations with another, or depends on it.

    A sum of per-token losses belongs to the regions of all its terms: these are merged where possible.
    """
    selected: list[Region] = []
    for region in candidates:
        related = [other for other in selected if _are_related(graph, other, region)]
        merged = _merged(graph, [*related, region]) if related else region
        rest = [other for other in selected if other not in related]
        if merged is not None and not any(_are_related(graph, other, merged) for other in rest):
            selected = [*rest, merged]
    return selected


def _are_related(graph: Graph, first: Region, second: Region) -> bool:
    """Whether two regions share operations, or one depends on the other."""
    pairs = ((first, second), (second, first))
    return not set(first.ops).isdisjoint(second.ops) or any(
        not dependents(graph, region.outs).isdisjoint((*other.scanned, *other.fixed)) for region, other in pairs
    )


def _merged(graph: Graph, parts: list[Region]) -> Region | None:
    """Returns the region of the products of several; None if it does not include all of them."""
    heads = {head: part.dims[head.outputs[0]] for part in parts for head in part.heads}
    region = _Growing(graph, heads).region()
    return region if isinstance(region, Region) and heads.keys() <= set(region.ops) else None


def dependents(graph: Graph, values: Iterable[int]) -> set[int]:
    """Returns these values and all values that depend on them."""
    results = set(values)
    for op in graph.body.ops:
        if not results.isdisjoint(op.inputs):
            results.update(op.outputs)
    return results


@dataclass(eq=False)
class _Growing:
    """A region grown from products, each along one of its dims."""

    graph: Graph
    heads: dict[Op, int]
    dims: dict[int, int] = field(default_factory=dict)
    results: dict[int, None] = field(default_factory=dict)
    fixed: dict[int, None] = field(default_factory=dict)
    members: list[Op] = field(default_factory=list)
    adjacent: dict[int, int] = field(default_factory=dict)

    def region(self) -> Region | Mismatch:
        """Grows the region by consumers of the logits and by producers of operands as large as the logits."""
        roots = self.heads
        is_complete = False
        while not is_complete:
            mismatch = self._grow(roots)
            if mismatch is not None:
                return mismatch
            adjacent = ((value, dim) for value, dim in self.adjacent.items() if value not in self.results)
            new_roots = {self.graph.producers[value]: dim for value, dim in adjacent}
            is_complete, roots = not new_roots, roots | new_roots
        scanned = tuple(value for value in self.dims if value not in self.results)
        members = tuple(self.members)
        fixed = tuple(self.fixed)
        return Region(tuple(self.heads), members, self.dims, fixed, scanned, self._outs(), self._num_logits)

    def _grow(self, roots: dict[Op, int]) -> Mismatch | None:
        self.dims = {}
        self.results = {}
        self.fixed = {}
        self.members = []
        self.adjacent = {}
        after = set[int]()
        for op in dropwhile(lambda op: op not in roots, self.graph.body.ops):
            region_inputs = [value for value in op.inputs if value in self.results]
            if not region_inputs and op not in roots and after.isdisjoint(op.inputs):
                continue
            if after.isdisjoint(op.inputs) and self._joins(op, roots.get(op)):
                self.members.append(op)
                continue
            after.update(op.outputs)
            if any(map(self._is_large, region_inputs)):
                return Mismatch(f"'{op.name}' uses all of the logits, or combines tokens", op)
        if any(map(self._is_large, self._outs())):
            return Mismatch("its logits are among the results", next(iter(self.heads)))
        return None

    def _joins(self, op: Op, root: int | None) -> bool:
        """Adds an operation if it is independent per row; `root` is the token dim of a root's result."""
        is_product = op.name == "dot_general"
        if op.eqn.effects or (root is None and is_product):
            return False
        for dim in range(len(self.graph.shape(op.outputs[0]))) if root is None else (root,):
            operand_dims = across(self.graph, op, dim)
            if operand_dims is None or not self._agrees(op, operand_dims):
                continue
            for value, operand_dim in zip(op.inputs, operand_dims, strict=True):
                if operand_dim is None:
                    self.fixed |= {} if value in self.graph.constants else {value: None}
                    continue
                self.dims[value] = operand_dim
                producer = self.graph.producers.get(value)
                if not is_product and producer is not None and self._is_large(value):
                    self.adjacent |= {} if across(self.graph, producer, operand_dim) is None else {value: operand_dim}
            self.dims |= dict.fromkeys(op.outputs, dim)
            self.results |= dict.fromkeys(op.outputs)
            return True
        return False

    def _agrees(self, op: Op, operand_dims: tuple[int | None, ...]) -> bool:
        """Whether no operand is already chunked along another dim, or both chunked and fixed."""
        return all(
            value not in self.dims
            if operand_dim is None
            else self.dims.get(value, operand_dim) == operand_dim and value not in self.fixed
            for value, operand_dim in zip(op.inputs, operand_dims, strict=True)
        )

    def _outs(self) -> tuple[int, ...]:
        members = set(self.members)
        outputs = set(self.graph.body.outputs)
        is_read = lambda value: not members.issuperset(self.graph.readers[value])  # noqa: E731
        return tuple(value for value in self.results if value in outputs or is_read(value))

    @cached_property
    def _num_logits(self) -> int:
        return max(math.prod(self.graph.shape(head.outputs[0])) for head in self.heads)

    def _is_large(self, value: int) -> bool:
        return HALF * math.prod(self.graph.shape(value)) >= self._num_logits


def across(graph: Graph, op: Op, dim: int) -> tuple[int | None, ...] | None:
    """Returns the operands' token dims for one of the results, if each row depends only on the same row of theirs.

    A reshape has the same chunks along the last dims of two runs with the same elements.
    """
    is_chunked = op.family in CHUNKED and len(op.outputs) <= max(1, len(op.inputs))
    if graph.shape(op.outputs[0])[dim] <= 1 or not (is_chunked or op.name in ("dot_general", "top_k")):
        return None
    for relation in op.dim_map.of_kind(Kind.FACTORS):
        if relation.other[-1][1] == dim:
            return (relation.dims[-1][1],)
    dims = {op.dim_map.operand_dims(dim, result) for result in range(len(op.outputs))}
    return dims.pop() if len(dims) == 1 else None


def narrowed(op: Op, dim: int, operand_dims: tuple[int | None, ...], count: int) -> dict[str, object]:
    """Returns an operation's parameters for one of `count` equal chunks along a dim of its result."""
    params = dict(op.params)
    chunked = {"shape": dim, "new_sizes": dim, "limit_indices": dim, "slice_sizes": next(iter(operand_dims), None)}
    for key in chunked.keys() & params.keys():
        sizes = enumerate(params[key])
        params[key] = tuple(size // count if i == chunked[key] and size > 1 else size for i, size in sizes)
    return params


IGNORED = frozenset({"sharding_constraint", "reshard"})
"""User constraints refer to another mesh and to unchunked shapes; the plan chooses shardings instead."""


def chunked_loss(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Returns an equivalent pure function that computes its logits in `count` chunks, one at a time.

    Args:
      function: takes pytrees of arrays, the batch last; the first array that it returns is the loss.
      count: number of chunks; 1 returns `function` unchanged.

    Raises:
      SpanaxError: when called, if the loss has no logits, or its logits cannot be chunked.

    Example:
      >>> def loss(head, batch):
      ...     logits = batch["x"] @ head
      ...     return -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][:, None], 1).mean()
      >>> head, x, y = jnp.ones((4, 100)), jnp.ones((8, 4)), jnp.zeros(8, "int32")
      >>> text = str(jax.make_jaxpr(jax.grad(chunked_loss(loss, 4)))(head, {"x": x, "y": y}))
      >>> "f32[8,100]" in text, "f32[2,100]" in text
      (False, True)
    """
    if count == 1:
        return function

    def chunked(*args: Any) -> Any:
        closed, shapes = jaxpr_of(function, *args)
        leaves = jax.tree.leaves(args)
        num_batch = len(jax.tree.leaves(args[-1]))
        graph, candidates = _candidates(closed, leaves, num_batch)
        results = _evaluate(graph, _checked(graph, candidates, count), leaves, count)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return chunked


def _candidates(closed: Any, args: Sequence[Any], num_batch: int) -> tuple[Graph, list[Region] | Mismatch | None]:
    graph = from_jaxpr(closed, CALLS, as_traced=True)
    candidates = regions(graph, frozenset((*graph.body.inputs[len(args) - num_batch :], *graph.captured)))
    is_sum = isinstance(candidates, Mismatch) and candidates.op.name == "reduce_sum"
    if not isinstance(candidates, Mismatch) or not is_sum or len(candidates.op.params["axes"]) < 2:
        return graph, candidates
    summed = candidates.op
    *rest, last = sorted(candidates.op.params["axes"])

    def override(op: Op, ins: Sequence[Any]) -> list[Any] | None:
        """Decomposes the sum over several dims: first over the last dim, then over the rest."""
        parts = op.bind(ins, op.params | {"axes": (last,)}) if op is summed else None
        return parts and op.bind(parts, op.params | {"axes": tuple(rest)})

    again = jax.make_jaxpr(lambda *args: evaluate(graph, args, override))(*args)
    return _candidates(again, args, num_batch)


def _checked(graph: Graph, candidates: list[Region] | Mismatch | None, count: int) -> list[Region]:
    if candidates is None:
        raise VariantError(
            "the loss has no logits to compute in chunks.",
            where="a matmul with a weight whose result is used token-wise",
            fix="loss_chunks=1",
        )
    if isinstance(candidates, Mismatch):
        raise VariantError(
            f"the logits cannot be computed in chunks: {candidates.why}.",
            where=candidates.op.where,
            fix="a loss that reads them token by token, or loss_chunks=1",
        )
    for region in candidates:
        num_tokens = region.most_chunks(graph)
        if num_tokens % count:
            near = max(number for number in range(1, count) if num_tokens % number == 0)
            raise VariantError(
                f"{count} chunks do not divide the {num_tokens} tokens of a row.", fix=f"loss_chunks={near}"
            )
    return candidates


def _evaluate(graph: Graph, logit_regions: Sequence[Region], args: Sequence[Any], count: int) -> list[Any]:
    values = dict(zip(graph.body.inputs, args, strict=True))
    members = {op for region in logit_regions for op in region.ops}
    outs = [value for region in logit_regions for value in region.outs]
    after = dependents(graph, outs)
    others = [op for op in graph.body.ops if op not in members]
    late = [op for op in others if not after.isdisjoint(op.inputs)]
    run(graph, [op for op in others if after.isdisjoint(op.inputs)], values)
    loss, *_ = graph.body.outputs
    if loss not in after or graph.shape(loss) or not is_linear(late, after, loss):
        for region in logit_regions:
            values |= _recomputed(graph, region, values, count)
        run(graph, late, values)
        return read(graph, values, graph.body.outputs)
    floats = [value for value in outs if jnp.issubdtype(graph.avals[value].dtype, jnp.floating)]
    weights = _weights(graph, values, floats, loss)
    slope = jnp.zeros((), graph.avals[loss].dtype)
    for region in logit_regions:
        results, term = _with_slope(graph, region, values, weights, slope, count)
        values, slope = values | results, slope + term
    run(graph, late, values)
    values[loss] = _sloped(values[loss], slope)
    return read(graph, values, graph.body.outputs)


def _weights(graph: Graph, values: Values, floats: Sequence[int], loss: int) -> Values:
    """Returns the weight of each per-token value in the loss, under `stop_gradient`."""
    needed = graph.slice([loss], values.keys() | {*floats})

    def of_tokens(token_values: list[Any]) -> Any:
        substituted = dict(values) | dict(zip(floats, token_values, strict=True))
        run(graph, needed, substituted)
        return substituted[loss]

    zeros = [jnp.zeros(graph.shape(value), graph.avals[value].dtype) for value in floats]
    gradients = jax.lax.stop_gradient(jax.grad(of_tokens)(zeros))
    return dict(zip(floats, gradients, strict=True))


@jax.custom_vjp
def _sloped(value: Any, slope: Any) -> Any:
    """Returns `value`; in the backward pass, its cotangent also flows to `slope`."""
    return value


_sloped.defvjp(lambda value, slope: (value, None), lambda _, of_value: (of_value, of_value))


def _evaluate_chunk(graph: Graph, region: Region, count: int, fixed: Values, scanned: Values) -> list[Any]:
    """Returns the outputs of a region for one chunk."""

    def override(op: Op, ins: Sequence[Any]) -> Sequence[Any]:
        dim = region.dims[op.outputs[0]]
        operand_dims = across(graph, op, dim)
        assert operand_dims is not None
        return ins[:1] if op.name in IGNORED else op.bind(ins, narrowed(op, dim, operand_dims, count))

    values = fixed | scanned
    run(graph, region.ops, values, override)
    return read(graph, values, region.outs)


def _recomputed(graph: Graph, region: Region, values: Values, count: int) -> Values:
    """Returns the outputs of a region, scanned over chunks and recomputed in the backward pass."""
    fixed, scanned = _inputs_in_chunks(graph, region, values, count)

    def body(_: None, part: Values) -> tuple[None, list[Any]]:
        return None, jax.checkpoint(partial(_evaluate_chunk, graph, region, count), prevent_cse=False)(fixed, part)

    return _merged_outs(region, _loop(body, None, scanned)[1])


def _with_slope(
    graph: Graph, region: Region, values: Values, weights: Values, slope: Any, count: int
) -> tuple[Values, Any]:
    """Returns the outputs of a region, scanned over chunks, and a zero with the gradient of their weighted sum."""
    inputs = _inputs_in_chunks(graph, region, values, count)
    weighed = {
        value: stack_chunks(weights[value], region.dims[value], count) for value in region.outs if value in weights
    }
    smooth, nondiff = zip(*map(_by_smoothness, inputs), strict=True)
    evaluate_chunk = partial(_evaluate_chunk, graph, region, count)

    def primal(smooth: Any, nondiff: Any, weighed: Values) -> tuple[list[Any], Any]:
        fixed = smooth[0] | nondiff[0]
        body = lambda _, part: (None, evaluate_chunk(fixed, part))  # noqa: E731
        return _loop(body, None, smooth[1] | nondiff[1])[1], jnp.zeros_like(slope)

    def forward(smooth: Any, nondiff: Any, weighed: Values) -> tuple[Any, Any]:
        def body(total: Values, part: tuple[Values, Values, Values]) -> tuple[Values, Any]:
            def differentiable(fixed: Values, scanned: Values) -> tuple[list[Any], list[Any]]:
                outs = evaluate_chunk(fixed | nondiff[0], scanned | part[1])
                pairs = list(zip(region.outs, outs, strict=True))
                return [out for value, out in pairs if value in weighed], outs

            _, pullback, outs = jax.vjp(differentiable, smooth[0], part[0], has_aux=True)
            of_fixed, of_scanned = pullback([part[2][value] for value in region.outs if value in weighed])
            return jax.tree.map(lambda sum_, term: sum_ + term.astype(sum_.dtype), total, of_fixed), (outs, of_scanned)

        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), smooth[0])
        total, (outs, of_scanned) = _loop(body, zeros, (smooth[1], nondiff[1], weighed))
        like = jax.tree.map(lambda sum_, of: sum_.astype(of.dtype), total, smooth[0])
        outs, residuals = jax.tree.map(lambda x: checkpoint_name(x, LOSS_CHUNKS), (outs, (like, of_scanned)))
        return (outs, jnp.zeros_like(slope)), residuals

    def backward(residuals: Any, of_outs: tuple[Any, Any]) -> tuple[Any, None, None]:
        return jax.tree.map(lambda grad: grad * of_outs[1].astype(grad.dtype), residuals), None, None

    call = jax.custom_vjp(primal)
    call.defvjp(forward, backward)
    outs, zero = call(smooth, nondiff, weighed)
    return _merged_outs(region, jax.lax.stop_gradient(outs)), zero


def _loop(body: Callable[..., Any], first: Any, parts: Any) -> Any:
    with jax.named_scope(LOSS_CHUNKS):
        return jax.lax.scan(body, first, parts)


def _inputs_in_chunks(graph: Graph, region: Region, values: Values, count: int) -> tuple[Values, Values]:
    # A copy is free and can be all-gathered once: the weight itself would be gathered in every iteration.
    fixed = {value: jnp.copy(values[value]) for value in region.fixed}
    scanned = zip(region.scanned, read(graph, values, region.scanned), strict=True)
    return fixed, {value: stack_chunks(array, region.dims[value], count) for value, array in scanned}


def _by_smoothness(values: Values) -> tuple[Values, Values]:
    """Partitions values into floating-point ones, which have gradients, and the rest."""
    floating = {value: array for value, array in values.items() if jnp.issubdtype(jnp.result_type(array), jnp.floating)}
    return floating, {value: array for value, array in values.items() if value not in floating}


def _merged_outs(region: Region, outs: Sequence[Any]) -> Values:
    """Inverts `stack_chunks` for the outputs of a region."""
    values: Values = {}
    for value, parts in zip(region.outs, outs, strict=True):
        dim = region.dims[value]
        count, *shape = parts.shape
        merged = (*shape[:dim], count * shape[dim], *shape[dim + 1 :])
        values[value] = jnp.moveaxis(parts, 0, dim + 1).reshape(merged)
    return values


def stack_chunks(array: Any, dim: int, count: int) -> Any:
    """Stacks chunks along a new first dim; chunks are strided by `count`, so that rows stay on their device."""
    shape = jnp.shape(array)
    parts = jnp.reshape(array, (*shape[:dim], shape[dim] // count, count, *shape[dim + 1 :]))
    return jnp.moveaxis(parts, dim + 1, 0)
