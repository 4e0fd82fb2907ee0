"""Many sequences of token ids in two arrays, and rows of them that are padded to one length."""

import dataclasses
from collections.abc import Iterable
from typing import Self

import numpy as np
from tokenizers import Tokenizer

from experiments.data.tokenizer import PADDING_ID, encode, join_documents


@dataclasses.dataclass(frozen=True)
class Sequences:
    """M sequences of ids, each of which ends with `END_ID`.

    Attributes:
        ids: int32, one sequence after the other.
        starts: integers `[M + 1]`; sequence i is `ids[starts[i] : starts[i + 1]]`.
    """

    ids: np.ndarray
    starts: np.ndarray

    @classmethod
    def encode(cls, tokenizer: Tokenizer, texts: Iterable[str]) -> Self:
        """Returns the sequences of M texts."""
        return cls(*join_documents(encode(tokenizer, texts)))

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Integers `[M]`, `END_ID` included."""
        return np.diff(self.starts)

    def pad(self, rows: np.ndarray, width: int) -> np.ndarray:
        """Returns the sequences of these numbers `[...]`, filled up with padding: `[..., width]`.

        A longer sequence is cut off.

        >>> Sequences(np.array([5, 2, 7, 8, 2]), np.array([0, 2, 5])).pad(np.array([0, 1]), 4)
        array([[5, 2, 0, 0],
               [7, 8, 2, 0]])
        """
        columns = np.arange(width)
        is_token = columns < self.lengths[rows][..., None]
        positions = np.where(is_token, self.starts[rows][..., None] + columns, 0)
        return np.where(is_token, self.ids[positions], self.ids.dtype.type(PADDING_ID))
