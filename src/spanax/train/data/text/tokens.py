"""The token ids of one split of a source."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from spanax.errors import DataError
from spanax.train.data.text.tokenizer import Tokenizer

MAX_VOCAB_SIZE = 1 << 22
"""The limit for a `.bin`: a file that is read with the wrong dtype has arbitrarily large ids."""


@dataclass(frozen=True)
class Tokens:
    """The token ids of one split of a source, mapped from disk where they are large.

    Args:
      name: the name in errors and saved positions: source, split, tokenizer and a hash of the content.
      ids: the token ids, of shape [N].
      tokenizer: the tokenizer that encoded the text; None for a `.bin`, whose tokenizer is unknown.
    """

    name: str
    ids: np.ndarray = field(repr=False)
    tokenizer: Tokenizer | None = None

    @cached_property
    def vocab_size(self) -> int:
        """The size of the smallest vocabulary with every id; the first access reads all of a `.bin`."""
        if self.tokenizer:
            return self.tokenizer.vocab_size
        pieces = [self.ids[i : i + (1 << 24)] for i in range(0, len(self.ids), 1 << 24)]
        lowest, highest = min(int(piece.min()) for piece in pieces), max(int(piece.max()) for piece in pieces)
        if lowest < 0 or highest >= MAX_VOCAB_SIZE:
            raise DataError(
                f"the token ids range from {lowest:,} to {highest:,}, which is implausible for a vocabulary.",
                where=f"{self.name}, read as {self.ids.dtype}",
                fix='the dtype in the .json next to the file, such as {"dtype": "uint32"}',
            )
        return highest + 1
