"""A state of N nodes continues with M nodes, with another topology, or with another algorithm."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gossipjax.algorithms.state import Extra, GossipState, PushSum, gossip_state, message_layout
from gossipjax.checkpoint._leaves import is_key
from gossipjax.collectives import accumulation_dtype, cast_like, require_floats
from gossipjax.spmd import Nodes
from gossipjax.topology.schedule import require_int


class ResizeReport(NamedTuple):
    """Account of `change_nodes`; `str` is a sentence.

    Attributes:
      before, after: numbers of nodes.
      weight: the sum of all push-sum weights before, in flight included: `before`, up to rounding.
      fraction_in_flight: the share of that weight that was in messages; None if messages carry no
        weight (`osgp` with `biased=True`).
      averaged: the paths of the optimizer's arrays that were averaged.
    """

    before: int
    after: int
    weight: float
    fraction_in_flight: float | None
    averaged: tuple[str, ...]

    def __str__(self) -> str:
        fraction = self.fraction_in_flight
        in_flight = "unknown" if fraction is None else f"{fraction:.1%}"
        return (
            f"{self.before} nodes became {self.after}: all start from the average model, of weight "
            f"{self.weight:.6g} ({in_flight} of it in flight), with weight 1 and nothing in "
            f"flight; averaged in the optimizer: {', '.join(self.averaged) or 'nothing'}."
        )


def change_nodes(
    params: optax.Params, opt_state: optax.OptState, tx: optax.GradientTransformation, nodes: int
) -> tuple[optax.Params, optax.OptState, ResizeReport]:
    """Node-stacked state of N nodes, `[N, ...]` -> of M nodes, `[M, ...]`, for the chain `tx`.

    Every new node starts from the average model, messages in flight included, in float64:

        z = sum_i x_i / sum_i w_i

    with weight 1 and nothing in flight. Low-precision parameters keep float32 residuals, what
    rounding the average left over. The count of the gossip stays, so that delays and default steps
    go on; where there was none, it is 0. Each part that one algorithm alone keeps (`extra`) follows
    its rule: the average, the maximum or the first of the old nodes, or as `tx.init` makes it from
    `z`; so does a part that the old state does not have, or has in another shape.

    The rest of the optimizer's state is averaged over the nodes and given to all: momentum, the
    moments of Adam. Integers (step counts) take the maximum over nodes; PRNG keys are those of
    node 0. `tx` may be of another algorithm or topology than the old chain: its arrays outside the
    gossip are matched in their order.

    Args:
      params: `[N, ...]`, the parameters that the user holds: NumPy arrays or JAX's, whole in this
        process.
      opt_state: the state of the whole chain, `[N, ...]`.
      tx: the new chain, built for M nodes.
      nodes: M; N is allowed.

    Returns:
      Parameters and state of `tx`, NumPy arrays `[M, ...]`, and a report.

    Raises:
      ValueError: if the leaves have no common number of nodes; if the state's arrays outside the
        gossip are not those of `tx` (names the first that differs); if a parameter is not
        floating-point, or the chain holds several gossip transforms.

    >>> import jax.numpy as jnp, numpy as np, optax, gossipjax as gx
    >>> from gossipjax.checkpoint import change_nodes
    >>> old = optax.chain(optax.sgd(0.1, momentum=0.9), gx.sgp(gx.topology.ring(2)))
    >>> new = optax.chain(optax.sgd(0.1, momentum=0.9), gx.dpsgd(gx.topology.ring(3)))
    >>> z = jnp.array([1.0, 3.0])
    >>> params, state, report = change_nodes(z, gx.spmd(old.init, nodes=2)(z), new, 3)
    >>> params.tolist(), report.weight
    ([2.0, 2.0, 2.0], 2.0)
    """
    nodes = require_int(nodes, "nodes", 1)
    before = _count_nodes(params, opt_state)
    require_floats(params, "params")
    old = gossip_state(opt_state) or GossipState(np.zeros(before, np.int32))
    model, weight, fraction_in_flight = _average_model(params, old, before)
    new_params = cast_like(model, params)
    template = _init_one(tx, new_params)
    others, averaged = _average_others(opt_state, template)
    leaves, structure = jax.tree.flatten(template, is_leaf=_is_gossip)
    for i, leaf in enumerate(leaves):
        leaves[i] = (
            _resize_gossip(old, leaf, model, new_params) if _is_gossip(leaf) else others.pop(0)
        )
    state = jax.tree.unflatten(structure, leaves)
    report = ResizeReport(before, nodes, weight, fraction_in_flight, averaged)
    return _repeat(new_params, nodes), _repeat(state, nodes), report


def average_nodes(tree: Any, nodes: int) -> Any:
    """Returns the average over N nodes, `[N, ...]`, for each of M, `[M, ...]`: of statistics, say.

    Integers take the maximum, PRNG keys are those of node 0; leaves keep their types.

    >>> average_nodes(np.array([1.0, 3.0]), 3).tolist()
    [2.0, 2.0, 2.0]
    """
    return _repeat(jax.tree.map(_average, tree), nodes)


def _init_one(tx: optax.GradientTransformation, params: optax.Params) -> optax.OptState:
    """The state of one node that starts from `params`, `[...]`."""
    one = Nodes(1)
    stacked = one.spmd(tx.init)(jax.tree.map(lambda x: x[None], params))
    return jax.tree.map(lambda x: x[0], stacked)


def _resize_gossip(old: GossipState, new: GossipState, model: Any, params: Any) -> GossipState:
    """`new`, as `tx.init` makes it from the model, with what survives of `old`."""
    residual = None
    if new.residual is not None:
        rest = jax.tree.map(lambda a, z: a - np.asarray(z, np.float64), model, params)
        residual = cast_like(rest, new.residual)
    extra = new.extra
    if extra is not None:
        old_extra = old.extra or {}
        extra = {name: _resize_extra(old_extra.get(name), part) for name, part in extra.items()}
    return new._replace(count=_average(old.count), residual=residual, extra=extra)


def _resize_extra(old: Extra | None, new: Extra) -> Extra:
    if old is None or new.on_resize == "restart" or not _have_same_shapes(old.value, new.value):
        return new
    rules = {
        "average": _average,
        "max": lambda leaf: np.asarray(leaf).max(axis=0),
        "first": lambda leaf: leaf[0],
    }
    rule = rules[new.on_resize]
    value = jax.tree.map(lambda leaf, like: _cast(rule(leaf), like), old.value, new.value)
    return Extra(value, new.on_resize, new.is_mass)


def _have_same_shapes(stacked: Any, single: Any) -> bool:
    """Whether `[N, ...]` and `[...]` are the same tree; another algorithm's part may not be."""
    leaves, structure = jax.tree.flatten(stacked)
    single_leaves, single_structure = jax.tree.flatten(single)
    return structure == single_structure and all(
        a.shape[1:] == b.shape for a, b in zip(leaves, single_leaves, strict=True)
    )


