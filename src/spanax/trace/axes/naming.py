"""Names classes of dims by how they are used.

Equal uses get equal names: the `mlp` dims of twelve unrolled blocks are twelve classes with one name. If several
names apply, the one with the strongest evidence wins.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np

from spanax.batch_dims import ExampleDims
from spanax.trace.axes.discover import Dims
from spanax.trace.jaxpr.dim_maps.relations import Family
from spanax.trace.jaxpr.dim_maps.table import names
from spanax.trace.jaxpr.dim_maps.windows import POOLS
from spanax.trace.jaxpr.graph import Op
from spanax.trace.jaxpr.provenance import Origin
from spanax.trace.variables import Leaf

STRENGTH = {
    "batch": 100,
    "layers": 95,
    "vocab": 90,
    "experts": 85,
    "heads": 80,
    "slots": 78,
    "choices": 77,
    "seq": 75,
    "embed": 70,
    "head_dim": 65,
    "channels": 60,
    "window": 60,
    "frames": 50,
    "height": 50,
    "width": 50,
    "classes": 45,
    "positions": 40,
    "mlp": 30,
    "features": 20,
    "hidden": 15,
    "steps": 10,
    "nodes": 5,
}
"""The strength of a claim if several names apply to a class: the least ambiguous evidence is first."""

IMAGE = ("height", "width")

VIDEO = ("frames", "height", "width")

INNER = frozenset({"heads", "mlp", "vocab", "hidden", "channels", "features", "classes"})
"""The names of dims of which each device may have its shard of every piece."""

CHOSEN = STRENGTH["experts"] - 1
"""The strength of `vocab` where the model chooses the rows of a table: codes, or experts."""

ANNOTATED = 99
"""The strength of an annotation by the author; only evidence from the batch is stronger."""

MESH_AXES = frozenset({"pipe", "data", "fsdp", "expert", "context", "model", "groups"})
"""Annotations that name a mesh axis: they determine how a dim is sharded, not what it is."""

SCATTERS = names(Family.SCATTER) | names(Family.SCATTER_ADD)
"""Operations that write elements at indices."""

Claims = dict[int, Counter[str]]

InParams = dict[int, set[frozenset[int]]]
"""For every class of a parameter, all classes of each such parameter."""


def name_classes(
    dims: Dims, origins: Sequence[int], leaves: Sequence[Leaf], batch: Sequence[Leaf], examples: ExampleDims
) -> tuple[dict[int, str], dict[int, str]]:
    """Returns the name of every known class, and the use of each class whose name is not a use itself.

    Authors choose names freely, or name axes of their own mesh (`tensor`). Layouts match uses: `heads`, `mlp`.

    Args:
      dims: the classes, after all joins.
      origins: the origins of every value.
      leaves: the state's arrays; they are the graph's first inputs.
      batch: the batch's arrays; the inputs after them.
      examples: the dim with the examples of each of them.
    """
    inputs = dims.graph.body.inputs
    claims: Claims = defaultdict(Counter)
    _claim_batch(dims, claims, inputs[len(leaves) :], batch, examples)
    in_params: InParams = defaultdict(set)
    main = _main_parts(dims)
    for leaf, value in zip(leaves, inputs, strict=False):
        param_classes = frozenset(main.get(label, label) for label in dims.classes(value) if label is not None)
        for param_class in param_classes if leaf.kind == "param" else ():
            in_params[param_class].add(param_classes)
    for op in dims.graph.ops():
        if op.name in _EVIDENCE:
            _EVIDENCE[op.name](op, dims, origins, claims, in_params)
    _claim_selected(dims, claims, in_params)
    _claim_slots(dims, origins, claims)
    _claim_attention(dims, origins, claims)
    _claim_by_kernels(dims, claims, leaves, in_params, main)
    uses = _strongest(claims)
    for whole, part in main.items():
        claims[whole] |= claims[part] if uses.get(part) in INNER else Counter({"features": STRENGTH["features"]})
    uses = _strongest(claims)
    for leaf, value in zip(leaves, inputs, strict=False):
        for label, annotation in zip(dims.classes(value), leaf.annotation or (), strict=False):
            if label is not None and isinstance(annotation, str) and annotation not in MESH_AXES:
                claims[label][annotation] = ANNOTATED
    names = _strongest(claims)
    return names, {label: use for label, use in uses.items() if names[label] not in STRENGTH}


def _strongest(claims: Claims) -> dict[int, str]:
    return {label: max(sorted(strengths), key=strengths.__getitem__) for label, strengths in claims.items()}


def _claim(claims: Claims, label: int | None, name: str) -> None:
    if label is not None:
        claims[label][name] = STRENGTH[name]


def _is_named(claims: Claims, label: int | None, name: str) -> bool:
    return label is not None and name in claims.get(label, ())


def _claim_batch(
    dims: Dims, claims: Claims, values: Sequence[int], batch: Sequence[Leaf], examples: ExampleDims
) -> None:
    for leaf, value, dim in zip(batch, values, examples, strict=True):
        labels = dims.classes(value)
        if dim is not None:
            _claim(claims, labels[dim], "batch")
        labels = labels[(dim or 0) + 1 :]
        is_index = jax.dtypes.issubdtype(leaf.dtype, np.integer)
        inner = {
            1: ("seq",) if is_index else ("features",),
            2: ("seq", "features"),
            3: (*IMAGE, "channels"),
            4: (*VIDEO, "channels"),
        }
        for label, name in zip(labels, inner.get(len(labels), ()), strict=False):
            _claim(claims, label, name)


def _gather(op: Op, dims: Dims, origins: Sequence[int], claims: Claims, in_params: InParams) -> None:
    numbers = op.params["dimension_numbers"]
    operand, indices = op.inputs[:2]
    labels = dims.classes(operand)
    lookup_labels = [labels[dim] for dim in numbers.start_index_map]
    from_batch = origins[indices] & Origin.BATCH
    if origins[operand] & Origin.BATCH:
        # Labels select logits: one element per row, with indices from the batch alone.
        picks = origins[indices] == Origin.BATCH and math.prod(op.params["slice_sizes"]) == 1
        for label in lookup_labels if picks else ():
            _claim(claims, label, "vocab" if len(labels) > 2 else "classes")
        if origins[indices] == Origin.BATCH and not picks:
            # The batch says which rows of the activations an edge connects.
            for label in lookup_labels:
                _claim(claims, label, "nodes")
        return
    if origins[operand] & Origin.PARAM:
        is_chosen = from_batch and origins[indices] != Origin.BATCH
        for label in lookup_labels:
            if is_chosen and label is not None:
                claims[label]["vocab"] = max(claims[label]["vocab"], CHOSEN)
            else:
                _claim(claims, label, "vocab" if from_batch else "positions")
        for dim, label in enumerate(labels):
            if dim not in numbers.start_index_map and from_batch:
                _claim(claims, label, "embed")


def _dot_general(op: Op, dims: Dims, origins: Sequence[int], claims: Claims, in_params: InParams) -> None:
    (_, _), (batched, _) = op.params["dimension_numbers"]
    lhs, rhs = op.inputs[:2]
    labels = dims.classes(lhs)
    if _is_attention(op, dims, origins, claims):
        for dim in batched:
            if labels[dim] in in_params and not _is_named(claims, labels[dim], "batch"):
                _claim(claims, labels[dim], "heads")
    elif batched and (origins[lhs] ^ origins[rhs]) & Origin.BATCH:
        # Activations times a separate weight per index: stacked weights, not values computed with a weight.
        weight = set(dims.classes(rhs if origins[lhs] & Origin.BATCH else lhs)) - {None}
        for label in (labels[dim] for dim in batched):
            if label is not None and any(weight <= param for param in in_params.get(label, ())):
                _claim(claims, label, "experts")


def _ragged_dot(op: Op, dims: Dims, origins: Sequence[int], claims: Claims, in_params: InParams) -> None:
    """Claims the groups of a ragged product as experts, each with a separate matrix."""
    weight = op.inputs[1]
    labels = dims.classes(weight)
    for dim in op.params["ragged_dot_dimension_numbers"].rhs_group_dimensions if origins[weight] & Origin.PARAM else ():
        _claim(claims, labels[dim], "experts")


def _claim_selected(dims: Dims, claims: Claims, in_params: InParams) -> None:
    """Claims dims of weights that the choices of a router select, by comparison with an index, a scatter or a lookup.

    Weights of a token for all experts, such as the sum of its one-hot choices, are no function of the router's scores.
    """
    num_experts: dict[int, int] = {}
    for op in dims.graph.ops():
        if op.name == "top_k" and _is_named(claims, dims.classes(op.inputs[0])[-1], "experts"):
            num_experts[op.outputs[1]] = dims.shape(op.inputs[0])[-1]
        sizes = {num_experts[value] for value in op.inputs if value in num_experts}
        if not sizes:
            continue
        selected = op.outputs if op.name == "eq" or op.name in SCATTERS else ()
        for value in op.inputs[:1] if op.name == "gather" else selected:
            for label, size in zip(dims.classes(value), dims.shape(value), strict=True):
                if size in sizes and label in in_params:
                    _claim(claims, label, "experts")
        if not op.bodies and all(
            jax.dtypes.issubdtype(dims.graph.avals[value].dtype, np.integer) for value in op.outputs
        ):
            num_experts |= dict.fromkeys(op.outputs, max(sizes))


def _claim_slots(dims: Dims, origins: Sequence[int], claims: Claims) -> None:
    """Claims the rows of an expert's operand: a slot for a token, in values of experts alone.

    A sequence that every expert computes also has values without experts.
    """
    experts = {label for label in claims if _is_named(claims, label, "experts")}
    candidates = set[int | None]()
    for op in dims.graph.ops() if experts else ():
        if op.name == "dot_general" and (origins[op.inputs[0]] ^ origins[op.inputs[1]]) & Origin.BATCH:
            (_, _), (batched, _) = op.params["dimension_numbers"]
            activation = 0 if origins[op.inputs[0]] & Origin.BATCH else 1
            if not experts.isdisjoint(dims.classes(op.inputs[0])[dim] for dim in batched):
                candidates.update(list(_free(op, dims))[activation])
    values = [dims.classes(value) for value, origin in enumerate(origins) if origin & Origin.BATCH and candidates]
    elsewhere = {label for labels in values if experts.isdisjoint(labels) for label in labels}
    for label in candidates - elsewhere:
        _claim(claims, label, "slots")


def _is_attention(op: Op, dims: Dims, origins: Sequence[int], claims: Claims) -> bool:
    """Returns whether an operation multiplies activations with activations, per example."""
    (_, _), (batched, _) = op.params["dimension_numbers"]
    lhs, rhs = op.inputs[:2]
    labels = dims.classes(lhs)
    by_example = any(_is_named(claims, labels[dim], "batch") for dim in batched)
    return bool(origins[lhs] & origins[rhs] & Origin.BATCH) and by_example


def _claim_attention(dims: Dims, origins: Sequence[int], claims: Claims) -> None:
    """Claims the dims that attention contracts: a head's width if a weight produces it, else positions."""
    dots = [op for op in dims.graph.ops() if op.name == "dot_general"]
    weight_labels: set[int | None] = {None}
    for op in dots:
        for weight, activation in (op.inputs[:2], op.inputs[1::-1]):
            if origins[activation] & Origin.BATCH and not origins[weight] & Origin.BATCH:
                weight_labels |= set(dims.classes(weight))
    contracted = []
    for op in dots:
        if _is_attention(op, dims, origins, claims):
            (contract, _), _ = op.params["dimension_numbers"]
            labels = [dims.classes(op.inputs[0])[dim] for dim in contract]
            of_pairs = all(set(free) - weight_labels for free in _free(op, dims))
            contracted.append(([label for label in labels if not _is_named(claims, label, "batch")], of_pairs))
    for labels, of_pairs in sorted(contracted, key=lambda entry: len(entry[0])):
        if len(labels) > 1 and any(_is_named(claims, label, "seq") for label in labels):
            continue  # the gradient of grouped keys also sums over the queries of a group
        for label in labels:
            # Scores have pairs of positions, unlike reads of a recurrent state or weights per example.
            if label not in weight_labels or of_pairs:
                _claim(claims, label, "head_dim" if label in weight_labels else "seq")


