"""The blocks of a ring, each computed by a platform's kernel."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from spanax.trace.rewrites.attention.blockwise import Keys, Part
from spanax.trace.rewrites.attention.kernel_form import kernel_form
from spanax.trace.rewrites.attention.kernels import Kernel
from spanax.trace.rewrites.attention.operation import attention_grad_p, attention_p
from spanax.trace.rewrites.attention.patterns import Pattern
from spanax.trace.rewrites.attention.scores import Form

UNSEEN = -1e30
"""The logit of a key that a query does not see; the log-sum of a block without any has no weight beside another."""


@dataclass(frozen=True)
class KernelBlocks:
    """The computation of one part of the queries with one part of the keys by a kernel, as `Blocks` computes it.

    Of a pair of parts the mask shows all keys, or none, or it is a window, shifted by the distance of the parts.

    Attributes:
      form: the attention.
      kernel: the kernel.
      masked: whether a pair is fully masked, (parts of queries, parts of keys).
    """

    form: Form
    kernel: Kernel
    masked: np.ndarray

    def attend(self, part: Part, keys: Keys, state: Any) -> Any:
        """Returns the state of a part's rows (sum of values, largest logit, sum of weights) updated with these keys."""

        def add(form: Form, kernel: Kernel, state: Any) -> Any:
            operands = (part.q, keys.k, keys.v, *self._ids(part, keys))
            out, log_sum = attention_p.bind(*operands, form=form, dtype=jnp.float32, kernel=kernel)
            total, largest, weight = state
            maximum = jnp.maximum(largest, log_sum)
            scale = jnp.exp(largest - maximum)
            added = jnp.exp(log_sum - maximum)
            return total * scale[..., None] + out * added[..., None], maximum, weight * scale + added

        return self._by_mask(part, keys, state, add)

    def turn_back(self, part: Part, keys: Keys, state: Any) -> Any:
        """Returns the gradients (of q, of no extras, of k, of v) plus the terms of these queries and keys.

        The kernel computes the terms of a block from the result and the log-sum-exp over all keys.
        """

        def add(form: Form, kernel: Kernel, state: Any) -> Any:
            ids = self._ids(part, keys)
            operands = (part.q, keys.k, keys.v, part.out, *part.rows, *ids)
            of_q, of_k, of_v = attention_grad_p.bind(*operands, form=form, grads=(False,) * len(ids), kernel=kernel)
            q_total, extras, k_total, v_total = state
            return q_total + of_q, extras, k_total + of_k, v_total + of_v

        return self._by_mask(part, keys, state, add)

    def _ids(self, part: Part, keys: Keys) -> Sequence[Any]:
        """Returns the ids of the queries and of the keys of two parts."""
        if not self.kernel.has_ids:
            return ()
        of_queries, of_keys = part.extras[:2]
        size = keys.k.shape[self.form.num_batch]
        return of_queries, lax.dynamic_slice_in_dim(of_keys, keys.index * size, size, of_keys.ndim - 1)

    def _by_mask(self, part: Part, keys: Keys, state: Any, add: Callable[[Form, Kernel, Any], Any]) -> Any:
        kinds: dict[Pattern | None, int] = {}
        count = len(self.masked)
        table = [[kinds.setdefault(self._pattern(q, k), len(kinds)) for k in range(count)] for q in range(count)]
        branches = [partial(self._branch, add, pattern) for pattern in kinds]
        if len(branches) == 1:
            return branches[0](state)
        return lax.switch(jnp.asarray(table)[part.index, keys.index], branches, state)

    def _branch(self, add: Callable[[Form, Kernel, Any], Any], pattern: Pattern | None, state: Any) -> Any:
        """Returns the state updated with the keys that a pattern shows; None shows none."""
        if pattern is None:
            return state
        is_own = pattern == self.kernel.pattern and not self.form.extras
        kernel = replace(self.kernel, pattern=pattern, has_sink=False)  # a sink is in the state before all keys
        if not (is_own or pattern.is_full) or self.kernel.has_ids:
            kernel = replace(kernel, masked=UNSEEN)
        batch = self.form.extras[0][:-1] if self.kernel.has_ids else ()
        return add(self.form if is_own else kernel_form(self.form, kernel, batch), kernel, state)

    def _pattern(self, query_part: int, key_part: int) -> Pattern | None:
        """Returns the pattern of two parts, by the positions in these; None if it shows no key."""
        if self.masked[query_part, key_part]:
            return None
        pattern = self.kernel.pattern
        sizes = [self.form.sizes[label] // len(self.masked) for label in (self.form.queries, self.form.keys)]
        firsts = [query_part * sizes[0], key_part * sizes[1]]
        ends = [[first, first + size - 1] for first, size in zip(firsts, sizes, strict=True)]
        _, is_clear = pattern.known(np.asarray([*ends[0], *ends[1]])[:, None])
        if is_clear.all():
            return Pattern()
        distance = firsts[0] - firsts[1]
        before = None if pattern.before is None else pattern.before - distance
        return Pattern(before, None if pattern.after is None else pattern.after + distance)
