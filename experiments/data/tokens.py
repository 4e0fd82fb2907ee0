"""Texts as tokens: packed rows, padded sequences, and batches of few shapes, so of few programs."""

import array
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Self

import numpy as np
from tokenizers import Tokenizer

from experiments.data.local import DataError
from experiments.data.sharding import Shuffle, divide_examples, draw_batches
from experiments.data.tokenizer import END_ID, PADDING_ID, encode

NO_TOKEN = -1
"""Fills up the last row of packed tokens."""
STEPS_AT_ONCE = 1024  # steps whose buckets are drawn together


def join_documents(documents: Iterable[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Writes documents, each `[tokens]`, one after the other, each with `END_ID` at its end.

    Returns ids, int32, and integers `[M + 1]`: document i is `ids[starts[i] : starts[i + 1]]`.

    >>> ids, starts = join_documents([np.array([7, 8, 9]), np.array([5])])
    >>> ids.tolist(), starts.tolist()
    ([7, 8, 9, 2, 5, 2], [0, 4, 6])
    """
    ids = array.array("i")  # grows in place: no object per document, and no copy at the end
    starts = array.array("q", [0])
    for document in documents:
        ids.frombytes(document.astype(np.int32).tobytes())
        ids.append(END_ID)
        starts.append(len(ids))
    return np.asarray(ids, np.int32), np.asarray(starts, np.int64)


def pack(documents: Iterable[np.ndarray], length: int) -> np.ndarray:
    """Writes documents one after the other, each with `END_ID` at its end, into rows of tokens.

    The last of the rows, int32 `[rows, length]`, is filled up with `NO_TOKEN`.

    >>> pack([np.array([7, 8, 9]), np.array([5])], length=4)
    array([[ 7,  8,  9,  2],
           [ 5,  2, -1, -1]], dtype=int32)
    """
    stream, _ = join_documents(documents)
    rows = -(-len(stream) // length)
    filling = (0, rows * length - len(stream))
    return np.pad(stream, filling, constant_values=NO_TOKEN).reshape(rows, length)


@dataclasses.dataclass(frozen=True)
class Sequences:
    """M sequences of ids, each of which ends with `END_ID`."""

    ids: np.ndarray  # int32, one sequence after the other
    starts: np.ndarray  # integers `[M + 1]`; sequence i is `ids[starts[i] : starts[i + 1]]`

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
        """Returns the sequences of these numbers `[...]`, padded or cut off: `[..., width]`.

        >>> Sequences(np.array([5, 2, 7, 8, 2]), np.array([0, 2, 5])).pad(np.array([0, 1]), 4)
        array([[5, 2, 0, 0],
               [7, 8, 2, 0]])
        """
        columns = np.arange(width)
        is_token = columns < self.lengths[rows][..., None]
        positions = np.where(is_token, self.starts[rows][..., None] + columns, 0)
        return np.where(is_token, self.ids[positions], self.ids.dtype.type(PADDING_ID))


class Bucket(NamedTuple):
    """The examples that are padded to one length."""

    width: int  # in tokens
    rows: np.ndarray  # integers: the numbers of the examples

    def rows_per_batch(self, tokens: int, parts: int = 1) -> int:
        """Examples in a batch of this number of tokens, padding included; one a part at least."""
        return parts * max(1, tokens // parts // self.width)


class TokenBatch(NamedTuple):
    """The examples of a step."""

    width: int  # that they are padded to
    rows: np.ndarray  # integers `[N, B]`: row i has the numbers of node i's examples


def make_buckets(lengths: np.ndarray, widths: Sequence[int], nodes: int = 1) -> list[Bucket]:
    """Puts each example into the narrowest bucket that takes it; too long ones are in none.

    A bucket with fewer examples than nodes goes into the next wider one, and if that is the widest,
    it takes the one before.

    `lengths` are integers `[M]`; `widths` rise; each of the nodes needs an example of every bucket.

    >>> [(b.width, b.rows.tolist()) for b in make_buckets(np.array([3, 9, 5, 4]), (4, 8))]
    [(4, [0, 3]), (8, [2])]
    """
    numbers = np.searchsorted(widths, lengths)
    buckets: list[Bucket] = []
    waiting = np.zeros(0, int)
    for number, width in enumerate(widths):
        waiting = np.concatenate([waiting, np.flatnonzero(numbers == number)])
        if len(waiting) >= max(nodes, 1):
            buckets.append(Bucket(width, waiting))
            waiting = waiting[:0]
    if len(waiting) and buckets:
        last = buckets.pop()
        buckets.append(Bucket(int(widths[-1]), np.concatenate([last.rows, waiting])))
    if not buckets:
        raise DataError(
            f"each node must have an example of at most {widths[-1]} tokens, got "
            f"{len(waiting)} for {nodes} nodes: give fewer nodes, or larger --bucket-lengths."
        )
    return buckets


def extend_widths(widths: Sequence[int], lengths: np.ndarray) -> list[int]:
    """Returns the widths, the last one doubled as often as the longest example needs.

    >>> extend_widths([8, 16], np.array([3, 40]))
    [8, 16, 32, 64]
    """
    extended = list(widths)
    while extended[-1] < lengths.max(initial=0):
        extended.append(2 * extended[-1])
    return extended


def draw_token_batches(
    buckets: Sequence[Bucket],
    nodes: int,
    tokens_per_node: int,
    seed: int,
    wanted: Sequence[int] | None = None,
    shuffle: Shuffle = "local",
    parts: int = 1,
) -> Iterator[TokenBatch]:
    """Returns infinite batches, each of one bucket, the same one for all nodes of a step.

    Every bucket is divided over the nodes, and is read in passes as by `draw_batches`. A step's
    bucket is drawn with a probability proportional to the number of batches that the bucket makes,
    so that all examples are expected equally often. With the shuffle "global" each bucket is
    divided anew in every epoch, and an epoch has all batches of all buckets, in a random order.

    Args:
        buckets: of at least `nodes` examples each, as from `make_buckets`.
        tokens_per_node: tokens in a batch of one node, padding included; one example at least.
        wanted: the nodes whose rows are wanted, in this order; None is all nodes.
        parts: of equal numbers of examples, into which each batch can be split.
    """
    per_batch = np.array([bucket.rows_per_batch(tokens_per_node, parts) for bucket in buckets])
    rows = []
    for number, (bucket, size) in enumerate(zip(buckets, per_batch, strict=True)):
        own_seed = _derive_seed(seed, number)
        division = divide_examples(bucket.rows, nodes, None, own_seed, shuffle)
        batches = draw_batches(division, int(size), own_seed, wanted)
        rows.append(map(bucket.rows.__getitem__, batches))
    sizes = np.array([len(bucket.rows) for bucket in buckets])
    order_seed = _derive_seed(seed, len(buckets))
    if shuffle == "global":
        order = _draw_order_of_epochs(sizes, nodes * per_batch, order_seed)
    else:
        batches = sizes / per_batch
        order = _draw_order(batches / batches.sum(), order_seed)
    return (TokenBatch(buckets[number].width, next(rows[number])) for number in order)


def _draw_order(probabilities: np.ndarray, seed: int) -> Iterator[int]:
    rng = np.random.default_rng(seed)
    while True:
        yield from rng.choice(len(probabilities), STEPS_AT_ONCE, p=probabilities).tolist()


def _draw_order_of_epochs(sizes: np.ndarray, per_step: np.ndarray, seed: int) -> Iterator[int]:
    """The bucket of each step; a step takes `per_step` of a bucket's examples, over all nodes."""
    for epoch in itertools.count():
        steps = (epoch + 1) * sizes // per_step - epoch * sizes // per_step
        rng = np.random.default_rng([seed, epoch])
        yield from rng.permutation(np.repeat(np.arange(len(sizes)), steps)).tolist()


def _derive_seed(seed: int, number: int) -> int:
    """Returns a seed for each of several draws: close ones must not give the same numbers."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