def _free(op: Op, dims: Dims) -> Iterator[list[int | None]]:
    """Yields, per operand, the classes of its free dims, which are neither contracted nor batched."""
    for labels, free in zip(map(dims.classes, op.inputs), op.dim_map.free_dims, strict=True):
        yield [labels[dim] for dim in free]


def _top_k(op: Op, dims: Dims, origins: Sequence[int], claims: Claims, in_params: InParams) -> None:
    label, choice = (dims.classes(value)[-1] for value in (op.inputs[0], op.outputs[0]))
    if origins[op.inputs[0]] & Origin.BATCH and not _is_named(claims, label, "seq"):  # else: selected tokens
        _claim(claims, label, "experts")
        if choice != label:
            _claim(claims, choice, "choices")


def _convolution(op: Op, dims: Dims, origins: Sequence[int], claims: Claims, in_params: InParams) -> None:
    numbers = op.params["dimension_numbers"]
    lhs, rhs = op.inputs
    if not origins[lhs] & Origin.BATCH or origins[rhs] & Origin.BATCH:
        return  # in the gradient of a kernel, dims have other roles
    _claim(claims, dims.classes(lhs)[numbers.lhs_spec[1]], "channels")
    _claim(claims, dims.classes(rhs)[numbers.rhs_spec[0]], "channels")
    for dim in numbers.rhs_spec[2:]:
        _claim(claims, dims.classes(rhs)[dim], "window")
    names = {2: IMAGE, 3: VIDEO}.get(len(numbers.lhs_spec) - 2, ())
    for value, spec in ((lhs, numbers.lhs_spec), (op.outputs[0], numbers.out_spec)):
        for dim, name in zip(spec[2:], names, strict=False):
            _claim_place(claims, dims.classes(value)[dim], name, in_params)


