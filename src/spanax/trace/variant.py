"""The form in which a train step is computed."""

from dataclasses import dataclass

from spanax.trace.jaxpr.remat_policies import GATHERED


@dataclass(frozen=True)
class Variant:
    """The options of a program that can be changed after it was traced; the defaults compute the step as written.

    Attributes:
      remat: the remat policy, as in `spanax.trace`; None as written in the model.
      microbatches: number of microbatches over which gradients are accumulated.
      context: `ring` or a platform's kernel, for which attention is fused, or `gathered`, as written in the model.
      loss_chunks: number of chunks of tokens in which the loss computes its logits.
      compute_dtype: dtype of floating parameters and batch in the loss; None for their own dtypes.
      records_gradients: whether the optimizer state also stores the gradients of the last step.
      padded: axes by name, each with a number: activations have them padded to a multiple of it.
      seed: the seed of a `build` that runs eagerly.

    Example:
      >>> Variant(remat="dots") == Variant(remat="dots", microbatches=1)
      True
    """

    remat: str | None = None
    microbatches: int = 1
    context: str = GATHERED
    loss_chunks: int = 1
    compute_dtype: str | None = None
    records_gradients: bool = False
    padded: tuple[tuple[str, int], ...] = ()
    seed: int = 0
