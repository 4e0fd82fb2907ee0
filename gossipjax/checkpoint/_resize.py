"""Turns the state of N nodes into the state of M nodes, or of another algorithm."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gossipjax import meshes
from gossipjax.checkpoint._leaves import arrange_like, unwrap
from gossipjax.collectives import cast_like, require_floats
from gossipjax.exchanges.chain import gossip_state
from gossipjax.exchanges.mask import gossiped, merge_gossiped
from gossipjax.exchanges.state import Exchanging, Extra, GossipState
from gossipjax.nodes import Nodes
from gossipjax.processes import is_key
from gossipjax.topology.schedule import require_int

# Part of names in a path that mean keys: `rng_key`, `dropout_key`, `rngs`.
KEY_NAME = re.compile(r"(^|_)(p?rngs?|keys?)(_|\d*$)", re.IGNORECASE)
IMPLEMENTATIONS = {2: "threefry2x32", 4: "rbg"}  # by the number of words of a raw key


class ResizeReport(NamedTuple):
    """Says what `change_nodes` did; `str` makes a sentence of it.

    Attributes:
      before, after: the old and the new number of nodes.
      weight: the sum of the old push-sum weights and of those in flight. Up to rounding it is
        `before`.

    >>> print(ResizeReport(before=4, after=3, weight=4.0))
    4 nodes became 3: all start from the average model, of weight 4.
    """

    before: int
    after: int
    weight: float

    def __str__(self) -> str:
        return (
            f"{self.before} nodes became {self.after}: all start from the average model, of weight "
            f"{self.weight:.6g}."
        )


@meshes.apart_from_set_mesh
def change_nodes(
    params: optax.Params, opt_state: optax.OptState, tx: optax.GradientTransformation, nodes: int
) -> tuple[optax.Params, optax.OptState, ResizeReport]:
    """Turns the state of N nodes, `[N, ...]`, into the state of M nodes, `[M, ...]`, for `tx`.

    Every new node starts from the average model, computed in float64 with the messages in flight,
    with weight 1 and nothing in flight:

        z = sum_i x_i / sum_i w_i

    Low-precision parameters keep in float32 residuals what rounding `z` left over. The count of the
    gossip goes on; a chain that had no gossip starts at 0. Parts that only one algorithm keeps
    (`extra`) follow their rules: the average, the maximum or the first of the old nodes, or what
    `tx.init` makes from `z`, as for parts that the old state does not have in this shape.
    Parameters that do not gossip (`optax.masked`, `optax.multi_transform`) are averaged without
    weights.

    All new nodes get the average of the rest of the optimizer's state (momentum, the moments of
    Adam) and the maximum of integers (step counts). `tx` may use another algorithm or topology than
    the old chain. The arrays outside the gossip are matched by their order.

    For each PRNG key, node j gets `jax.random.fold_in(key, j)` of node 0's key. A uint32 array
    `[..., 2]` or `[..., 4]` counts as raw keys if its path has a name with `key` or `rng` in it.
    After the resize, a part of `extra` whose rule is `"first"` is the same on all nodes, with its
    PRNG keys; all other keys differ between nodes.

    Args:
      params: the parameters `[N, ...]`, NumPy arrays or JAX's, with all nodes in this process.
      opt_state: the state of the whole chain, `[N, ...]`.
      tx: the new chain, built for M nodes.
      nodes: M, the new number of nodes, which may equal N.

    Returns:
      Parameters and state of `tx`, NumPy arrays `[M, ...]`, and a `ResizeReport`.

    Raises:
      ValueError: if the leaves have no common number of nodes, the schedule of `tx` is not for M
        nodes, or the optimizers of `tx` and of the old chain differ.

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
    params, opt_state = meshes.on_auto_axes((params, opt_state))
    before = _count_nodes({"params": params, "opt_state": opt_state})
    old = gossip_state(opt_state) or GossipState(np.zeros(before, np.int32))
    model, weight = _average_model(params, old, before)
    new_params = cast_like(model, params)
    stacked = Nodes(1).spmd(tx.init)(jax.tree.map(lambda x: x[None], new_params))
    template = jax.tree.map(lambda x: x[0], stacked)
    new = gossip_state(template)
    if new is not None and new.schedule is not None and new.schedule.size != nodes:
        raise ValueError(
            f"nodes must be those of the schedule of tx, {new.schedule.size}, got {nodes}: build "
            f"tx with a schedule for {nodes} nodes."
        )
    averages = _average_outside_gossip(_weigh_models(opt_state, old), template)

    # Fills the state that `tx.init` made with old values. The gossip may be at another position in
    # the new chain, and all other arrays have the same order.
    def resize(part: Any) -> Any:
        return _resize_gossip(old, part, model, new_params) if _is_gossip(part) else next(averages)

    state = jax.tree.map(resize, template, is_leaf=_is_gossip)
    return _repeat(new_params, nodes), _repeat(state, nodes), ResizeReport(before, nodes, weight)