def _cast(leaf: Any, like: Any) -> Any:
    """The leaf in the type of `like`; PRNG keys, which have no `astype`, as they are."""
    return leaf if leaf.dtype == like.dtype else leaf.astype(like.dtype)


def _repeat(tree: Any, nodes: int) -> Any:
    """`[...]` -> `[M, ...]`: views of one array."""

    def repeat(leaf: Any) -> Any:
        numpy = jnp if is_key(leaf) else np
        return numpy.broadcast_to(leaf, (nodes, *leaf.shape))

    return jax.tree.map(repeat, tree)


def _average(leaf: Any) -> Any:
    """`[N, ...]` -> `[...]`."""
    if is_key(leaf):
        return leaf[0]
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return np.mean(np.asarray(leaf), axis=0, dtype=np.float64).astype(leaf.dtype)
    return np.asarray(leaf).max(axis=0)


def _average_model(params: Any, old: GossipState, nodes: int) -> tuple[Any, float, float | None]:
    """`z` in float64, the sum of the weights, and the share of it that is in flight."""

    def weighted_sum(array: Any, weights: Any) -> np.ndarray:
        return np.tensordot(weights, np.asarray(array, np.float64), 1)

    ones = np.ones(nodes)
    weights = ones if old.weight is None else np.asarray(old.weight, np.float64)
    x = jax.tree.map(lambda a: weighted_sum(a, weights), params)
    if old.residual is not None:
        rest = jax.tree.map(lambda a: weighted_sum(a, weights), old.residual)
        x = jax.tree.map(np.add, x, rest)
    weight = weights.sum()
    fraction: float | None = 0.0
    if old.in_flight is not None:
        buffers = [weighted_sum(buffer, ones) for buffer in old.in_flight.buffers]
        sent = _unpack_messages(buffers, params, old)
        x = jax.tree.map(np.add, x, sent.x)
        weight += sent.weight or 0.0
        fraction = None if sent.weight is None else float(sent.weight / weight)
    return jax.tree.map(lambda a: a / weight, x), float(weight), fraction


def _unpack_messages(buffers: list[np.ndarray], params: Any, old: GossipState) -> PushSum:
    like_one = jax.tree.map(lambda z: np.empty(z.shape[1:], accumulation_dtype(z.dtype)), params)
    first = old._replace(weight=jax.tree.map(lambda w: w[0], old.weight))
    layout = message_layout(like_one, first)
    return PushSum(*layout.unpack(buffers))  # pyright: ignore[reportArgumentType]


def _average_others(opt_state: Any, template: Any) -> tuple[list[Any], tuple[str, ...]]:
    """The arrays outside the gossip, averaged, in the types of the new ones, and their paths."""
    old = _others(opt_state)
    new = _others(template)
    for old_item, new_item in itertools.zip_longest(old, new):
        old_shape = old_item and list(old_item[1].shape[1:])
        new_shape = new_item and list(new_item[1].shape)
        if old_shape != new_shape:
            actual = f"opt_state{old_item[0]}, {old_shape} per node" if old_item else "nothing more"
            expected = f"opt_state{new_item[0]}, {new_shape} per node" if new_item else "no more"
            raise ValueError(
                f"outside the gossip, the old state must have {expected}, as the new optimizer, "
                f"got {actual}: the gossip may change, the optimizer before it must be the same."
            )
    averages = [_average(leaf) for _, leaf in old]
    paths = [path for path, leaf in old if jnp.issubdtype(leaf.dtype, jnp.floating)]
    cast = [_cast(leaf, like) for leaf, (_, like) in zip(averages, new, strict=True)]
    return cast, tuple(paths)


def _others(state: Any) -> list[tuple[str, Any]]:
    """Path and array of every leaf outside the gossip."""
    return [
        (jax.tree_util.keystr(path), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state, is_leaf=_is_gossip)
        if not _is_gossip(leaf)
    ]


def _is_gossip(node: Any) -> bool:
    return isinstance(node, GossipState)


def _count_nodes(params: Any, opt_state: Any) -> int:
    leaves = [
        (f"{name}{jax.tree_util.keystr(path)}", list(leaf.shape[:1]))
        for name, tree in (("params", params), ("opt_state", opt_state))
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]
    if not leaves:
        raise ValueError("params must have at least one array, got none.")
    first_name, first = leaves[0]
    for name, axis in leaves:
        if not axis or axis != first:
            raise ValueError(
                f"all arrays must be node-stacked, [N, ...], with one N, got {axis or 'no axis'} "
                f"for {name} and {first or 'no axis'} for {first_name}."
            )
    return first[0]
