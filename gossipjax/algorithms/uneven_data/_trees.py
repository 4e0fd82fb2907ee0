"""Trees of nodes: checked, and their edges as pairings."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any

import numpy as np


def pair_neighbors(tree: Any) -> np.ndarray:
    """The edges of a tree of nodes `0, ..., N - 1` as K pairings, `[K, N]`.

    In pairing `k`, node `i` is with its neighbour `pairs[k, i]`, or with itself if it has none.
    Each edge is in one of them; K is the largest degree.

    Raises:
      ValueError: if `tree` is not an undirected networkx graph of nodes `0, ..., N - 1`, or not a
        tree: names a cycle, or the parts that no edge connects.

    >>> import networkx
    >>> pair_neighbors(networkx.path_graph(4)).tolist()
    [[1, 0, 3, 2], [0, 2, 1, 3]]
    """
    edges = _read_edges(tree)
    size = len(tree.nodes)
    neighbors: list[list[int]] = [[] for _ in range(size)]
    for u, v in edges:
        neighbors[u].append(v)
        neighbors[v].append(u)
    parts, parents = _span(neighbors)
    _require_no_cycle(edges, parents)
    if len(parts) > 1:
        raise ValueError(
            f"tree must be connected, got {len(parts)} parts, "
            f"{' and '.join(reprlib.repr(part) for part in parts[:2])}: join them by edges."
        )
    pairs = np.tile(np.arange(size), (max(map(len, neighbors)), 1))
    for node in parts[0]:  # parents come first
        parent = parents[node]
        taken = None if parent < 0 else pairs[:, node].tolist().index(parent)
        free = [k for k in range(len(pairs)) if k != taken]
        children = [other for other in neighbors[node] if other != parent]
        for k, child in zip(free, children, strict=False):
            pairs[k, node] = child
            pairs[k, child] = node
    return pairs


def _read_edges(tree: Any) -> list[tuple[int, int]]:
    if not (hasattr(tree, "nodes") and hasattr(tree, "is_directed")):
        raise ValueError(f"tree must be a networkx graph, got {type(tree).__name__}.")
    if tree.is_directed():
        raise ValueError("tree must be undirected, got a directed graph: give its to_undirected().")
    size = len(tree.nodes)
    if not size:
        raise ValueError("tree must have at least one node, got an empty graph.")
    if set(tree.nodes) != set(range(size)):
        raise ValueError(
            f"the nodes of tree must be 0, ..., {size - 1}, got {reprlib.repr(list(tree.nodes))}: "
            "networkx.convert_node_labels_to_integers(tree) numbers them."
        )
    return [(int(u), int(v)) for u, v in tree.edges()]


def _span(neighbors: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[int]]:
    """The connected parts, breadth first, and each node's parent, -1 for the first of a part."""
    unseen = -2
    parents = [unseen] * len(neighbors)
    parts: list[list[int]] = []
    for root in range(len(neighbors)):
        if parents[root] != unseen:
            continue
        parents[root] = -1
        part = [root]
        for node in part:  # grows
            for other in neighbors[node]:
                if parents[other] == unseen:
                    parents[other] = node
                    part.append(other)
        parts.append(part)
    return parts, parents


def _require_no_cycle(edges: Sequence[tuple[int, int]], parents: Sequence[int]) -> None:
    unused = {(child, parent) for child, parent in enumerate(parents) if parent >= 0}
    for u, v in edges:
        if (u, v) in unused or (v, u) in unused:
            unused -= {(u, v), (v, u)}
            continue
        up = _path_to_root(u, parents)
        down = _path_to_root(v, parents)
        shared = next(node for node in up if node in down)
        cycle = [*up[: up.index(shared) + 1], *reversed(down[: down.index(shared)]), u]
        raise ValueError(
            f"tree must have no cycle, got {' - '.join(map(str, cycle))}: leave out one of its "
            "edges, as networkx.minimum_spanning_tree(tree) does."
        )


def _path_to_root(node: int, parents: Sequence[int]) -> list[int]:
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path