def _pool(op: Op, dims: Dims, origins: Sequence[int], claims: Claims, in_params: InParams) -> None:
    """Claims the dims of a pool's result as those of its operand."""
    for before, after in zip(*(dims.classes(value) for value in (op.inputs[-1], op.outputs[0])), strict=True):
        for name in VIDEO:
            if _is_named(claims, before, name):
                _claim_place(claims, after, name, in_params)


def _claim_place(claims: Claims, label: int | None, name: str, in_params: InParams) -> None:
    """Claims a dim of images that has no name, and that no weight has: weights mix its rows."""
    if label is not None and label not in in_params and not claims.get(label):
        _claim(claims, label, name)


def _scan(op: Op, dims: Dims, origins: Sequence[int], claims: Claims, in_params: InParams) -> None:
    for outer, inner in dims.graph.wires(op).inputs:
        if len(dims.shape(outer)) > len(dims.shape(inner)):
            is_weight = origins[outer] & Origin.PARAM and not origins[outer] & Origin.BATCH
            _claim(claims, dims.classes(outer)[0], "layers" if is_weight else "steps")


def _attention(op: Op, dims: Dims, origins: Sequence[int], claims: Claims, in_params: InParams) -> None:
    """Claims the dims of the two products of a fused attention operation."""
    form = op.params["form"]
    q, k, v = op.inputs[:3]
    labels = dims.classes(q)
    key_labels = dims.classes(k)
    for label in labels[: form.queries]:
        if label in in_params and not _is_named(claims, label, "batch"):
            _claim(claims, label, "heads")
    _claim(claims, labels[form.queries], "seq")
    _claim(claims, key_labels[form.num_batch], "seq")
    for width in (key_labels[-1], dims.classes(v)[-1]):
        if width in in_params:
            _claim(claims, width, "head_dim")


