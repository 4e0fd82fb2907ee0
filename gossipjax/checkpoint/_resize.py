"""A state of N nodes goes on with M nodes, with another topology, or with another algorithm."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gossipjax.buffers import cast_like, require_floats, wide
from gossipjax.leaves import is_key
from gossipjax.schedule import require_whole
from gossipjax.spmd import spmd
from gossipjax.state import GossipState, find_state, message_layout


class Change(NamedTuple):
    """What `change_nodes` did; `str` says it in a sentence.

    Attributes:
      before, after: numbers of nodes.
      weight: the sum of all push-sum weights that were found, in flight included: `before`, up to
        rounding.
      in_flight: the share of that weight that was in messages; None for one that carries no weight
        (`osgp` with `biased=True`).
      averaged: the paths of the optimizer's arrays that were averaged.
    """

    before: int
    after: int
    weight: float
    in_flight: float | None
    averaged: tuple[str, ...]

    def __str__(self) -> str:
        flying = "unknown" if self.in_flight is None else f"{self.in_flight:.1%}"
        return (
            f"{self.before} nodes became {self.after}: all start from the average model, of weight "
            f"{self.weight:.6g} ({flying} of it in flight), with weight 1 and nothing in flight; "
            f"averaged in the optimizer: {', '.join(self.averaged) or 'nothing'}."
        )


def change_nodes(
    params: Any, opt_state: Any, tx: optax.GradientTransformation, nodes: int
) -> tuple[Any, Any, Change]:
    """Node-stacked state of N nodes, `[N, ...]` -> of M nodes, `[M, ...]`, for the chain `tx`.

    Every new node starts from the average model, messages in flight included, in float64:

        z = sum_i x_i / sum_i w_i

    with weight 1, nothing in flight, and ring buffers of older models full of it. Parameters
    narrower than float32 keep float32 numerators, of the average that was not rounded. The center
    of `easgd`, which is in no average, stays what it is; where there was none, it is `z`. The count
    of the gossip stays, so that delays and default steps go on; where there was none, it is 0.

    The rest of the optimizer's state is averaged over the nodes and given to all: momentum, the
    moments of Adam. Of counts, which are equal on all nodes, and other integers it is the largest,
    of PRNG keys that of node 0. `tx` may be of another algorithm or topology than what made the
    state: its arrays outside the gossip are matched in their order.

    Args:
      params: `[N, ...]`, what the user holds: NumPy arrays or JAX's, whole in this process.
      opt_state: the state of the whole chain, `[N, ...]`.
      tx: the new chain, built for M nodes.
      nodes: M; N is allowed.

    Returns:
      Parameters and state of `tx`, NumPy arrays `[M, ...]`, and what was done.

    Raises:
      ValueError: if the leaves have no common number of nodes; if the state's arrays outside the
        gossip are not those of `tx`: names the first that differs; if a parameter is not
        floating-point, or the chain holds several gossip transforms.

    >>> import jax.numpy as jnp, numpy as np, optax, gossipjax as gx
    >>> from gossipjax.resume import change_nodes
    >>> old = optax.chain(optax.sgd(0.1, momentum=0.9), gx.sgp(gx.topology.ring(2)))
    >>> new = optax.chain(optax.sgd(0.1, momentum=0.9), gx.dpsgd(gx.topology.ring(3)))
    >>> z = jnp.array([1.0, 3.0])
    >>> params, state, report = change_nodes(z, gx.spmd(old.init, nodes=2)(z), new, 3)
    >>> params.tolist(), report.weight
    ([2.0, 2.0, 2.0], 2.0)
    """
    nodes, before = require_whole(nodes, "nodes", 1), _number_of_nodes(params, opt_state)
    require_floats(params, "params")
    old = find_state(opt_state) or GossipState(np.zeros(before, np.int32))
    model, weight, in_flight = _average_model(params, old, before)
    held = cast_like(model, params)
    one = spmd(tx.init, nodes=1)(jax.tree.map(lambda x: x[None], held))
    one = jax.tree.map(lambda x: x[0], one)
    others, averaged = _averages(opt_state, one)
    leaves, structure = jax.tree.flatten(one, is_leaf=_is_gossip)
    for i, new in enumerate(leaves):
        if _is_gossip(new):
            center = jax.tree.map(_average, old.center) if _kept(old.center) else model
            leaves[i] = new._replace(
                count=_average(old.count),
                numerator=cast_like(model, new.numerator) if _kept(new.numerator) else (),
                center=cast_like(center, new.center) if _kept(new.center) else (),
            )
        else:
            leaves[i] = others.pop(0)
    state = jax.tree.unflatten(structure, leaves)
    report = Change(before, nodes, weight, in_flight, averaged)
    return _repeat(held, nodes), _repeat(state, nodes), report


def average_nodes(tree: Any, nodes: int) -> Any:
    """The average over N nodes, `[N, ...]`, for each of M, `[M, ...]`: of statistics and the like.

    Of integers the largest, of PRNG keys that of node 0; leaves keep their types.

    >>> average_nodes(np.array([1.0, 3.0]), 3).tolist()
    [2.0, 2.0, 2.0]
    """
    return _repeat(jax.tree.map(_average, tree), nodes)


def _repeat(tree: Any, nodes: int) -> Any:
    """`[...]` -> `[M, ...]`: views of one array."""

    def repeated(leaf: Any) -> Any:
        numpy = jnp if is_key(leaf) else np
        return numpy.broadcast_to(leaf, (nodes, *leaf.shape))

    return jax.tree.map(repeated, tree)


def _average(leaf: Any) -> Any:
    """`[N, ...]` -> `[...]`."""
    if is_key(leaf):
        return leaf[0]
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return np.mean(np.asarray(leaf), axis=0, dtype=np.float64).astype(leaf.dtype)
    return np.asarray(leaf).max(axis=0)


def _average_model(params: Any, old: GossipState, nodes: int) -> tuple[Any, float, float | None]:
    """`z` in float64, the sum of the weights, and the share of it that is in flight."""

    def total(array: Any, weights: Any) -> np.ndarray:
        return np.tensordot(weights, np.asarray(array, np.float64), 1)

    ones = np.ones(nodes)
    own = np.asarray(old.weight, np.float64) if _kept(old.weight) else ones
    if _kept(old.numerator):
        x = jax.tree.map(lambda a: total(a, ones), old.numerator)
    else:
        x = jax.tree.map(lambda a: total(a, own), params)
    weight, sent_weight = own.sum(), 0.0
    if _kept(old.in_flight):
        one = jax.tree.map(lambda z: np.empty(z.shape[1:], wide(z.dtype)), params)
        first = old._replace(weight=jax.tree.map(lambda w: w[0], old.weight))
        layout = message_layout(one, first)
        buffers = [total(buffer, ones) for buffer in old.in_flight.buffers]
        sent_weight, sent = layout.unpack(buffers)  # pyright: ignore[reportArgumentType]
        x = jax.tree.map(np.add, x, sent)
        weight += sent_weight or 0.0
    share = None if sent_weight is None else float(sent_weight / weight)
    return jax.tree.map(lambda a: a / weight, x), float(weight), share


def _averages(opt_state: Any, one: Any) -> tuple[list[Any], tuple[str, ...]]:
    """The arrays beside the gossip, averaged, in the types of the new ones, and their paths."""
    old, new = (
        [
            (jax.tree_util.keystr(path), leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(state, is_leaf=_is_gossip)
            if not _is_gossip(leaf)
        ]
        for state in (opt_state, one)
    )
    for there, here in itertools.zip_longest(old, new):
        shapes = there and list(there[1].shape[1:]), here and list(here[1].shape)
        if shapes[0] != shapes[1]:
            said = [
                f"opt_state{leaf[0]}, {shape} per node" if leaf else "nothing more"
                for leaf, shape in zip((there, here), shapes, strict=True)
            ]
            raise ValueError(
                f"beside the gossip, the old state has {said[0]}, where the new optimizer has "
                f"{said[1]}. The gossip may change, the optimizer before it has to be the same."
            )
    pairs = [(path, _average(leaf), like) for (path, leaf), (_, like) in zip(old, new, strict=True)]
    averaged = (path for path, leaf, _ in pairs if jnp.issubdtype(leaf.dtype, jnp.floating))
    return [
        leaf if leaf.dtype == like.dtype else leaf.astype(like.dtype) for _, leaf, like in pairs
    ], tuple(averaged)


def _kept(field: Any) -> bool:
    return bool(jax.tree.leaves(field))


def _is_gossip(node: Any) -> bool:
    return isinstance(node, GossipState)


def _number_of_nodes(params: Any, opt_state: Any) -> int:
    sizes = {
        f"{what}{jax.tree_util.keystr(path)}": list(leaf.shape[:1])
        for what, tree in (("params", params), ("opt_state", opt_state))
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
    first = next(iter(sizes.values()), [])
    for where, size in sizes.items():
        if not size or size != first:
            raise ValueError(
                f"all arrays are node-stacked, [N, ...]: {where} has {size or 'no axis'} where "
                f"{next(iter(sizes))} has {first or 'none'}."
            )
    if not first:
        raise ValueError("there are no parameters.")
    return first[0]
