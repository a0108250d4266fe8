"""Ring attention: keys and values pass around the devices that share a sequence while each device computes.

A device keeps its queries. At every step it sends its current keys and values to the next device and attends to them
meanwhile. After n steps on n devices every query has attended to every key, and no device has stored the keys of more
than two devices.

Source: Liu, Zaharia and Abbeel, Ring Attention, arXiv 2310.01889, section 3; load balancing as in
`trace/rewrites/attention/zigzag.py`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from spanax.plan.pipeline.ticks import share_name
from spanax.plan.sharding.attention import AttentionSharding
from spanax.trace.jaxpr.graph import Op
from spanax.trace.rewrites.attention.blockwise import Blocks, Keys, Part, finished, parted
from spanax.trace.rewrites.attention.operation import (
    BACKWARD,
    NUM_ROWS,
    attend_here,
    joined_extras,
    turn_back_here,
    wanted_of,
    zeros_of_extras,
)
from spanax.trace.rewrites.attention.scores import Form
from spanax.trace.rewrites.attention.zigzag import Shares, shares


def attended_part(
    op: Op, around: AttentionSharding, mesh: Mesh, manual: frozenset[str]
) -> Callable[..., tuple[Any, ...]]:
    """What each device does of an attention, with its parts of the operands.

    Args:
      op: the operation, forward or backward.
      around: how it is divided.
      mesh: the devices.
      manual: mesh axes that the surroundings have split by hand already; the operands have none of them any more.
    """
    form, sizes = around.form, dict(mesh.shape)
    axes = [tuple(axis for axis in by if axis not in manual and sizes[axis] > 1) for by in around.axes]
    ring = axes[form.keys]

    size = math.prod(sizes[axis] for axis in ring)

    def forward(starts: dict[int, Any], operands: Sequence[Any]) -> Sequence[Any]:
        q, k, v, *extras = operands
        if ring:
            return _Ring(form, ring, size, starts).forward(op.params["dtype"], q, k, v, extras)
        return attend_here(form, op.params["dtype"], q, k, v, extras, starts)

    def backward(starts: dict[int, Any], operands: Sequence[Any]) -> Sequence[Any]:
        grads = op.params["grads"]
        if ring:
            found = _Ring(form, ring, size, starts, grads).backward(operands)
        else:
            found = turn_back_here(form, grads, operands, starts)
        used = {axis for by in axes for axis in by}
        own = [{axis for by in spec for axis in by} for spec in around.results(op)]
        sums = [tuple(axis for axis in mesh.axis_names if axis in used - one) for one in own]
        summed = [lax.psum(one, over) if over else one for one, over in zip(found, sums, strict=True)]
        return [one.astype(of.dtype) for one, of in zip(summed, wanted_of(grads, operands), strict=True)]

    def part(*operands: Any) -> tuple[Any, ...]:
        starts = {
            label: lax.axis_index(by) * operands[0].shape[label]
            for label, by in enumerate(axes[: form.keys])
            if by and not (ring and label == form.queries)
        }
        return tuple((backward if op.name == BACKWARD else forward)(starts, operands))

    return part


@dataclass(frozen=True)
class _Ring:
    """One device of a ring: `axes` are the mesh axes it goes along, `size` its devices; the rest as in `Blocks`."""

    form: Form
    axes: tuple[str, ...]
    size: int
    starts: dict[int, Any]
    grads: tuple[bool, ...] = ()

    @property
    def share(self) -> Shares:
        """The parts of every device."""
        return shares(self.form, self.size)

    @property
    def blocks(self) -> Blocks:
        """How a part meets another."""
        return Blocks(self.form, self.share.masked, self.starts, self.grads, share_name(*self.share.counts))

    def forward(self, dtype: Any, q: Any, k: Any, v: Any, extras: Sequence[Any]) -> tuple[Any, ...]:
        """The result, and what the way back needs of its rows."""
        parts = self._parts(Part(q, tuple(extras), 0))
        k, v = (self._moved(one, self.form.num_batch) for one in (k, v))

        def meet(states: Any, k: Any, v: Any, step: Any) -> Any:
            found = list(states)
            for keys in self._keys(k, v, step):
                for at, part in enumerate(parts):
                    found[at] = self.blocks.attend(part, keys, found[at])
            return tuple(found)

        def turn(carry: Any, step: Any) -> tuple[Any, None]:
            k, v, states = carry
            # Sent before it is used: the hop needs nothing of what is computed meanwhile.
            ahead = self._hop(k), self._hop(v)
            return (*ahead, meet(states, k, v, step)), None

        states = tuple(self.blocks.fresh(part, v.shape[-1]) for part in parts)
        (k, v, states), _ = lax.scan(turn, (k, v, states), jnp.arange(self.size - 1))
        states = meet(states, k, v, self.size - 1)
        found = zip(*(finished(state, dtype) for state in states), strict=True)
        return tuple(self._back(jnp.concatenate(each, self.form.queries), self.form.queries) for each in found)

    def backward(self, operands: Sequence[Any]) -> list[Any]:
        """The gradients in 32 bits: of keys and values all of them, of extras what these queries add."""
        form, grads = self.form, self.grads
        q, k, v, of_out, *rows = operands[:NUM_ROWS]
        parts = self._parts(Part(q, tuple(operands[NUM_ROWS:]), 0, of_out, tuple(rows)))
        k, v = (self._moved(one, form.num_batch) for one in (k, v))
        num = len(parts)

        def meet(own: Any, of_k: Any, of_v: Any, k: Any, v: Any, step: Any) -> Any:
            mine, theirs = (
                list(own),
                list(zip(*(jnp.split(one, num, form.num_batch) for one in (of_k, of_v)), strict=True)),
            )
            for there, keys in enumerate(self._keys(k, v, step)):
                for at, part in enumerate(parts):
                    of_q, of_extras, *theirs[there] = self.blocks.turn_back(part, keys, (*mine[at], *theirs[there]))
                    mine[at] = (of_q, of_extras)
            return tuple(mine), *(jnp.concatenate(each, form.num_batch) for each in zip(*theirs, strict=True))

        def turn(carry: Any, step: Any) -> tuple[Any, None]:
            own, of_k, of_v, k, v = carry
            ahead = self._hop(k), self._hop(v)
            return (*behind(own, of_k, of_v, k, v, step), *ahead), None

        def behind(own: Any, of_k: Any, of_v: Any, k: Any, v: Any, step: Any) -> Any:
            # What others have added to the gradient of these keys comes behind the keys, and is needed only at the end.
            before = self._hop(of_k), self._hop(of_v)
            own, more_k, more_v = meet(own, jnp.zeros_like(of_k), jnp.zeros_like(of_v), k, v, step)
            return own, before[0] + more_k, before[1] + more_v

        own = tuple((jnp.zeros(one.q.shape, jnp.float32), zeros_of_extras(grads, one.extras)) for one in parts)
        nothing = [jnp.zeros(one.shape, jnp.float32) for one in (k, v)]
        (own, of_k, of_v, k, v), _ = lax.scan(turn, (own, *nothing, k, v), jnp.arange(self.size - 1))
        own, of_k, of_v = behind(own, of_k, of_v, k, v, self.size - 1)
        of_keys = [self._back(self._hop(one), form.num_batch) for one in (of_k, of_v)]
        of_q = self._back(jnp.concatenate([one for one, _ in own], form.queries), form.queries)
        labels = [labels for labels, is_wanted in zip(form.extras, grads, strict=True) if is_wanted]
        of_extras = [
            self._back(one, of.index(form.queries)) if form.queries in of else one
            for one, of in zip(joined_extras(form, grads, [extras for _, extras in own]), labels, strict=True)
        ]
        return [of_q, *of_keys, *of_extras]

    def _parts(self, part: Part) -> list[Part]:
        """This device's queries, with the parts of the sequence that are its own."""
        form = self.form
        extras = tuple(
            self._moved(extra, labels.index(form.queries)) if form.queries in labels else extra
            for extra, labels in zip(part.extras, form.extras, strict=True)
        )
        moved = replace(
            part,
            q=self._moved(part.q, form.queries),
            extras=extras,
            out=None if part.out is None else self._moved(part.out, form.queries),
            rows=tuple(self._moved(row, form.queries) for row in part.rows),
        )
        found = parted(form, moved, len(self.share.owned[0]))
        return [replace(one, index=self._owned(at, 0)) for at, one in enumerate(found)]

    def _keys(self, k: Any, v: Any, step: Any) -> list[Keys]:
        """The keys that are here at a step: those of as many devices before this one."""
        num = len(self.share.owned[0])
        pairs = zip(*(jnp.split(one, num, self.form.num_batch) for one in (k, v)), strict=True)
        return [Keys(of_k, of_v, self._owned(at, step)) for at, (of_k, of_v) in enumerate(pairs)]

    def _owned(self, at: int, step: Any) -> Any:
        """Which part of the sequence one slot of the device so many before this one has."""
        owned = jnp.asarray([parts[at] for parts in self.share.owned])
        return owned[(lax.axis_index(self.axes) - step) % self.size]

    def _hop(self, array: Any) -> Any:
        return lax.ppermute(array, self.axes, [(at, (at + 1) % self.size) for at in range(self.size)])

    def _moved(self, array: Any, dim: int) -> Any:
        """A device's contiguous part as the two halves that it has in a zigzag.

        Of the halves in order, those at even places lie first on their devices and those at odd places second; either
        half of all devices goes in one exchange, as a device has one of each in a zigzag too.
        """
        if not self.share.is_moved:
            return array
        first, second = self._exchanged(jnp.split(array, 2, dim), is_back=False)
        return jnp.concatenate(self._sorted(first, second), dim)

    def _back(self, array: Any, dim: int) -> Any:
        """The inverse of `_moved`."""
        if not self.share.is_moved:
            return array
        return jnp.concatenate(self._exchanged(self._sorted(*jnp.split(array, 2, dim)), is_back=True), dim)

    def _exchanged(self, halves: Sequence[Any], is_back: bool) -> list[Any]:
        home = {part: device for device, parts in enumerate(self.share.owned) for part in parts}
        ways = [[(at, home[2 * at + odd]) for at in range(self.size)] for odd in (0, 1)]
        if is_back:
            ways = [[(to, at) for at, to in way] for way in ways]
        return [lax.ppermute(half, self.axes, way) for half, way in zip(halves, ways, strict=True)]

    def _sorted(self, a: Any, b: Any) -> list[Any]:
        """Two halves in their order on a device whose first part is even, and the other way round on others."""
        is_even = lax.axis_index(self.axes) % 2 == 0
        return [jnp.where(is_even, a, b), jnp.where(is_even, b, a)]