_EVIDENCE = {
    "spanax_attention": _attention,
    "gather": _gather,
    "dot_general": _dot_general,
    "ragged_dot_general": _ragged_dot,
    "top_k": _top_k,
    "conv_general_dilated": _convolution,
    **dict.fromkeys(POOLS, _pool),
    "scan": _scan,
}


def _main_parts(dims: Dims) -> dict[int, int]:
    """Returns the class of the largest piece of each class that is a concatenation, which names it too."""
    wholes = dims.wholes()
    main = {label: whole.main for label, whole in wholes.items() if not whole.is_mixed}
    for label in main:
        while main[label] in main:
            main[label] = main[main[label]]
    return main


def _claim_by_kernels(
    dims: Dims, claims: Claims, leaves: Sequence[Leaf], in_params: InParams, main: Mapping[int, int]
) -> None:
    """Claims the residual stream, the only class that inner classes share kernels with, and the inner classes."""
    partners: dict[int, set[int]] = defaultdict(set)
    kernels: Counter[int] = Counter()
    for leaf, value in zip(leaves, dims.graph.body.inputs, strict=False):
        stacked = {"layers", "experts", "window"}
        labels = [main.get(c, c) for c in dims.classes(value) if c is not None]
        labels = [c for c in labels if not stacked & set(claims.get(c, ()))]
        if leaf.kind == "param" and len(labels) >= 2:
            for label in set(labels):
                kernels[label] += 1
                partners[label] |= set(labels) - {label}
    inner = {label for label in kernels if kernels[label] > 1 and set(claims.get(label, ())) <= {"heads", "head_dim"}}
    spokes = {hub: [s for s in partners[hub] if partners[s] == {hub} and s in inner] for hub in partners}
    embeds = {hub for hub, neighbors in spokes.items() if neighbors and kernels[hub] > 2}
    for label in kernels:
        if label in embeds:
            claims[label]["embed"] = STRENGTH["embed"]
        elif any(label in spokes[hub] for hub in embeds):
            _claim(claims, label, "mlp")
        else:
            _claim(claims, label, "hidden" if kernels[label] > 1 else "features")
    for label in in_params:
        claims.setdefault(label, Counter({"features": 0}))
