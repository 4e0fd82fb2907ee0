"""Text: pairs of sentences in batches by tokens, of a few shapes; texts packed as tokens."""

from experiments.data.text.buckets import (
    Bucket,
    TokenBatch,
    draw_token_batches,
    extend_widths,
    make_buckets,
)
from experiments.data.text.pairs import Pairs, PairSets, load_pairs, read_pairs
from experiments.data.text.sequences import Sequences

__all__ = [
    "Bucket",
    "PairSets",
    "Pairs",
    "Sequences",
    "TokenBatch",
    "draw_token_batches",
    "extend_widths",
    "load_pairs",
    "make_buckets",
    "read_pairs",
]
