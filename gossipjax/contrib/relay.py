"""RelaySGD: models travel along a tree, so that every node averages those of all."""

from __future__ import annotations

import functools
import itertools
import reprlib
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gossipjax.algorithms import frame
from gossipjax.collectives import StepLike, at_round, exchange_in_pairs
from gossipjax.topology import from_graph
from gossipjax.wire import Wire

Missing = Literal["own", "initial"]
Messages = tuple[frame.PushSum, ...]  # one per neighbour


def relay(
    tree: Any,
    axis_name: str = "nodes",
    local_axis_name: str | None = None,
    missing: Missing = "own",
) -> optax.GradientTransformationExtraArgs:
    """RelaySGD: sums of models are relayed along a tree. Goes *last* in a chain.

    With `x` the parameters, `[...]` per node, `u` the update from the chain before it, and `m_ij`,
    `c_ij` the message and count from node i to its neighbour j, all 0 at the start:

        y_i = x_i + u_i
        m_ij <- y_i + sum_{k != j} m_ki;    c_ij <- 1 + sum_{k != j} c_ki
        x_i <- (y_i (N - sum_j c_ji) + sum_j m_ji) / N

    A message relays what arrived one step before; the last line uses those of this step. So node
    `i` averages the model of every node `j`, `y_j` of `d(i, j) - 1` steps ago, each by `1 / N`,
    however uneven the data. Models that have not arrived yet, in the first steps, are replaced by
    its own, as above; in the authors' released code by its initial model, `missing="initial"`:

        x_i <- (y_i + sum_j m_ji + (N - 1 - sum_j c_ji) x_0) / N

    Trees come from networkx: `path_graph(n)` is a chain, `full_rary_tree(2, n)` a binary tree,
    `star_graph(n - 1)` a star. A node sends as many models per step as it has neighbours.

    Mixing does *not* keep the sum of the `x_i`: a model counts at a node only once it has arrived.
    `gx.average_model` is the mean of the `x_i`, without messages. The state is a `GossipState` with
    `extra["messages"]`, a pair of count and model per neighbour (K of them, the largest degree);
    on a change of nodes they start anew, and with `missing="initial"` so does `extra["initial"]`,
    a copy of the model. There are no narrow messages: what rounding takes off a sum of models would
    be lost for all nodes behind it. The `schedule` of the state, by which `gx.mix_batch_stats`
    mixes, is that of the tree with Metropolis weights.

    Args:
      tree: an undirected networkx graph without cycles, of nodes `0, ..., N - 1`.
      axis_name, local_axis_name: as in `gx.sgp`; no result depends on `step=` of `update`.
      missing: "own" or "initial", the model in the place of those that have not arrived.

    Raises:
      ValueError: if `tree` is not an undirected tree of nodes `0, ..., N - 1`; else as `gx.sgp`.

    References:
      Vogels, He, Koloskova, Lin, Karimireddy, Stich, Jaggi, "RelaySum for Decentralized Deep
      Learning on Heterogeneous Data", NeurIPS 2021, arXiv:2110.04175, algorithm 1.

    >>> import jax, jax.numpy as jnp, networkx, gossipjax as gx
    >>> tx = gx.contrib.relay(networkx.path_graph(3))
    >>> def run(x, goal):
    ...     state = tx.init(x)
    ...     for step in range(2):  # the diameter; y is the goal at every step
    ...         updates, state = tx.update(goal - x, state, x, step=step)
    ...         x = x + updates
    ...     return x
    >>> jax.vmap(run, axis_name="nodes")(jnp.zeros(3), jnp.array([0.0, 3.0, 6.0])).tolist()
    [3.0, 3.0, 3.0]
    """
    pairs = pair_neighbors(tree)
    frame.require_choice(missing, "missing of relay", get_args(Missing))
    wire = frame.make_route("relay", axis_name, local_axis_name)
    plan = frame.ExchangePlan(from_graph(tree, "metropolis"), wire=wire, moves_by_zeros=True)

    def init(params: optax.Params) -> frame.GossipState:
        state = frame.init_state(params, plan, push_sum=True)
        nothing = frame.PushSum(jnp.zeros_like(state.weight), frame.zeros_like_model(params))
        messages = tuple(jax.tree.map(jnp.copy, nothing) for _ in pairs)
        extra = {"messages": frame.Extra(messages, "restart")}
        if missing == "initial":
            extra["initial"] = frame.Extra(frame.common_model(params, None), "restart")
        return state._replace(weight=None, extra=extra)

    def combine(x: Any, updates: Any, state: frame.GossipState, step: StepLike) -> frame.Combined:
        assert plan.schedule is not None
        y = frame.add(x, updates)
        sent = _relay(y, state.kept("messages"))
        exchange = functools.partial(_exchange, pairs, plan.wire)
        new = at_round(lambda _, sent: exchange(sent), plan.schedule, step, axis_name, sent)
        others = state.kept("initial") if missing == "initial" else y
        x = _average(y, new, others, plan.schedule.size)
        return frame.Combined(x, state.keep(messages=new))

    return frame.gossip_transform("relay", plan, init, combine)


def _sum(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.add, a, b)


def _relay(y: Any, received: Messages) -> Messages:
    """For every neighbour, this node's model and what arrived from all others."""
    if not received:
        return ()
    one = frame.PushSum(jnp.ones_like(received[0].weight), y)
    # Sums of those before and of those behind: what is left out is not subtracted, which rounds.
    before = list(itertools.accumulate(received[:-1], _sum, initial=one))
    behind = list(itertools.accumulate(reversed(received[1:]), _sum))[::-1]
    return (*map(_sum, before[:-1], behind), before[-1])


def _exchange(pairs: np.ndarray, wire: Wire, sent: Messages) -> Messages:
    """Returns the message of each neighbour; zeros for a missing one."""
    messages = zip(sent, pairs, strict=True)
    return tuple(exchange_in_pairs(message, partners, wire) for message, partners in messages)


def _average(y: Any, received: Messages, others: Any, nodes: int) -> Any:
    """The mean of the models that have arrived, with `others` for each that has not."""
    if not received:
        return y
    count, total = functools.reduce(_sum, received)

    def average(own: jax.Array, arrived: jax.Array, other: jax.Array) -> jax.Array:
        return (own + arrived + (nodes - 1 - count).astype(own.dtype) * other) / nodes

    return jax.tree.map(average, y, total, others)


def pair_neighbors(tree: Any) -> np.ndarray:
    """The edges of a tree of nodes `0, ..., N - 1` as K pairings, `[K, N]`.

    In pairing `k`, node `i` is with its neighbour `pairs[k, i]`, or with itself if it has none.
    Each edge is in one of them; K is the largest degree.

    Raises:
      ValueError: if `tree` is not an undirected networkx graph of nodes `0, ..., N - 1` or not a
        tree.

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
    parents = {0: -1}
    order = [0]
    for node in order:  # breadth first; the list grows
        for other in neighbors[node]:
            if other not in parents:
                parents[other] = node
                order.append(other)
    if len(order) < size:
        rest = [node for node in range(size) if node not in parents]
        raise ValueError(
            f"tree must be connected, got no path from {reprlib.repr(sorted(order))} to "
            f"{reprlib.repr(rest)}: join them by edges."
        )
    if len(edges) >= size:
        raise ValueError(
            f"tree must have no cycle, got {len(edges)} edges of {size} nodes: leave some out, as "
            "networkx.minimum_spanning_tree(tree) does."
        )
    pairs = np.tile(np.arange(size), (max(map(len, neighbors)), 1))
    for node in order:  # parents come first
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
