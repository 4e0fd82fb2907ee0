"""Data sets, their division over nodes, and the batches of each node."""

from experiments.data.images import DATASETS, DataError, Dataset, MissingDataError, load
from experiments.data.sharding import draw_batches, split_examples

__all__ = [
    "DATASETS",
    "DataError",
    "Dataset",
    "MissingDataError",
    "draw_batches",
    "load",
    "split_examples",
]
