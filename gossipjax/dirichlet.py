"""Splits a labelled training set over nodes so that their classes are uneven. NumPy only."""

from __future__ import annotations

import numpy as np


def dirichlet_split(
    labels: np.ndarray, nodes: int, alpha: float, *, seed: int = 0, min_size: int = 1
) -> list[np.ndarray]:
    """Divides a training set over N nodes, each class in proportions drawn from Dirichlet(alpha).

    The examples of class c are shuffled and cut in proportions

        q_c ~ Dirichlet(alpha, ..., alpha)    over the N nodes

    With a large alpha all nodes get the same classes. With a small alpha few nodes get most of a
    class, and nodes get different numbers of examples, which you can give to `gx.weighted`. Every
    example goes to one node. If a node gets fewer than `min_size` examples, it takes some from the
    node that has most. The same arguments and the same NumPy always give the same division.

    Args:
      labels: integers `[M]`, the class of each example.
      nodes: N.
      alpha: the parameter of the distribution, above 0. Papers use 100 (even), 1, 0.1 and 0.01.
      seed: the seed for the order of the examples and for the proportions.
      min_size: the smallest number of examples of a node, such as its batch size.

    Returns:
      N integer arrays: for each node, the indices of its examples in `labels`.

    Raises:
      ValueError: if alpha is not above 0, `labels` does not have exactly one axis, or there are
        fewer than N `min_size` examples.

    References:
      Hsu, Qi, Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
      Classification", 2019, arXiv:1909.06335. There each node draws the proportions of its classes,
      and all nodes have equally many examples. Here, as in most papers since, each class draws the
      proportions of its nodes.

    >>> import numpy as np, gossipjax as gx
    >>> labels = np.repeat([0, 1, 2], 40)
    >>> parts = gx.dirichlet_split(labels, nodes=3, alpha=0.3, seed=1)
    >>> [np.bincount(labels[part], minlength=3).tolist() for part in parts]
    [[39, 0, 0], [1, 38, 8], [0, 2, 32]]
    """
    if not isinstance(nodes, int | np.integer):
        raise ValueError(f"nodes must be a number, such as nodes.size, got {nodes!r:.60}.")
    if not 0 < alpha < np.inf:
        raise ValueError(f"alpha must be a number above 0, such as 0.1, got {alpha!r}.")
    labels = np.asarray(labels)
    if labels.ndim != 1:
        raise ValueError(f"labels must be integers [M], got shape {list(labels.shape)}.")
    if nodes < 1 or min_size < 0 or len(labels) < nodes * min_size:
        raise ValueError(
            f"{nodes} nodes must have {min_size} examples each at least, got {len(labels)} labels: "
            "give fewer nodes, a smaller min_size or more examples."
        )
    rng = np.random.default_rng(seed)
    parts_by_class: list[list[np.ndarray]] = []
    for label in np.unique(labels):
        examples = rng.permutation(np.flatnonzero(labels == label))
        proportions = rng.dirichlet(np.full(nodes, alpha))
        cuts = np.rint(np.cumsum(proportions)[:-1] * len(examples)).astype(int)
        parts_by_class.append(np.split(examples, cuts))
    parts = [np.concatenate(of_node) for of_node in zip(*parts_by_class, strict=True)]
    for node in range(nodes):
        while len(parts[node]) < min_size:  # move one example from the node that has most
            largest = max(range(nodes), key=lambda other: len(parts[other]))
            moved, parts[largest] = np.split(parts[largest], [1])
            parts[node] = np.append(parts[node], moved)
    return parts
