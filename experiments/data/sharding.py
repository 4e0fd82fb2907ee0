"""The division of a training set over the nodes, and the order in which each node reads it."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from experiments.data.local import DataError


def split_examples(
    labels: np.ndarray, nodes: int, dirichlet_alpha: float | None, seed: int
) -> list[np.ndarray]:
    """Divides a training set over nodes; every example goes to exactly one node.

    Args:
        labels: integers `[M]`, the class of each example.
        dirichlet_alpha: None shuffles, and sizes differ by at most one. With a number alpha > 0 the
            shuffled examples of class c are cut in proportions `q_c ~ Dirichlet(alpha, ..., alpha)`
            over the N nodes: a small alpha gives each node few classes and a different number of
            examples. A node without examples takes one from the node that has most.

    Returns:
        N integer arrays: the indices of each node's examples, at least one each.

    Raises:
        DataError: if there are fewer examples than nodes, or alpha is not positive and finite.

    >>> [len(shard) for shard in split_examples(np.arange(10) % 2, 4, None, seed=0)]
    [3, 3, 2, 2]

    References:
        Hsu et al., "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
        Classification", 2019, arXiv:1909.06335.
    """
    if not 1 <= nodes <= len(labels):
        raise DataError(
            f"{len(labels)} examples cannot be divided over {nodes} nodes: give 1 to "
            f"{len(labels)} nodes."
        )
    rng = np.random.default_rng(seed)
    if dirichlet_alpha is None:
        return np.array_split(rng.permutation(len(labels)), nodes)
    if not 0 < dirichlet_alpha < math.inf:
        raise DataError(
            f"dirichlet_alpha must be positive and finite, got {dirichlet_alpha}; None divides "
            "evenly."
        )
    parts_by_class: list[list[np.ndarray]] = []
    for label in np.unique(labels):
        examples = rng.permutation(np.flatnonzero(labels == label))
        proportions = rng.dirichlet(np.full(nodes, dirichlet_alpha))
        cuts = np.rint(np.cumsum(proportions)[:-1] * len(examples)).astype(int)
        parts_by_class.append(np.split(examples, cuts))
    shards = [np.concatenate(parts) for parts in zip(*parts_by_class, strict=True)]
    for node in range(nodes):
        if not len(shards[node]):
            largest = max(range(nodes), key=lambda other: len(shards[other]))
            shards[node], shards[largest] = np.split(shards[largest], [1])
    return shards


def draw_batches(
    shards: Sequence[np.ndarray],
    batch_size_per_node: int,
    seed: int,
    nodes: Sequence[int] | None = None,
) -> Iterator[np.ndarray]:
    """Returns infinite batches: integers `[N, B]`, row i the indices of node i's next B examples.

    Each node reads its shard in passes, each pass in a new random order. A batch may continue into
    the next pass, so a shard may be smaller than a batch. The same arguments give the same batches.

    `nodes` are those whose rows are wanted, in this order; None is all nodes.

    Raises:
        DataError: if a batch has less than one example, or a node has no examples.

    >>> next(draw_batches([np.array([7]), np.array([3])], 2, seed=0)).tolist()
    [[7, 7], [3, 3]]
    """
    if batch_size_per_node < 1:
        raise DataError(f"batch_size_per_node must be >= 1, got {batch_size_per_node}.")
    empty = [node for node, shard in enumerate(shards) if not len(shard)]
    if empty:
        raise DataError(f"node {empty[0]} has no examples: give every node at least one.")
    seeds = np.random.SeedSequence(seed).spawn(len(shards))
    wanted = range(len(shards)) if nodes is None else nodes
    rows = [_draw_node_batches(shards[node], batch_size_per_node, seeds[node]) for node in wanted]
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
