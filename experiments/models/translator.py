"""Texts to texts: a translation model with its tokenizer."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from experiments.data.tokens import Sequences, extend_widths, make_buckets
from experiments.models.seq2seq import Seq2Seq, translate


class Translator:
    """Translates texts by beam search, those of similar length together.

    Args:
        model: the model.
        tokenizer: that of its sources and targets.
        widths: lengths that sources are padded to; twice the last, and so on, for longer ones. A
            program is compiled for each that is needed.
        tokens: of the sources that are translated together, padding included.
        beam: number of hypotheses.
        alpha: exponent of the length penalty.
    """

    def __init__(
        self,
        model: Seq2Seq,
        tokenizer: Tokenizer,
        widths: Sequence[int],
        tokens: int,
        beam: int = 4,
        alpha: float = 0.6,
    ):
        self._model = model
        self._tokenizer = tokenizer
        self._widths = widths
        self._tokens = tokens
        self._beam = beam
        self._alpha = alpha

    def translate(self, variables: Any, texts: Sequence[str]) -> list[str]:
        """Returns the translation of each text.

        Args:
            variables: those of the model, `{"params": ...}`.
            texts: the sources.
        """
        sources = Sequences.encode(self._tokenizer, texts)
        translations = [""] * len(texts)
        for bucket in make_buckets(sources.lengths, extend_widths(self._widths, sources.lengths)):
            size = bucket.rows_per_batch(self._tokens)
            for start in range(0, len(bucket.rows), size):
                rows = bucket.rows[start : start + size]
                # Of one shape: the last rows are repeated, and their translations left out.
                padded = sources.pad(np.resize(rows, size), bucket.width)
                found = translate(
                    self._model, variables, padded, beam=self._beam, alpha=self._alpha
                )
                for row, ids in zip(rows, np.asarray(found.tokens)[: len(rows)], strict=True):
                    translations[row] = self._tokenizer.decode(ids.tolist())
        return translations
