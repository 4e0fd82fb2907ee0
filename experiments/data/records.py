"""Images that are read from records when a batch needs them: CIFAR-10 and ImageNet.

Threads read, decode and augment ahead of the training step. What is done to an image depends only
on (seed, pass over the node's examples, example), and not on threads, processes, or the step where
a run resumes.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from experiments.data.augmentation import RECIPES
from experiments.data.images import Batch
from experiments.data.local import (
    ImageExample,
    MissingDataError,
    SplitReader,
    decode_image,
    find_folder,
    find_prepared,
    open_splits,
)
from experiments.data.prefetch import LazyBatch, count_cores, map_ahead
from experiments.data.sharding import Division, count_passes, draw_batches

CHUNK = 16  # images that a thread decodes in one go


class ImageRecords:
    """A data set of images that TensorFlow Datasets has prepared in array_record.

    Args:
        name: one of `RECIPES`.
        data_dir: as for `load`.
    """

    def __init__(self, name: str, data_dir: Path | None = None):
        self.name = name
        self._recipe = RECIPES[name]
        folder = find_prepared(name, find_folder(data_dir))
        if folder is None:
            where = find_folder(data_dir)
            raise MissingDataError(
                f"{where} must hold {name} as TensorFlow Datasets prepares it, got no "
                f"{where / name}/VERSION/dataset_info.json: give the folder with --data-dir, or "
                f"run python -m experiments.data prepare {name} --from FOLDER --data-dir {where}, "
                "where FOLDER has the original files."
            )
        # Not decoded by TFDS: `draft` of a JPEG makes a large one small while it is decoded.
        splits = ("train", self._recipe.test_split)
        sources = open_splits(folder, splits, keep_encoded=("image",))
        self.classes: int = sources[0].dataset_info.features["label"].num_classes
        self.shape = (self._recipe.size, self._recipe.size, 3)
        self._train, self._test = (
            SplitReader(source, f"{split} in {folder}")
            for source, split in zip(sources, splits, strict=True)
        )

    @property
    def num_train(self) -> int:
        return len(self._train)

    @property
    def num_test(self) -> int:
        return len(self._test)

    @functools.cached_property
    def train_labels(self) -> np.ndarray:
        """Integers `[M]`; each record is read, which may take long."""
        chunks = _cut(np.arange(self.num_train))
        labels = map_ahead(self._train.read_labels, chunks, ahead=4 * count_cores())
        return np.concatenate(list(labels))

    def standardize(self, images: jax.Array) -> jax.Array:
        mean, std = (
            255 * np.array(values, np.float32).reshape(1, 1, 1, 3)
            for values in (self._recipe.mean, self._recipe.std)
        )
        return (images.astype(jnp.float32) - mean) / std

    def batches(
        self,
        division: Division,
        batch_size_per_node: int,
        seed: int,
        nodes: Sequence[int],
        start: int,
    ) -> Iterator[Batch]:
        rows = draw_batches(division, batch_size_per_node, seed, nodes)  # raises here, not later
        batches = itertools.islice(rows, start, None)
        shape = (len(nodes), batch_size_per_node)
        chunks = (
            chunk
            for number, row in enumerate(batches, start)
            for chunk in _cut(
                np.stack([row, count_passes(division, number, batch_size_per_node, nodes)])
            )
        )
        decode = functools.partial(self._decode_train, seed)
        return (
            (images.reshape(*shape, *self.shape), labels.reshape(shape))
            for images, labels in _decode_batches(decode, chunks, math.prod(shape))
        )

    def test_batches(self) -> Iterator[LazyBatch]:
        """Yields the test set: images `[E, H, W, C]` and int32 labels `[E]`."""
        for start in range(0, self.num_test, self._recipe.test_batch_size):
            size = min(self._recipe.test_batch_size, self.num_test - start)
            yield LazyBatch(size, functools.partial(self._read_test, start))

    def _read_test(self, start: int, rows: np.ndarray) -> Batch:
        chunks = iter(_cut(start + rows.ravel()))
        ((images, labels),) = _decode_batches(self._decode_test, chunks, rows.size)
        return images.reshape(*rows.shape, *self.shape), labels.reshape(rows.shape)

    def _decode_test(self, examples: np.ndarray) -> list[ImageExample]:
        decode = functools.partial(decode_image, self._recipe.crop)
        return [self._test.read(index, decode) for index in examples.tolist()]

    def _decode_train(self, seed: int, chunk: np.ndarray) -> list[ImageExample]:
        examples = []
        for index, number in zip(*chunk.tolist(), strict=True):
            # By example and pass, so that neither threads nor a resumed run change an image.
            rng = np.random.default_rng((seed, number, index))
            crop = functools.partial(self._recipe.augment, rng=rng)
            examples.append(self._train.read(index, functools.partial(decode_image, crop)))
        return examples


def _cut(indices: np.ndarray) -> list[np.ndarray]:
    """Cuts `[2, n, B]` or `[E]` into parts `[2, c]` or `[c]` of at most `CHUNK` examples."""
    flat = indices.reshape(2, -1) if indices.ndim == 3 else indices
    return np.split(flat, range(CHUNK, flat.shape[-1], CHUNK), axis=-1)


def _decode_batches(
    decode: Callable[[np.ndarray], list[ImageExample]], chunks: Iterator[np.ndarray], size: int
) -> Iterator[Batch]:
    """Joins the examples of the chunks to batches; the batch after the next is worked on, too."""
    per_batch = math.ceil(size / CHUNK)
    decoded = map_ahead(decode, chunks, ahead=per_batch + 2 * count_cores())
    while parts := list(itertools.islice(decoded, per_batch)):
        if examples := list(itertools.chain.from_iterable(parts)):
            images, labels = zip(*examples, strict=True)
            yield np.stack(images), np.array(labels, np.int32)