@meshes.apart_from_set_mesh
def average_nodes(tree: Any, nodes: int) -> Any:
    """Averages arrays (of statistics, say) over N nodes, `[N, ...]`, for M nodes, `[M, ...]`.

    Integers take the maximum. PRNG keys are made from the keys of node 0, as in `change_nodes`.
    Leaves keep their types.

    Raises:
      ValueError: if `nodes` is not an integer >= 1, or the leaves have no common number of nodes.

    >>> average_nodes(np.array([1.0, 3.0]), 3).tolist()
    [2.0, 2.0, 2.0]
    """
    nodes = require_int(nodes, "nodes", 1)
    if jax.tree.leaves(tree):
        _count_nodes({"tree": tree})
    return _repeat(jax.tree.map_with_path(_average_leaf, meshes.on_auto_axes(tree)), nodes)


def _resize_gossip(old: GossipState, new: GossipState, model: Any, params: Any) -> GossipState:
    """Returns the state `new`, which `tx.init` made from the model, with what is kept of `old`.

    That is the count, and the parts of `extra` whose rule is not "restart". `model` is in float64,
    and `params` is `model` rounded to its own types: the residual is their difference.
    """
    residual = None
    if new.residual is not None:
        parts = gossiped(model, new), gossiped(params, new)
        left_over = jax.tree.map(lambda z, x: np.subtract(z, x, dtype=np.float64), *parts)
        residual = cast_like(left_over, new.residual)
    old_extra = old.extra or {}
    new_extra = new.extra or {}
    extra = {name: _resize_extra(old_extra.get(name), part) for name, part in new_extra.items()}
    count = np.asarray(old.count).max(axis=0)
    return new._replace(count=count, residual=residual, extra=extra or new.extra)


def _resize_extra(old: Extra | None, new: Extra) -> Extra:
    """Applies the rule of a part of `extra` to its old values; returns `new` if there are none."""
    if old is None or new.on_resize == "restart":
        return new
    # A part of this name in another algorithm may have another shape, after the axis of old nodes.
    forms = [
        [jax.tree.structure(unwrap(tree)), *(x.shape[leading:] for x in jax.tree.leaves(tree))]
        for tree, leading in ((old.value, 1), (new.value, 0))
    ]
    if forms[0] != forms[1]:
        return new
    value = arrange_like(new.value, old.value)
    value = jax.tree_util.tree_map_with_path(ON_RESIZE[new.on_resize], value)
    return Extra(jax.tree.map(_cast, value, new.value), new.on_resize, new.is_mass)


def _cast(leaf: Any, like: Any) -> Any:
    """Casts a leaf to the type of `like`; returns PRNG keys, which have no `astype`, unchanged."""
    return leaf if leaf.dtype == like.dtype else leaf.astype(like.dtype)


def _repeat(tree: Any, nodes: int) -> Any:
    """Repeats the state of one node, `[...]`, for M nodes, `[M, ...]`, as views if it can.

    Only PRNG keys differ between the nodes: a node's number is folded into each. In an `Extra` of
    the rule "first", all nodes share them.
    """

    def is_shared(part: Any) -> bool:
        return isinstance(part, Extra) and part.on_resize == "first"

    def broadcast(leaf: Any) -> Any:
        library = jnp if is_key(leaf) else np  # NumPy has no keys
        return library.broadcast_to(leaf, (nodes, *leaf.shape))

    def repeat(path: Any, part: Any) -> Any:
        if is_shared(part):
            return jax.tree.map(broadcast, part)
        return _fold_in_nodes(part, nodes) if _holds_keys(path, part, 0) else broadcast(part)

    return jax.tree_util.tree_map_with_path(repeat, tree, is_leaf=is_shared)


def _average_leaf(path: Any, leaf: Any) -> Any:
    """Returns the mean of floats `[N, ...]` over nodes, the maximum of integers, node 0's keys."""
    if _holds_keys(path, leaf, 1):
        return leaf[0]
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return np.mean(np.asarray(leaf), axis=0, dtype=np.float64).astype(leaf.dtype)
    return np.asarray(leaf).max(axis=0)


# Rule of a part of `extra` -> the function of its path and array `[N, ...]` that applies it. By the
# rule "restart", which is not here, a part takes the value that `tx.init` makes.
ON_RESIZE: dict[str, Callable[[Any, Any], Any]] = {
    "average": _average_leaf,
    "max": lambda path, leaf: np.asarray(leaf).max(axis=0),
    "first": lambda path, leaf: leaf[0],
}


