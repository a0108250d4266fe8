"""Names classes of dims by how they are used.

Equal uses get equal names: the `mlp` dims of twelve unrolled blocks are twelve classes with one name. Where several
names apply, the one with the strongest evidence wins.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

import jax
import numpy as np

from spanax.trace.axes.discover import Dims
from spanax.trace.jaxpr.graph import Op
from spanax.trace.jaxpr.provenance import Origin
from spanax.trace.variables import Leaf

STRENGTH = {
    "batch": 100,
    "layers": 95,
    "vocab": 90,
    "experts": 85,
    "heads": 80,
    "seq": 75,
    "embed": 70,
    "head_dim": 65,
    "channels": 60,
    "window": 60,
    "height": 50,
    "width": 50,
    "classes": 45,
    "positions": 40,
    "mlp": 30,
    "features": 20,
    "hidden": 15,
    "steps": 10,
}
"""How much a claim counts against another one for the same class: what leaves least doubt comes first."""

ANNOTATED = 99
"""The author's own name for a dim; only what the batch itself says is stronger."""

MESH_AXES = frozenset({"pipe", "data", "fsdp", "expert", "context", "model"})
"""What an author writes to say where a dim goes; that is no name for what it is."""

Claims = dict[int, Counter[str]]

InParams = dict[int, set[frozenset[int]]]
"""For every class that a parameter has, all classes of each such parameter."""


def name_classes(
    dims: Dims, found: Sequence[int], leaves: Sequence[Leaf], batch: Sequence[Leaf]
) -> tuple[dict[int, str], dict[int, str]]:
    """Returns the name of every known class, and the use of each class whose name is not one of a use.

    Authors choose names freely, or name axes of their own mesh (`tensor`). Layouts match uses: `heads`, `mlp`.

    Args:
      dims: the classes, all joins done.
      found: the origins of every value.
      leaves: the state's arrays; they are the graph's first inputs.
      batch: the batch's arrays; the inputs after them.
    """
    inputs = dims.graph.body.inputs
    claims: Claims = defaultdict(Counter)
    _claim_batch(dims, claims, inputs[len(leaves) :], batch)
    in_params: InParams = defaultdict(set)
    for leaf, value in zip(leaves, inputs, strict=False):
        known = frozenset(label for label in dims.classes(value) if label is not None)
        for one in known if leaf.kind == "param" else ():
            in_params[one].add(known)
    for op in dims.graph.ops():
        if op.name in _EVIDENCE:
            _EVIDENCE[op.name](op, dims, found, claims, in_params)
    _claim_attention(dims, found, claims)
    _claim_by_kernels(dims, claims, leaves)
    uses = _strongest(claims)
    for leaf, value in zip(leaves, inputs, strict=False):
        for label, author in zip(dims.classes(value), leaf.annotation or (), strict=False):
            if label is not None and isinstance(author, str) and author not in MESH_AXES:
                claims[label][author] = ANNOTATED
    names = _strongest(claims)
    return names, {label: use for label, use in uses.items() if names[label] not in STRENGTH}


def _strongest(claims: Claims) -> dict[int, str]:
    return {label: max(sorted(named), key=named.__getitem__) for label, named in claims.items()}


def _claim(claims: Claims, label: int | None, name: str) -> None:
    if label is not None:
        claims[label][name] = STRENGTH[name]


def _is_named(claims: Claims, label: int | None, name: str) -> bool:
    return label is not None and name in claims.get(label, ())


def with_examples(values: Sequence[int], batch: Sequence[Leaf]) -> list[int]:
    """Of a batch's arrays those that have examples along dim 0: as many as most of them."""
    sizes = Counter(leaf.shape[0] for leaf in batch if leaf.shape)
    examples = max(sizes, key=lambda size: (sizes[size], size), default=None)
    return [value for leaf, value in zip(batch, values, strict=True) if leaf.shape and leaf.shape[0] == examples]


def _claim_batch(dims: Dims, claims: Claims, values: Sequence[int], batch: Sequence[Leaf]) -> None:
    examples = with_examples(values, batch)
    for leaf, value in zip(batch, values, strict=True):
        labels = dims.classes(value)
        if value in examples:
            _claim(claims, labels[0], "batch")
        is_index = jax.dtypes.issubdtype(leaf.dtype, np.integer)
        inner = {2: ("seq",) if is_index else ("features",), 3: ("seq", "features"), 4: ("height", "width", "channels")}
        for label, name in zip(labels[1:], inner.get(len(labels), ()), strict=False):
            _claim(claims, label, name)


