"""Assigns classes of dims to mesh axes in one program; records why other classes stay replicated."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from spanax.errors import DeviceCountError, IdleAxisError, IndivisibleError, UnknownNameError, nearest
from spanax.hardware.mesh import MeshShape
from spanax.plan.layout import LAST_RESORT_AXES, PIPE, SPATIAL_AXES, Layout
from spanax.plan.presets import MEANING, context_word, in_words, layout_for
from spanax.plan.reason import Code, Reason
from spanax.plan.sharding.layer_partition import Parts
from spanax.trace.analysis.labels import moves_less
from spanax.trace.program import Program

Pins = Mapping[str, str | Sequence[str] | None]
"""The mesh axes that shard single axes; None replicates an axis."""

SMALL = 16
"""A value of the batch that does not divide is gathered if the largest value has `SMALL` times its elements or more."""

SENT_TO = -1
"""The rank of experts that receive their tokens; values that only select experts are sharded along the batch.

Ranks below it are those of hidden classes, the largest first.
"""

SEQUENCES = 1_000
"""The rank of sequences that a mesh axis shards where a value has no other class of that axis."""


@dataclass(frozen=True, eq=False)
class Assignment:
    """For each mesh axis, the classes it shards and their rank (lowest first where a value has several).

    `reasons` maps a class that a mesh axis could have sharded to why it does not; `parts` maps a class of layers to how
    the stages of a pipeline divide it. `staying` are the mesh axes of experts that stay on their devices, to which all
    tokens of these axes are gathered, instead of the experts.
    """

    ranks: Mapping[str, Mapping[int, int]]
    reasons: Mapping[int, Reason]
    parts: Mapping[int, Parts] = field(default_factory=dict)
    staying: tuple[str, ...] = ()

    def padded_size(self, label: int | None, size: int) -> int:
        """Returns the stored size of a dim of a class; layers that the stages do not divide evenly are padded."""
        parts = None if label is None else self.parts.get(label)
        return size if parts is None or size != parts.num_layers else parts.num_padded


def pinned(layout: Layout, pins: Pins, program: Program, mesh: MeshShape) -> Layout:
    """Returns the layout with the user's pins for single axes: `{"vocab": "model"}`, or None to replicate an axis.

    Raises:
      SpanaxError: the program has no such axis, or the mesh no such mesh axis.
    """
    if not pins:
        return layout
    check_pinned(program, pins)
    computed = dict(layout.computed)
    for name, mesh_axes in pins.items():
        computed = {
            axis: tuple(other_name for other_name in names if other_name != name) for axis, names in computed.items()
        }
        for axis in pinned_to(mesh_axes):
            if axis not in mesh.names:
                raise UnknownNameError(
                    f"cannot pin '{name}' to mesh axis '{axis}'.", where=f"mesh {mesh}", fix=nearest(axis, mesh.names)
                )
            computed[axis] = (name, *computed.get(axis, ()))
    return replace(layout, computed=tuple(computed.items()))


def pinned_to(pin: str | Sequence[str] | None) -> tuple[str, ...]:
    """Returns the mesh axes of one pin."""
    return (pin,) if isinstance(pin, str) else tuple(pin or ())


def check_pinned(program: Program, names: Iterable[str]) -> None:
    """Checks that the program has all pinned axes.

    Raises:
      SpanaxError: the program has no axis of that name.
    """
    known = sorted({*program.step.axes.names.values()})
    for name in names:
        if name not in known:
            raise UnknownNameError(
                f"cannot pin axis '{name}': the program has none of that name.", fix=nearest(name, known)
            )


def assign(program: Program, layout: Layout, mesh: MeshShape, pins: Pins, num_chunks: int = 1) -> Assignment:
    """Returns the classes that each mesh axis shards; each pipeline stage has `num_chunks` chunks of the layers.

    Raises:
      IdleAxisError: a mesh axis would shard no weight and no computation.
      SpanaxError: the batch or a pinned axis does not divide.
    """
    _check_mapped(program, mesh)
    assigning = _Assigning(program, layout, mesh, pins, num_chunks)
    for axis, names in layout.computed:
        if mesh.ways([axis]) > 1:
            assigning.ranks[axis] = assigning.over(axis, names)
    along = layout.sequence_axis
    alone = () if along is None else (along,)
    for each in layout.exclusive if along in layout.exclusive else alone:
        if mesh.ways([each]) > 1:
            assigning.ranks[each] |= dict.fromkeys(assigning.sequences(each), SEQUENCES)
    ranks = _with_hidden(assigning, _with_experts(program, assigning.ranks, mesh))
    axes = expert_axes(program, ranks)
    if not axes or not is_staying(program, ranks, mesh.ways):
        return Assignment(ranks, assigning.reasons, assigning.parts)
    classes = program.step.axes.classes
    experts = [label for value, dim in program.step.sorted_rows.groups if (label := classes[value][dim]) is not None]
    ranks |= {axis: {**ranks[axis], **dict.fromkeys(experts, SENT_TO)} for axis in axes}
    return Assignment(ranks, assigning.reasons, assigning.parts, axes)


@dataclass(frozen=True, eq=False)
class _Assigning:
    """An assignment in which the mesh axes so far have their classes.

    Attributes:
      program, layout, mesh, pins, num_chunks: the arguments of `assign`.
      ranks, reasons, parts: as in `Assignment`.
      num_shards: the number of devices over which each assigned class is sharded.
    """

    program: Program
    layout: Layout
    mesh: MeshShape
    pins: Pins
    num_chunks: int
    ranks: dict[str, dict[int, int]] = field(default_factory=dict)
    reasons: dict[int, Reason] = field(default_factory=dict)
    parts: dict[int, Parts] = field(default_factory=dict)
    num_shards: dict[int, int] = field(default_factory=dict)

    def over(self, axis: str, names: Sequence[str]) -> dict[int, int]:
        """Returns the classes of some names that a mesh axis shards, with their ranks.

        Raises:
          IdleAxisError: they have no work to divide.
        """
        accepted: dict[int, int] = {}
        square: dict[int, int] = {}
        for rank, name in enumerate(names):
            for label in self._candidates(axis, name, accepted):
                if not self._divides(axis, name, label):
                    continue
                clash = _clash(self.program, label, accepted) if axis in self.layout.exclusive else None
                if clash is None:
                    accepted |= dict.fromkeys((label, *self._groups(axis, label)), rank)
                else:
                    self.reasons.setdefault(label, replace(clash, axis=axis, detail=self._author(name, label)))
                    square.setdefault(label, rank)
        if not accepted and square:
            # Weights from an axis to itself (a residual stream): each is sharded along its contracted dim.
            label = next(iter(square))
            accepted[label] = square[label]
            del self.reasons[label]
        if axis in self.layout.exclusive:
            self._add_wholes(axis, accepted)
        self._check_works(axis, names, accepted)
        self.num_shards.update({label: self._shards_with(axis, label) for label in accepted})
        return accepted

    def _add_wholes(self, axis: str, accepted: dict[int, int]) -> None:
        """Accepts the classes that are a concatenation of pieces where the largest is: each piece is sharded."""
        waiting = dict(self.program.step.axes.wholes)
        while ready := [label for label, whole in waiting.items() if whole.main in accepted]:
            for label in ready:
                main = waiting.pop(label).main
                name = self.program.step.axes.names.get(label, "")
                clash = _clash(self.program, label, accepted)
                if clash is not None:
                    self.reasons.setdefault(label, replace(clash, axis=axis, detail=name))
                elif label not in accepted and self._divides(axis, name, label):
                    accepted[label] = accepted[main]
                    for other in self.program.step.axes.wholes[label].others:
                        if self.program.step.axes.ways[other] % self._shards_with(axis, other) == 0:
                            accepted.setdefault(other, accepted[main])
        self.reasons.update(
            (label, self.reasons[whole.main]) for label, whole in waiting.items() if whole.main in self.reasons
        )

    def sequences(self, axis: str) -> list[int]:
        """Returns the classes of sequences that a mesh axis can shard in addition to those that it shards."""
        ways = self.program.step.axes.ways
        labels = self.program.step.labels_by_name.get("seq", ())
        return [label for label in labels if ways[label] % self._shards_with(axis, label) == 0]

    def _candidates(self, axis: str, name: str, accepted: Mapping[int, int]) -> Iterator[int]:
        """Yields the classes of a name that are not accepted, while those before them may be accepted.

        Of two classes with one name the earlier is first: its gradient ends at the model's input, which saves a
        reduction. Those that are too small to shard are checked too, for their reason.
        """
        program = self.program
        is_last_resort = bool(accepted) and name in LAST_RESORT_AXES and not self.pins.get(name)
        labels = divided_layers(program) if name == "layers" else program.step.labels_by_name.get(name, ())
        for label in labels:
            if axis in self.layout.exclusive and label in program.step.axes.wholes:
                continue  # it follows its pieces
            author = self._author(name, label)
            is_pinned_by_author = author != name and author in self.pins
            is_too_small = is_last_resort and label not in program.heavy
            is_second = bool(accepted) and name in SPATIAL_AXES[1:] and not self.pins.get(name)
            if label in accepted or is_pinned_by_author or is_second:
                continue
            if is_too_small:
                self._divides(axis, name, label)
            else:
                yield label

    def _author(self, name: str, label: int) -> str:
        """Returns the name that the author of the program gave a class, or the name of its use."""
        return self.program.step.axes.names.get(label, name)

    def _shards_with(self, axis: str, label: int) -> int:
        """Returns the number of shards of a class that one more mesh axis shards."""
        return self.num_shards.get(label, 1) * self.mesh.ways([axis])

    def _groups(self, axis: str, label: int) -> tuple[int, ...]:
        """Returns the classes of queries of one key that a mesh axis shards, because other axes have one key each."""
        ways = self.program.step.axes.ways
        groups = self.program.step.axes.groups.get(label, ())
        is_exhausted = self.num_shards.get(label, 1) == ways[label]
        return groups if is_exhausted and all(ways[each] % self.mesh.ways([axis]) == 0 for each in groups) else ()

    def _divides(self, axis: str, name: str, label: int) -> bool:
        """Returns whether a mesh axis divides a class; records how stages divide layers, and why it does not.

        Raises:
          IndivisibleError: it must divide the class: that of the examples, or a pinned one.
        """
        size = self.program.step.axes.ways[label]
        num_shards = self._shards_with(axis, label)
        if axis == PIPE and name == "layers" and num_shards == self.mesh.ways([axis]) <= size:
            self.parts[label] = Parts(size, num_shards, self.num_chunks)
            return True
        is_even = size % num_shards == 0 or bool(self._groups(axis, label))
        if is_even or not _is_uneven(self.program, name, label, num_shards):
            return True
        self.reasons[label] = Reason(Code.NOT_DIVISIBLE, name, size=size, num_shards=num_shards)
        if name == "batch" or self.pins.get(name):
            raise _does_not_divide(self.program, name, size, num_shards, axis, self.layout, self.mesh)
        return False

    def _check_works(self, axis: str, names: Sequence[str], accepted: Mapping[int, int]) -> None:
        """Raises IdleAxisError unless the classes that a mesh axis shards divide work."""
        working = [rank for label, rank in accepted.items() if label in self.program.step.worked]
        if any(names[rank] in _main(names) for rank in working) or (working and axis in self.layout.exclusive):
            return
        unworked = {label: _unworked(self.program, names[0], label) for label, rank in accepted.items() if rank == 0}
        size = self.mesh.ways([axis])
        raise _idle(self.program, axis, size, names, self.reasons | unworked, self.layout, self.mesh)


def _main(names: Sequence[str]) -> tuple[str, ...]:
    """Returns those of the names of a mesh axis of which one must divide work: the first, and those of images."""
    return (*names[:1], *(name for name in names if name in SPATIAL_AXES))


def _is_uneven(program: Program, name: str, label: int, num_shards: int) -> bool:
    """Returns whether a class has dims that matter and do not divide; small values of the batch are gathered instead.

    Rewards of a batch of 16 in 4 groups of 4 do not rule out 8 devices.
    """
    step = program.step
    if name != "batch":
        return True
    sized = [
        (
            math.prod(step.graph.shape(value)),
            [size for size, other in zip(step.graph.shape(value), labels, strict=True) if other == label],
        )
        for value, labels in enumerate(step.axes.classes)
        if label in labels
    ]
    inputs = [leaf.shape[leaf.axes.index(name)] for leaf in program.batch if name in leaf.axes]
    largest = max(size for size, _ in sized)
    return any(size % num_shards for size in inputs) or any(
        all(length % num_shards for length in lengths) and size * SMALL > largest for size, lengths in sized
    )


def _check_mapped(program: Program, mesh: MeshShape) -> None:
    """Raises if a `jax.shard_map` of the user runs over another number of devices."""
    for axes in program.step.mapped_meshes:
        size = math.prod(size for _, size in axes)
        if size != mesh.size:
            mapped = ",".join(f"{name}={size}" for name, size in axes)
            raise DeviceCountError(
                f"the step has a jax.shard_map over {mapped}: {size} devices, and the mesh {mesh} has {mesh.size}.",
                fix=f"a cluster of {size} devices, or a jax.shard_map over a mesh of {mesh.size}",
            )


def _with_experts(program: Program, ranks: Mapping[str, dict[int, int]], mesh: MeshShape) -> dict[str, dict[int, int]]:
    """Returns the ranks, with `SENT_TO` for experts where moving tokens is cheaper than gathering the batch."""
    step = program.step
    result = dict(ranks)
    batch_axes = [axis for axis, accepted in ranks.items() if not step.batch_labels.isdisjoint(accepted)]
    for axis in batch_axes:
        num_other_shards = mesh.ways([name for name in batch_axes if name != axis])
        sent = [
            label
            for label, routing in step.routings.items()
            if label in ranks[axis] and routing.is_sent(mesh.ways([axis]), num_other_shards)
        ]
        result[axis] = ranks[axis] | dict.fromkeys(sent, SENT_TO)
    return result


def _with_hidden(assigning: _Assigning, ranks: dict[str, dict[int, int]]) -> dict[str, dict[int, int]]:
    """Returns the ranks, with those of hidden classes where moving activations is cheaper than moving weights."""
    program = assigning.program
    mesh = assigning.mesh
    step = program.step
    stored = [axis for axis in assigning.layout.stored("param") if mesh.ways([axis]) > 1]
    is_plain = all(not step.batch_labels.isdisjoint(ranks.get(axis, ())) for axis in stored)
    if not stored or not is_plain or mesh.ways([PIPE]) > 1:
        return ranks
    others = {axis: labels for axis, labels in ranks.items() if axis not in stored}

    def ways(labels: Iterable[int | None]) -> int:
        return mesh.ways([axis for axis, accepted in others.items() if not accepted.keys().isdisjoint(labels)])

    taken = {label for axis in stored for label in ranks[axis]}
    sent = {
        label: SENT_TO - step.axes.ways[label]
        for label, weights in step.hidden.items()
        if step.axes.ways[label] % (mesh.ways(stored) * ways([label])) == 0
        and assigning.pins.keys().isdisjoint((step.axes.names.get(label), step.axes.uses.get(label)))
        and taken.isdisjoint(each for weight in weights for labels, _ in weight.weights.values() for each in labels)
        and moves_less(weights, ways, mesh.ways(stored), times_as_large(program))
    }
    return ranks | {axis: ranks[axis] | sent for axis in stored}


def times_as_large(program: Program) -> int:
    """Returns how many times as large as what moves instead a weight must be, in each microbatch, to stay as stored."""
    return 1 if program.microbatches == 1 else 4


def expert_axes(program: Program, ranks: Mapping[str, Mapping[int, int]]) -> tuple[str, ...]:
    """Returns the mesh axes that shard both the experts of ragged matmuls and the tokens that are sorted for them."""
    found = program.step.sorted_rows
    classes = program.step.axes.classes
    experts = {classes[value][dim] for value, dim in found.groups}
    rows = {classes[value][dim] for value, dim in {op.rows for op in found.ops.values()}}
    return tuple(axis for axis, labels in ranks.items() if found.can_stay and experts | rows <= labels.keys())


def is_staying(program: Program, ranks: Mapping[str, Mapping[int, int]], ways: Callable[[Sequence[str]], Any]) -> Any:
    """Returns whether moving tokens moves less than gathering experts: of one mesh, or an array for several."""
    step = program.step
    found = step.sorted_rows
    among = expert_axes(program, ranks)
    rows = {step.axes.classes[value][dim] for value, dim in {op.rows for op in found.ops.values()}}
    weights = {label for value, _ in found.groups for label in step.axes.classes[value]}
    of_rows = [axis for axis, labels in ranks.items() if axis not in among and rows <= labels.keys()]
    of_weights = [axis for axis in ranks if axis not in (*among, *of_rows) and not weights.isdisjoint(ranks[axis])]
    return found.tokens(ways(among)) * ways(of_weights) < found.weights * ways(of_rows)


def divided_layers(program: Program) -> list[int]:
    """Returns the class of the layers that a pipeline divides, if any; of several, the one with the most parameters."""
    labels = program.step.labels_by_name.get("layers", ())
    return [max(labels, key=lambda label: program.size_by_class.get(label, 0))] if labels else []


def _clash(program: Program, label: int, accepted: Mapping[int, int]) -> Reason | None:
    """Returns the parameter that has this class twice, or together with an accepted class, as a reason.

    A concatenation has the class of its largest piece.
    """
    wholes = program.step.axes.wholes

    def main(each: int) -> int:
        return main(wholes[each].main) if each in wholes else each

    others = {main(each) for each in accepted} - {main(label)}
    for each in (label, *(whole for whole in wholes if main(whole) == label)):
        for path, classes in program.params_by_class.get(each, ()):
            labels = [main(other) for other in classes if other is not None]
            if labels.count(main(label)) > 1:
                return Reason(Code.TWO_DIMS, path)
            if not others.isdisjoint(labels):
                return Reason(Code.AXIS_USED, path)
    return None


def _does_not_divide(
    program: Program, name: str, size: int, shards: int, axis: str, layout: Layout, mesh: MeshShape
) -> IndivisibleError:
    lower = size // shards * shards
    upper = -(-size // shards) * shards
    near = f"{lower} or {upper}" if lower else f"{upper}"
    row = next((row for row in program.axes if row.name == name and row.leaves), None)
    # A loop over parts of the batch in the step itself shards the examples of one part.
    parts = f" in one of its parts, of {max(row.sizes)} in all," if row and size not in row.sizes else ""
    flag = f" (--global-batch-size {lower or upper})" if name == "batch" and program.run_loss is not None else ""
    return IndivisibleError(
        f"'{name}' of size {size}{parts} is not divisible by {shards}: {size} % {shards} = {size % shards}.",
        axis=axis,
        where=f"{row.leaves[0] if row else ''}, layout '{layout.name}', mesh {mesh}",
        fix=f"a {name} of {near}{' a part' if parts else ''}{flag}, or a smaller mesh axis{_steps(program, name)}",
    )


def _steps(program: Program, name: str) -> str:
    """Returns a question on the first array whose dim 0 is taken for its examples, if another dim may have them.

    The tokens of a loss are examples of a sequence each.
    """
    examples = zip(program.batch, program.step.axes.examples, strict=True)
    arrays = (leaf for leaf, dim in examples if dim == 0 and len(leaf.shape) > 1)
    array = next((leaf.path for leaf in arrays if program.run_loss is None or "int" not in str(leaf.dtype)), None)
    is_asked = name == "batch" and array is not None
    return f"; does dim 0 of `{array}` count steps? Then batch_axes= with its batch dim" if is_asked else ""


def _unworked(program: Program, name: str, label: int) -> Reason:
    """Returns why sharding a class saves no work."""
    if any(label in labels for labels in program.step.routed):
        return Reason(Code.ROUTER_SCORES, name)
    return Reason(Code.NO_WORK, name, size=program.step.axes.ways[label])


def _idle(
    program: Program,
    axis: str,
    size: int,
    names: Sequence[str],
    reasons: Mapping[int, Reason],
    layout: Layout,
    mesh: MeshShape,
) -> IdleAxisError:
    known = sorted({name for leaf in (*program.leaves, *program.batch) for name in leaf.axes if name})
    sizes = _working_sizes(program, names if axis in layout.exclusive else _main(names))
    labels = [label for name in names for label in program.step.labels_by_name.get(name, ())]
    tried = dict.fromkeys(str(reasons[label]) for label in labels if label in reasons)
    is_looped = any(label in reasons and reasons[label].code is Code.NO_WORK for label in labels)
    batch_axes = "batch_axes= if other dims have the examples, jax.vmap if a loop computes them one by one, or "
    return IdleAxisError(
        f"mesh axis '{axis}' ({size}) has nothing to shard in this program under layout '{layout.name}'.",
        axis=axis,
        where="; ".join(tried) or f"it shards {', '.join(names) or 'nothing'}; the program has {', '.join(known)}",
        fix=(batch_axes if is_looped else "") + _working_mesh(program, axis, names, sizes, mesh),
    )


def _working_sizes(program: Program, names: Sequence[str]) -> list[int]:
    """Returns the sizes of the classes of these names that divide work."""
    step = program.step
    labels = step.worked.intersection(label for name in names for label in step.labels_by_name.get(name, ()))
    return [step.axes.ways[label] for label in labels]


def _working_mesh(program: Program, axis: str, names: Sequence[str], sizes: Sequence[int], mesh: MeshShape) -> str:
    """Returns a mesh on which an idle axis is smaller: with another axis that much larger, or with fewer devices.

    `sizes` are those of the classes that the axis may divide.
    """
    size = mesh.ways([axis])
    used = _largest_divisor(sizes, [number for number in range(1, size) if size % number == 0])
    is_standard = MEANING.keys() >= {*mesh.names, axis} and names and {*names} <= {*MEANING.get(axis, ())}
    for wider in dict.fromkeys(("data", *mesh.names)) if is_standard else ():
        resized = {"data": 1, **dict(mesh.axes), axis: used}
        resized[wider] *= size // used
        other = MeshShape(tuple((name, resized[name]) for name in MEANING if resized.get(name, 1) > 1))
        if wider != axis and _works(program, other):
            return f"mesh {other}, layout '{in_words(layout_for(other).name, context_word(program))}'"
    used = _largest_divisor(sizes, range(1, size))
    num_devices = mesh.size // size * used
    devices = f"{num_devices} devices" if num_devices > 1 else "one device"
    return f"{axis}={used} on {devices}, or a layout without '{axis}'"


def _works(program: Program, mesh: MeshShape) -> bool:
    """Returns whether every axis of a mesh divides the batch or something else of a program."""
    of_batch = [name for name in mesh.names if "batch" in MEANING[name]]
    batch = _working_sizes(program, ["batch"])
    if of_batch and (not batch or any(number % mesh.ways(of_batch) for number in batch)):
        return False
    layout = layout_for(mesh)
    return all(
        any(number % mesh.ways([name]) == 0 for number in _working_sizes(program, layout.splits(name)))
        for name in mesh.names
        if name not in of_batch
    )


def _largest_divisor(sizes: Sequence[int], divisors: Iterable[int]) -> int:
    return max((divisor for divisor in divisors if any(size % divisor == 0 for size in sizes)), default=1)
