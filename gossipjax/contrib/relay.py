"""RelaySGD: models travel along a tree, so that every node averages the models of all nodes."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gossipjax.collectives import StepLike, exchange_along
from gossipjax.exchanges.model import add, zeros_like_model
from gossipjax.exchanges.plan import ExchangePlan
from gossipjax.exchanges.state import Extra, GossipState, PushSum, init_state
from gossipjax.exchanges.transform import Combined, gossip_transform
from gossipjax.topology import from_graph
from gossipjax.wire import Wire

Messages = tuple[PushSum, ...]  # one per neighbour


def relay(tree: Any, *, axis_name: str = "nodes") -> optax.GradientTransformationExtraArgs:
    """RelaySGD: nodes relay sums of models along a tree. Put it *last* in a chain.

    If `x` are the parameters, `u` is the update from the chain, and `m_ij` and `c_ij` are the
    message and the count from node i to its neighbour j, all 0 at the start:

        y_i = x_i + u_i
        m_ij <- y_i + sum_{k != j} m_ki;    c_ij <- 1 + sum_{k != j} c_ki
        x_i <- (y_i (N - sum_j c_ji) + sum_j m_ji) / N

    A message relays the messages that arrived one step before; the third line uses the messages of
    this step. So node `i` averages the models of all nodes `j` with the weight `1 / N`, however
    uneven the data: the `y_j` of `d(i, j) - 1` steps ago, if `d` is the distance in the tree. In
    the first steps, a node uses its own model for each model that has not arrived yet. Mixing does
    *not* keep the sum of the `x_i`.

    networkx makes trees: `path_graph(n)` is a chain, `full_rary_tree(2, n)` a binary tree, and
    `star_graph(n - 1)` a star. `gx.mix_batch_stats` mixes by the `schedule` of the state, which is
    the tree with Metropolis weights.

    Args:
      tree: an undirected networkx graph without cycles, with the nodes `0, ..., N - 1`.
      axis_name: as in `gx.sgp`.

    Raises:
      ValueError: if `tree` is not an undirected tree of nodes `0, ..., N - 1`.

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
    size = len(tree.nodes)
    wire = Wire(axis_name)
    plan = ExchangePlan(from_graph(tree, weights="metropolis"), wire=wire, moves_by_zeros=True)

    def init(params: optax.Params) -> GossipState:
        """Returns a message of count 0 from each neighbour: nothing has arrived yet."""
        state = init_state(params, plan, push_sum=True)
        empty = PushSum(jnp.zeros_like(state.weight), zeros_like_model(params))
        messages = tuple(jax.tree.map(jnp.copy, empty) for _ in pairs)
        return state._replace(weight=None, extra={"messages": Extra(messages, "restart")})

    def combine(x: Any, updates: Any, state: GossipState, step: StepLike) -> Combined:
        """Sends sums of models along the tree, and averages this node's model with what arrives."""
        del step  # all edges are used at each step
        y = add(x, updates)
        sent = _relay(y, state.kept("messages"))
        arrived = tuple(
            exchange_along(message, partners, partners != np.arange(size), wire)
            for message, partners in zip(sent, pairs, strict=True)
        )
        # A message is a pair: the number of models in it, and their sum.
        count, total = functools.reduce(optax.tree.add, arrived)

        def average(own: jax.Array, others: jax.Array) -> jax.Array:
            """Returns the mean of N models: `own` stands for each that has not arrived yet."""
            return (own * (size - count).astype(own.dtype) + others) / size

        return Combined(jax.tree.map(average, y, total), state.keep(messages=arrived))

    return gossip_transform("relay", plan, init, combine)


def _relay(y: Any, received: Messages) -> Messages:
    """Returns the next message to each neighbour: `y` plus the messages of all other neighbours."""
    one = PushSum(jnp.ones_like(received[0].weight), y)
    # For neighbour i, `before[i]` sums `y` and the messages before its own, and `behind[i]` those
    # behind its own, because a subtraction of its own from the sum of all would round.
    before = list(itertools.accumulate(received[:-1], optax.tree.add, initial=one))
    behind = list(itertools.accumulate(reversed(received[1:]), optax.tree.add))[::-1]
    return (*map(optax.tree.add, before[:-1], behind), before[-1])


def pair_neighbors(tree: Any) -> np.ndarray:
    """Returns the edges of a tree of nodes `0, ..., N - 1` as K pairings, `[K, N]`.

    In pairing `k`, node `i` is paired with its neighbour `pairs[k, i]`, or with itself if it has
    no partner. Each edge is in one pairing; K is the largest degree.

    >>> import networkx
    >>> pair_neighbors(networkx.path_graph(4)).tolist()
    [[1, 0, 3, 2], [0, 2, 1, 3]]
    """
    size = len(tree.nodes)
    is_numbered = set(tree.nodes) == set(range(size)) and not tree.is_directed()
    reached = [0]
    edges = []
    for node in reached if is_numbered else ():  # breadth first; the list grows
        for other in tree.neighbors(node):
            if other not in reached:
                reached.append(other)
                edges.append((node, other))
    if not is_numbered or len(reached) < size or len(tree.edges) != size - 1:
        raise ValueError(
            f"tree of relay must be an undirected tree of nodes 0, ..., {size - 1}, got {tree}: "
            "see networkx.minimum_spanning_tree and networkx.convert_node_labels_to_integers."
        )
    degrees = [degree for _, degree in tree.degree]
    pairs = np.tile(np.arange(size), (max(*degrees, 1), 1))
    for parent, child in edges:  # a node has no partner yet when its parent takes it
        free = (pairs[:, parent] == parent).argmax()
        pairs[free, parent] = child
        pairs[free, child] = parent
    return pairs
