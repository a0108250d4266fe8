"""The blocks of a ring, each computed by a platform's kernel."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from spanax.trace.rewrites.attention.blockwise import Keys, Part
from spanax.trace.rewrites.attention.kernels import Kernel
from spanax.trace.rewrites.attention.operation import attention_grad_p, attention_p
from spanax.trace.rewrites.attention.scores import Form, scaled


@dataclass(frozen=True)
class KernelBlocks:
    """The computation of one part of the queries with one part of the keys by a kernel, as `Blocks` computes it.

    With a causal mask, a part of the queries sees none of the keys after it, and all of those before it: the kernel
    applies the mask only where both are the same part of the sequence.

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
            out, log_sum = attention_p.bind(part.q, keys.k, keys.v, form=form, dtype=jnp.float32, kernel=kernel)
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
            operands = (part.q, keys.k, keys.v, part.out, *part.rows)
            of_q, of_k, of_v = attention_grad_p.bind(*operands, form=form, grads=(), kernel=kernel)
            q_total, extras, k_total, v_total = state
            return q_total + of_q, extras, k_total + of_k, v_total + of_v

        return self._by_mask(part, keys, state, add)

    def _by_mask(self, part: Part, keys: Keys, state: Any, add: Callable[[Form, Kernel, Any], Any]) -> Any:
        unmasked = replace(self.kernel, is_causal=False)
        full = lambda state: add(scaled(self.form, self.kernel.scale), unmasked, state)  # noqa: E731
        if not self.kernel.is_causal:
            return full(state)
        own = lambda state: add(self.form, self.kernel, state)  # noqa: E731
        branches = [full, own, lambda state: state]
        kinds = np.where(self.masked, 2, np.eye(len(self.masked), dtype=int))
        return lax.switch(jnp.asarray(kinds)[part.index, keys.index], branches, state)
