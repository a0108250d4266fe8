"""The options under which a train step is computed."""

from dataclasses import dataclass

from spanax.trace.jaxpr.remat_policies import GATHERED
from spanax.trace.rewrites.matmul_dtype import MatmulDtypes


@dataclass(frozen=True)
class Variant:
    """The options of a program that can be changed after it was traced; the defaults compute the step as written.

    Attributes:
      remat: the remat policy, as in `spanax.trace`; None as written in the model.
      microbatches: number of microbatches over which gradients are accumulated.
      context: `ring` or a platform's kernel, for which attention is fused, or `gathered`, as written in the model.
      loss_chunks: number of chunks of tokens in which the loss computes its logits.
      compute_dtype: dtype of floating parameters and batch in the loss; None for their own dtypes.
      quantize: the recipe by which matmuls of weights are quantized, as in `spanax.trace`; None for none.
      records_gradients: whether the optimizer state also stores the gradients of the last step.
      padded: axes by name, each with a number: activations have them padded to a multiple of it.
      seed: the seed of a `build` that runs eagerly.

    Example:
      >>> Variant(remat="dots") == Variant(remat="dots", microbatches=1)
      True
      >>> print(Variant(remat="dots", compute_dtype="bfloat16"))
      bfloat16, remat dots
    """

    remat: str | None = None
    microbatches: int = 1
    context: str = GATHERED
    loss_chunks: int = 1
    compute_dtype: str | None = None
    quantize: str | None = None
    records_gradients: bool = False
    padded: tuple[tuple[str, int], ...] = ()
    seed: int = 0

    @property
    def dtypes(self) -> MatmulDtypes:
        """Returns the dtypes in which the loss computes its matmuls."""
        return MatmulDtypes(self.compute_dtype, self.quantize)

    def __str__(self) -> str:
        padded = "+".join(name for name, _ in self.padded)
        options = {
            "": self.compute_dtype,
            "quantize ": self.quantize,
            "remat ": self.remat,
            "attention ": None if self.context == GATHERED else self.context,
            "microbatches ": None if self.microbatches == 1 else self.microbatches,
            "loss chunks ": None if self.loss_chunks == 1 else self.loss_chunks,
            "padded ": padded or None,
        }
        return ", ".join(f"{name}{value}" for name, value in options.items() if value is not None) or "as written"