def _gather(op: Op, dims: Dims, found: Sequence[int], claims: Claims, in_params: InParams) -> None:
    numbers, (operand, indices) = op.params["dimension_numbers"], op.inputs[:2]
    labels = dims.classes(operand)
    looked_up = [labels[dim] for dim in numbers.start_index_map]
    from_batch = found[indices] & Origin.BATCH
    if found[operand] & Origin.BATCH:
        # Labels picked from logits: one value a row, which the data alone names.
        picks = found[indices] == Origin.BATCH and math.prod(op.params["slice_sizes"]) == 1
        for label in looked_up if picks else ():
            _claim(claims, label, "vocab" if len(labels) > 2 else "classes")
        return
    if found[operand] & Origin.PARAM:
        for label in looked_up:
            _claim(claims, label, "vocab" if from_batch else "positions")
        for dim, label in enumerate(labels):
            if dim not in numbers.start_index_map and from_batch:
                _claim(claims, label, "embed")


def _dot_general(op: Op, dims: Dims, found: Sequence[int], claims: Claims, in_params: InParams) -> None:
    (_, _), (batched, _) = op.params["dimension_numbers"]
    lhs, rhs = op.inputs[:2]
    labels = dims.classes(lhs)
    if _is_attention(op, dims, found, claims):
        for dim in batched:
            if labels[dim] in in_params and not _is_named(claims, labels[dim], "batch"):
                _claim(claims, labels[dim], "heads")
    elif batched and (found[lhs] ^ found[rhs]) & Origin.BATCH:
        # Activations with a weight of their own for each index: stacked weights, and not what was made with a weight.
        weight = set(dims.classes(rhs if found[lhs] & Origin.BATCH else lhs)) - {None}
        for label in (labels[dim] for dim in batched):
            if label is not None and any(weight <= param for param in in_params.get(label, ())):
                _claim(claims, label, "experts")


def _ragged_dot(op: Op, dims: Dims, found: Sequence[int], claims: Claims, in_params: InParams) -> None:
    """The groups of a ragged product are experts, each with a matrix of its own."""
    weight = op.inputs[1]
    labels = dims.classes(weight)
    for dim in op.params["ragged_dot_dimension_numbers"].rhs_group_dimensions if found[weight] & Origin.PARAM else ():
        _claim(claims, labels[dim], "experts")


def _is_attention(op: Op, dims: Dims, found: Sequence[int], claims: Claims) -> bool:
    """Activations times activations, example by example."""
    (_, _), (batched, _) = op.params["dimension_numbers"]
    lhs, rhs = op.inputs[:2]
    labels = dims.classes(lhs)
    by_example = any(_is_named(claims, labels[dim], "batch") for dim in batched)
    return bool(found[lhs] & found[rhs] & Origin.BATCH) and by_example


def _claim_attention(dims: Dims, found: Sequence[int], claims: Claims) -> None:
    """What attention contracts is a head's width if a weight makes it, and positions if not."""
    dots = [op for op in dims.graph.ops() if op.name == "dot_general"]
    made: set[int | None] = {None}
    for op in dots:
        for weight, other in (op.inputs[:2], op.inputs[1::-1]):
            if found[other] & Origin.BATCH and not found[weight] & Origin.BATCH:
                made |= set(dims.classes(weight))
    contracted = []
    for op in dots:
        if _is_attention(op, dims, found, claims):
            (contract, _), _ = op.params["dimension_numbers"]
            labels = [dims.classes(op.inputs[0])[dim] for dim in contract]
            of_pairs = all(set(free) - made for free in _free(op, dims))
            contracted.append(([label for label in labels if not _is_named(claims, label, "batch")], of_pairs))
    for labels, of_pairs in sorted(contracted, key=lambda one: len(one[0])):
        if len(labels) > 1 and any(_is_named(claims, label, "seq") for label in labels):
            continue  # the gradient of grouped keys: beside positions it sums over the queries of a group
        for label in labels:
            # Scores are of pairs of positions; a state that is read out, or weights of each example, are no scores.
            if label not in made or of_pairs:
                _claim(claims, label, "head_dim" if label in made else "seq")


