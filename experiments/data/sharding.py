"""The division of a training set over the nodes, and the order in which each node reads it."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

import gossipjax as gx
from experiments.data.local import DataError

Shuffle = Literal["local", "global"]


@dataclasses.dataclass(frozen=True)
class GlobalShuffle:
    """A training set that is shuffled and divided over the nodes anew in every epoch.

    All nodes together read one random order of the examples after another: node i of N has
    examples `i * B` to `(i + 1) * B - 1` of the N * B of a step. A step may end one epoch and begin
    the next.
    """

    num_examples: int  # M, as many make an epoch
    nodes: int  # N

    def __post_init__(self) -> None:
        _require_enough(self.num_examples, self.nodes)


Division = Sequence[np.ndarray] | GlobalShuffle
"""The examples of every node, integers; or what gives it others in every epoch."""


def divide_examples(
    labels: np.ndarray, nodes: int, dirichlet_alpha: float | None, seed: int, shuffle: Shuffle
) -> Division:
    """Divides a training set over nodes: once, by `split_examples`, or anew in every epoch."""
    if shuffle == "local":
        return split_examples(labels, nodes, dirichlet_alpha, seed)
    return GlobalShuffle(len(labels), nodes)


def _require_enough(examples: int, nodes: int) -> None:
    if not 1 <= nodes <= examples:
        raise DataError(
            f"{examples} examples cannot be divided over {nodes} nodes: give 1 to {examples} nodes."
        )


def split_examples(
    labels: np.ndarray, nodes: int, dirichlet_alpha: float | None, seed: int
) -> list[np.ndarray]:
    """Divides a training set over nodes; returns the indices of each node's examples.

    Without `dirichlet_alpha` they are shuffled, and sizes differ by at most one. With a small one
    each node has few classes, of the `labels` `[M]` (`gx.dirichlet_split`).

    >>> [len(shard) for shard in split_examples(np.arange(10) % 2, 4, None, seed=0)]
    [3, 3, 2, 2]
    """
    _require_enough(len(labels), nodes)
    if dirichlet_alpha is not None:
        return gx.dirichlet_split(labels, nodes, dirichlet_alpha, seed=seed)
    rng = np.random.default_rng(seed)
    return np.array_split(rng.permutation(len(labels)), nodes)


def draw_batches(
    division: Division,
    batch_size_per_node: int,
    seed: int,
    nodes: Sequence[int] | None = None,
) -> Iterator[np.ndarray]:
    """Returns infinite batches: integers `[N, B]`, row i the indices of node i's next B examples.

    Each node reads its shard in passes, each in a new random order, or its part of a
    `GlobalShuffle`. A batch may continue into the next pass. `nodes` are those whose rows are
    wanted, in this order; None is all nodes.

    >>> next(draw_batches([np.array([7]), np.array([3])], 2, seed=0)).tolist()
    [[7, 7], [3, 3]]
    >>> np.sort(next(draw_batches(GlobalShuffle(6, nodes=2), 3, seed=0)), axis=None).tolist()
    [0, 1, 2, 3, 4, 5]
    """
    if isinstance(division, GlobalShuffle):
        wanted = range(division.nodes) if nodes is None else nodes
        return _draw_globally(division, batch_size_per_node, seed, list(wanted))
    # A seed for each node: its batches do not depend on which nodes a process asks for.
    seeds = np.random.SeedSequence(seed).spawn(len(division))
    wanted = range(len(division)) if nodes is None else nodes
    rows = [_draw_node_batches(division[node], batch_size_per_node, seeds[node]) for node in wanted]
    return map(np.stack, zip(*rows, strict=True))


def _draw_node_batches(
    shard: np.ndarray, size: int, seed: np.random.SeedSequence
) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(seed)
    passes = np.tile(shard, (math.ceil(size / len(shard)), 1))
    queue = shard[:0]
    while True:
        if len(queue) < size:
            queue = np.concatenate([queue, rng.permuted(passes, axis=1).ravel()])
        yield queue[:size]
        queue = queue[size:]


def _draw_globally(
    division: GlobalShuffle, size: int, seed: int, wanted: list[int]
) -> Iterator[np.ndarray]:
    per_step = division.nodes * size
    queue = np.zeros(0, int)
    for epoch in itertools.count():
        order = np.random.default_rng([seed, epoch]).permutation(division.num_examples)
        queue = np.concatenate([queue, order])
        while len(queue) >= per_step:
            yield queue[:per_step].reshape(division.nodes, size)[wanted]
            queue = queue[per_step:]


def count_passes(division: Division, batch: int, size: int, nodes: Sequence[int]) -> np.ndarray:
    """Returns the pass or epoch, from 0, that each example of a batch of these n nodes is of.

    Integers `[n, B]`, for batch number `batch` of size B = `size` of `draw_batches`.

    >>> count_passes([np.arange(3), np.arange(6)], 1, 4, nodes=[0, 1]).tolist()
    [[1, 1, 2, 2], [0, 0, 1, 1]]
    >>> count_passes(GlobalShuffle(6, nodes=2), 1, 2, nodes=[0, 1]).tolist()
    [[0, 0], [1, 1]]
    """
    if isinstance(division, GlobalShuffle):
        firsts = (batch * division.nodes + np.array(nodes)) * size
        return (firsts[:, np.newaxis] + np.arange(size)) // division.num_examples
    sizes = np.array([len(division[node]) for node in nodes])
    return (batch * size + np.arange(size)) // sizes[:, np.newaxis]