def _average_model(params: Any, old: GossipState, nodes: int) -> tuple[Any, float]:
    """Returns the model `z` in float64 and the sum of the weights, with all that is in flight.

    Parameters and residuals are de-biased, so each counts with the weight of its node. Messages in
    flight are numerators, which contain their weight already, so each counts once.
    """
    gossiped_params = gossiped(params, old)
    require_floats(gossiped_params, "params")
    weights = np.ones(nodes) if old.weight is None else np.asarray(old.weight, np.float64)
    x = jax.tree.map(lambda leaf: _weighted_sum(leaf, weights), gossiped_params)
    if old.residual is not None:
        residual = arrange_like(x, old.residual)  # nnx.Optimizer has put its arrays in Variables
        x = jax.tree.map(lambda a, b: a + _weighted_sum(b, weights), x, residual)
    weight = weights.sum()
    if old.in_flight is not None:
        sent = jax.tree.map(lambda leaf: _weighted_sum(leaf, np.ones(nodes)), old.in_flight)
        x = jax.tree.map(np.add, x, arrange_like(x, sent.x))
        weight += 0.0 if sent.weight is None else sent.weight
    model = jax.tree.map(lambda a: a / weight, x)
    # Parameters outside the mask have no weights, so their mean is the plain mean.
    means = params if old.mask is None else jax.tree.map_with_path(_average_leaf, params)
    return merge_gossiped(means, model, old), float(weight)


def _weigh_models(opt_state: Any, old: GossipState) -> Any:
    """Multiplies the models that states keep (an anchor, say) by the push-sum weights of nodes.

    The weights are divided by their mean. So the plain mean of the products is the weighted mean.
    """
    if old.weight is None:
        return opt_state
    weights = np.asarray(old.weight, np.float64)

    def weigh(part: Any) -> Any:
        return part.weigh(weights / weights.mean()) if isinstance(part, Exchanging) else part

    return jax.tree.map(weigh, opt_state, is_leaf=lambda part: isinstance(part, Exchanging))


def _weighted_sum(array: Any, weights: Any) -> np.ndarray:
    """Returns `sum_i weights_i array_i` over the nodes i, in float64."""
    return np.tensordot(weights, np.asarray(array, np.float64), 1)


def _average_outside_gossip(opt_state: Any, template: Any) -> Iterator[Any]:
    """Returns the averages of the arrays outside the gossip, ordered and typed as in `template`."""
    old, new = map(_find_outside_gossip, (opt_state, template))
    for old_item, new_item in itertools.zip_longest(old, new):
        actual = _describe(old_item, 1)
        expected = _describe(new_item, 0)
        if actual[1:] != expected[1:]:  # their paths may differ
            raise ValueError(
                f"outside the gossip, the old state must have {' '.join(expected)}, as the new "
                f"optimizer, got {' '.join(actual)}: the gossip may change, the optimizer before "
                "it must be the same."
            )
    return (_cast(_average_leaf(*item), like) for item, (_, like) in zip(old, new, strict=True))


def _describe(item: tuple[Any, Any] | None, leading: int) -> list[str]:
    """Returns texts of an item for errors: path, shape after `leading` axes, and type of keys."""
    if item is None:
        return ["nothing more"]
    path, leaf = item
    texts = [f"opt_state{jax.tree_util.keystr(path)}:", f"{list(leaf.shape[leading:])} per node"]
    return [*texts, f"of {leaf.dtype}"] if is_key(leaf) else texts


def _find_outside_gossip(state: Any) -> list[tuple[Any, Any]]:
    """Returns path and array of every leaf of the whole optimizer state outside the gossip."""
    leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=_is_gossip)
    return [(path, leaf) for path, leaf in leaves if not _is_gossip(leaf)]


def _is_gossip(node: Any) -> bool:
    return isinstance(node, GossipState)


def _count_nodes(tree: Any) -> int:
    """Returns N, the length of the first axis of all arrays; raises `ValueError` if they differ."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    axes = [(list(np.shape(leaf)[:1]), jax.tree_util.keystr(path)) for path, leaf in leaves]
    first, first_name = axes[0]
    for axis, name in axes:
        if not axis or axis != first:
            raise ValueError(
                f"all arrays must be node-stacked, [N, ...], with one N, got {axis or 'no axis'} "
                f"for {name} and {first or 'no axis'} for {first_name}."
            )
    return first[0]


def _holds_keys(path: Any, leaf: Any, leading: int) -> bool:
    """Says whether a leaf, after `leading` axes, contains PRNG keys; raw ones are known by name."""
    if is_key(leaf):
        return True
    has_key_shape = leaf.ndim > leading and leaf.shape[-1] in IMPLEMENTATIONS
    names = [getattr(entry, "name", getattr(entry, "key", None)) for entry in path]
    is_named = any(isinstance(name, str) and KEY_NAME.search(name) for name in names)
    return has_key_shape and leaf.dtype == np.uint32 and is_named


def _fold_in_nodes(keys: Any, nodes: int) -> Any:
    """Returns `jax.random.fold_in(key, node)` for each key `[...]` and each node, `[M, ...]`."""
    if not is_key(keys):
        typed = jax.random.wrap_key_data(keys, impl=IMPLEMENTATIONS[keys.shape[-1]])
        return np.asarray(jax.random.key_data(_fold_in_nodes(typed, nodes)))
    flat = keys.reshape(-1)

    def fold_in(node: jax.Array) -> jax.Array:
        return jax.lax.map(lambda key: jax.random.fold_in(key, node), flat)

    return jax.lax.map(fold_in, jnp.arange(nodes)).reshape(nodes, *keys.shape)
