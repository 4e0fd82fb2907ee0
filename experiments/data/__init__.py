"""Data sets, their division over nodes, and the batches of each node."""

from experiments.data.augmentation import RECIPES
from experiments.data.images import Dataset, load
from experiments.data.local import DataError, MissingDataError, RecordError
from experiments.data.records import ImageRecords
from experiments.data.sharding import Division, divide_examples, draw_batches, split_examples

Images = Dataset | ImageRecords

__all__ = [
    "RECIPES",
    "DataError",
    "Dataset",
    "Division",
    "ImageRecords",
    "Images",
    "MissingDataError",
    "RecordError",
    "divide_examples",
    "draw_batches",
    "load",
    "split_examples",
]