def _free(op: Op, dims: Dims) -> Iterator[list[int | None]]:
    """The classes of either operand that the result keeps and the other operand has not."""
    contracted, batched = op.params["dimension_numbers"]
    for value, *used in zip(op.inputs, contracted, batched, strict=False):
        taken = {dim for group in used for dim in group}
        yield [label for dim, label in enumerate(dims.classes(value)) if dim not in taken]


def _top_k(op: Op, dims: Dims, found: Sequence[int], claims: Claims, in_params: InParams) -> None:
    label = dims.classes(op.inputs[0])[-1]
    if found[op.inputs[0]] & Origin.BATCH and not _is_named(claims, label, "seq"):  # some of the tokens are no experts
        _claim(claims, label, "experts")


def _convolution(op: Op, dims: Dims, found: Sequence[int], claims: Claims, in_params: InParams) -> None:
    numbers, (lhs, rhs) = op.params["dimension_numbers"], op.inputs
    if not found[lhs] & Origin.BATCH or found[rhs] & Origin.BATCH:
        return  # the gradient of a kernel has its dims in other roles
    _claim(claims, dims.classes(lhs)[numbers.lhs_spec[1]], "channels")
    _claim(claims, dims.classes(rhs)[numbers.rhs_spec[0]], "channels")
    for dim in numbers.rhs_spec[2:]:
        _claim(claims, dims.classes(rhs)[dim], "window")


def _scan(op: Op, dims: Dims, found: Sequence[int], claims: Claims, in_params: InParams) -> None:
    for outer, inner in dims.graph.wires(op).inputs:
        if len(dims.shape(outer)) > len(dims.shape(inner)):
            is_weight = found[outer] & Origin.PARAM and not found[outer] & Origin.BATCH
            _claim(claims, dims.classes(outer)[0], "layers" if is_weight else "steps")


def _attention(op: Op, dims: Dims, found: Sequence[int], claims: Claims, in_params: InParams) -> None:
    """The two products of an attention that is one operation."""
    form, (q, k, v) = op.params["form"], op.inputs[:3]
    labels, of_keys = dims.classes(q), dims.classes(k)
    for label in labels[: form.queries]:
        if label in in_params and not _is_named(claims, label, "batch"):
            _claim(claims, label, "heads")
    _claim(claims, labels[form.queries], "seq")
    _claim(claims, of_keys[form.num_batch], "seq")
    for width in (of_keys[-1], dims.classes(v)[-1]):
        if width in in_params:
            _claim(claims, width, "head_dim")


_EVIDENCE = {
    "spanax_attention": _attention,
    "gather": _gather,
    "dot_general": _dot_general,
    "ragged_dot_general": _ragged_dot,
    "top_k": _top_k,
    "conv_general_dilated": _convolution,
    "scan": _scan,
}


def _claim_by_kernels(dims: Dims, claims: Claims, leaves: Sequence[Leaf]) -> None:
    """The residual stream is the class that inner classes meet on both sides, and those are its mlp (or heads)."""
    partners: dict[int, set[int]] = defaultdict(set)
    kernels: Counter[int] = Counter()
    for leaf, value in zip(leaves, dims.graph.body.inputs, strict=False):
        stacked = {"layers", "experts", "window"}
        labels = [c for c in dims.classes(value) if c is not None and not stacked & set(claims.get(c, ()))]
        if leaf.kind == "param" and len(labels) >= 2:
            for label in set(labels):
                kernels[label] += 1
                partners[label] |= set(labels) - {label}
    inner = {label for label in kernels if kernels[label] > 1 and set(claims.get(label, ())) <= {"heads", "head_dim"}}
    spokes = {hub: [s for s in partners[hub] if partners[s] == {hub} and s in inner] for hub in partners}
    embeds = {hub for hub, around in spokes.items() if around and kernels[hub] > 2}
    for label in kernels:
        if label in embeds:
            claims[label]["embed"] = STRENGTH["embed"]
        elif any(label in spokes[hub] for hub in embeds):
            _claim(claims, label, "mlp")
        else:
            _claim(claims, label, "hidden" if kernels[label] > 1 else "features")
    for label in _labels(dims, leaves):
        claims.setdefault(label, Counter({"features": 0}))


def _labels(dims: Dims, leaves: Sequence[Leaf]) -> Iterable[int]:
    for leaf, value in zip(leaves, dims.graph.body.inputs, strict=False):
        if leaf.kind == "param":
            yield from (label for label in dims.classes(value) if label is not None)
