"""Ring attention: keys and values pass around the devices that share a sequence while each device computes.

A device keeps its queries. At every step it sends its current keys and values to the next device and attends to them
meanwhile. After n steps on n devices every query has attended to every key, and no device has stored the keys of more
than two devices.

Source: Liu, Zaharia and Abbeel, Ring Attention, arXiv 2310.01889, section 3; load balancing as in
`trace/rewrites/attention/scores.py`.
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
from spanax.step.attention.kernel_blocks import KernelBlocks
from spanax.trace.jaxpr.graph import Op
from spanax.trace.rewrites.attention.blockwise import Blocks, Keys, Part, finished, fresh, of_sinks, parted
from spanax.trace.rewrites.attention.kernels import Kernel
from spanax.trace.rewrites.attention.operation import (
    BACKWARD,
    attend_here,
    joined_extras,
    row_products,
    turn_back_here,
    wanted_of,
    zeros_of_extras,
)
from spanax.trace.rewrites.attention.scores import Form, Shares, shares


def per_device_attention(
    op: Op, sharding: AttentionSharding, mesh: Mesh, manual: frozenset[str]
) -> Callable[..., tuple[Any, ...]]:
    """Returns the per-device function of an attention operation, for `jax.shard_map`.

    The operands are local along the mesh axes that are already `manual`.
    """
    form = sharding.form
    kernel = op.params["kernel"]
    sizes = dict(mesh.shape)
    axes = [tuple(axis for axis in dim_axes if axis not in manual and sizes[axis] > 1) for dim_axes in sharding.axes]
    ring = axes[form.keys]

    size = math.prod(sizes[axis] for axis in ring)

    def forward(starts: dict[int, Any], operands: Sequence[Any]) -> Sequence[Any]:
        q, k, v, *extras = operands
        if ring:
            out, largest, weight = _Ring(form, kernel, ring, size, starts).forward(op.params["dtype"], q, k, v, extras)
            return [out, largest + jnp.log(weight)] if kernel else [out, largest, weight]
        if kernel:
            return op.bind(operands)
        return attend_here(form, op.params["dtype"], q, k, v, extras, starts)

    def backward(starts: dict[int, Any], operands: Sequence[Any]) -> Sequence[Any]:
        grads = op.params["grads"]
        if ring:
            partial_grads = _Ring(form, kernel, ring, size, starts, grads).backward(operands)
        elif kernel:
            partial_grads = op.bind(operands)
        else:
            partial_grads = turn_back_here(form, grads, operands, starts)
        used_axes = {axis for dim_axes in axes for axis in dim_axes}
        result_axes = [{axis for dim_axes in spec for axis in dim_axes} for spec in sharding.results(op)]
        sums = [tuple(axis for axis in mesh.axis_names if axis in used_axes - sharded) for sharded in result_axes]
        summed = [
            lax.psum(grad.astype(jnp.float32), reduced_axes) if reduced_axes else grad
            for grad, reduced_axes in zip(partial_grads, sums, strict=True)
        ]
        return [grad.astype(target.dtype) for grad, target in zip(summed, wanted_of(grads, operands), strict=True)]

    def part(*operands: Any) -> tuple[Any, ...]:
        starts = {
            label: lax.axis_index(dim_axes) * operands[0].shape[label]
            for label, dim_axes in enumerate(axes[: form.keys])
            if dim_axes and not (ring and label == form.queries)
        }
        return tuple((backward if op.name == BACKWARD else forward)(starts, operands))

    return part


@dataclass(frozen=True)
class _Ring:
    """A ring of devices that share a sequence.

    `axes` are its mesh axes and `size` its number of devices; a `kernel` may compute its blocks; `form`, `starts` and
    `grads` are as in `Blocks`.
    """

    form: Form
    kernel: Kernel | None
    axes: tuple[str, ...]
    size: int
    starts: dict[int, Any]
    grads: tuple[bool, ...] = ()

    @property
    def share(self) -> Shares:
        """The parts of the sequence on each device."""
        return shares(self.form, self.size)

    @property
    def blocks(self) -> Blocks | KernelBlocks:
        """The computation of one part of the queries with one part of the keys."""
        if self.kernel is not None:
            return KernelBlocks(self.form, self.kernel, self.share.masked)
        return Blocks(self.form, self.share.masked, self.starts, self.grads, share_name(*self.share.counts))

    def forward(self, dtype: Any, q: Any, k: Any, v: Any, extras: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the output and the residuals of each row."""
        parts = self._parts(Part(q, tuple(extras), 0))
        k, v = (self._moved(array, self.form.num_batch) for array in (k, v))

        def attend_to_local(states: Any, k: Any, v: Any, step: Any) -> Any:
            new_states = list(states)
            for keys in self._keys(k, v, step):
                for index, part in enumerate(parts):
                    new_states[index] = self.blocks.attend(part, keys, new_states[index])
            return tuple(new_states)

        def body(carry: Any, step: Any) -> tuple[Any, None]:
            k, v, states = carry
            # Sent before use: the transfer does not depend on the computation, so the two overlap.
            next_kv = self._hop(k), self._hop(v)
            return (*next_kv, attend_to_local(states, k, v, step)), None

        states = tuple(fresh(self.form, part, v.shape[-1], self.starts) for part in parts)
        (k, v, states), _ = lax.scan(body, (k, v, states), jnp.arange(self.size - 1))
        states = attend_to_local(states, k, v, self.size - 1)
        results = zip(*(finished(state, dtype) for state in states), strict=True)
        return tuple(self._back(jnp.concatenate(arrays, self.form.queries), self.form.queries) for arrays in results)

    def backward(self, operands: Sequence[Any]) -> list[Any]:
        """Returns float32 gradients: complete for keys and values, partial for extras, from the local queries."""
        form = self.form
        grads = self.grads
        num_rows = len(operands) - len(grads)
        q, k, v, grad_out, *rows = operands[:num_rows]
        parts = self._parts(Part(q, tuple(operands[num_rows:]), 0, grad_out, tuple(rows)))
        k, v = (self._moved(array, form.num_batch) for array in (k, v))
        num = len(parts)

        def add_local(query_grads: Any, grad_k: Any, grad_v: Any, k: Any, v: Any, step: Any) -> Any:
            new_query_grads = list(query_grads)
            key_grads = list(zip(*(jnp.split(array, num, form.num_batch) for array in (grad_k, grad_v)), strict=True))
            for slot, keys in enumerate(self._keys(k, v, step)):
                for index, part in enumerate(parts):
                    grad_q, extra_grads, *key_grads[slot] = self.blocks.turn_back(
                        part, keys, (*new_query_grads[index], *key_grads[slot])
                    )
                    new_query_grads[index] = (grad_q, extra_grads)
            return tuple(new_query_grads), *(
                jnp.concatenate(arrays, form.num_batch) for arrays in zip(*key_grads, strict=True)
            )

        def body(carry: Any, step: Any) -> tuple[Any, None]:
            query_grads, grad_k, grad_v, k, v = carry
            next_kv = self._hop(k), self._hop(v)
            return (*shift_and_add(query_grads, grad_k, grad_v, k, v, step), *next_kv), None

        def shift_and_add(query_grads: Any, grad_k: Any, grad_v: Any, k: Any, v: Any, step: Any) -> Any:
            # Sums of the other devices follow their keys around the ring, overlapped: they are only needed at the end.
            shifted = self._hop(grad_k), self._hop(grad_v)
            query_grads, local_k, local_v = add_local(
                query_grads, jnp.zeros_like(grad_k), jnp.zeros_like(grad_v), k, v, step
            )
            return query_grads, shifted[0] + local_k, shifted[1] + local_v

        query_grads = tuple(
            (jnp.zeros(array.q.shape, jnp.float32), zeros_of_extras(grads, array.extras)) for array in parts
        )
        zeros = [jnp.zeros(array.shape, jnp.float32) for array in (k, v)]
        (query_grads, grad_k, grad_v, k, v), _ = lax.scan(body, (query_grads, *zeros, k, v), jnp.arange(self.size - 1))
        query_grads, grad_k, grad_v = shift_and_add(query_grads, grad_k, grad_v, k, v, self.size - 1)
        query_grads = tuple(
            (grad, of_sinks(form, self._with_rows(part), self.starts, grads, extras))
            for part, (grad, extras) in zip(parts, query_grads, strict=True)
        )
        kv_grads = [self._back(self._hop(array), form.num_batch) for array in (grad_k, grad_v)]
        grad_q = self._back(jnp.concatenate([array for array, _ in query_grads], form.queries), form.queries)
        labels = [labels for labels, is_computed in zip(form.extras, grads, strict=True) if is_computed]
        extra_grads = [
            self._back(array, array_labels.index(form.queries)) if form.queries in array_labels else array
            for array, array_labels in zip(
                joined_extras(form, grads, [extras for _, extras in query_grads]), labels, strict=True
            )
        ]
        return [grad_q, *kv_grads, *extra_grads]

    def _with_rows(self, part: Part) -> Part:
        """Returns a part with the residuals of rows as without a kernel: largest logit, sum of weights, delta."""
        if self.kernel is None:
            return part
        out, log_sum = part.rows
        return replace(part, rows=(log_sum, jnp.ones_like(log_sum), row_products(out, part.out)))

    def _parts(self, part: Part) -> list[Part]:
        """Returns this device's queries, partitioned into its parts of the sequence."""
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
        queries = parted(form, moved, len(self.share.owned[0]))
        return [replace(query, index=self._owned(slot, 0)) for slot, query in enumerate(queries)]

    def _keys(self, k: Any, v: Any, step: Any) -> list[Keys]:
        """Returns the keys on this device at a step: those of the device `step` places before it."""
        num = len(self.share.owned[0])
        pairs = zip(*(jnp.split(array, num, self.form.num_batch) for array in (k, v)), strict=True)
        return [Keys(part_k, part_v, self._owned(slot, step)) for slot, (part_k, part_v) in enumerate(pairs)]

    def _owned(self, slot: int, step: Any) -> Any:
        """Returns which part of the sequence occupies a slot of the device `step` places before this one."""
        owned = jnp.asarray([parts[slot] for parts in self.share.owned])
        return owned[(lax.axis_index(self.axes) - step) % self.size]

    def _hop(self, array: Any) -> Any:
        return lax.ppermute(array, self.axes, [(device, (device + 1) % self.size) for device in range(self.size)])

    def _moved(self, array: Any, dim: int) -> Any:
        """Exchanges a device's contiguous part of the sequence for its two parts of the zigzag.

        Parts with an even index go to the first slot of their device and parts with an odd index to the second. One
        permutation moves the even parts of all devices and another the odd ones, as every device has one of each.
        """
        if not self.share.is_moved:
            return array
        first, second = self._exchanged(jnp.split(array, 2, dim), is_back=False)
        return jnp.concatenate(self._sorted(first, second), dim)

    def _back(self, array: Any, dim: int) -> Any:
        """Inverts `_moved`."""
        if not self.share.is_moved:
            return array
        return jnp.concatenate(self._exchanged(self._sorted(*jnp.split(array, 2, dim)), is_back=True), dim)

    def _exchanged(self, halves: Sequence[Any], is_back: bool) -> list[Any]:
        owner = {part: device for device, parts in enumerate(self.share.owned) for part in parts}
        perms = [[(source, owner[2 * source + odd]) for source in range(self.size)] for odd in (0, 1)]
        if is_back:
            perms = [[(target, source) for source, target in perm] for perm in perms]
        return [lax.ppermute(half, self.axes, perm) for half, perm in zip(halves, perms, strict=True)]

    def _sorted(self, a: Any, b: Any) -> list[Any]:
        """Returns two parts in slot order if the first part of this device is even, and in reverse order otherwise."""
        is_even = lax.axis_index(self.axes) % 2 == 0
        return [jnp.where(is_even, a, b), jnp.where(is_even, b, a)]
