"""A state of N nodes continues with M nodes, with another topology, or with another algorithm."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gossipjax import meshes
from gossipjax.algorithms.frame.chain import gossip_state
from gossipjax.algorithms.frame.messages import message_layout
from gossipjax.algorithms.frame.state import (
    Extra,
    GossipState,
    InFlight,
    PushSum,
)
from gossipjax.checkpoint._arguments import require_transform
from gossipjax.checkpoint._keys import fold_in_nodes, holds_keys
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


@meshes.apart_from_set_mesh
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
    moments of Adam. Integers (step counts) take the maximum over nodes. `tx` may be of another
    algorithm or topology than the old chain: its arrays outside the gossip are matched in their
    order.

    PRNG keys (the `rng_key` of `optax.add_noise`, keys of dropout): node j gets
    `jax.random.fold_in(key, j)` of node 0's key, so that the new nodes draw different numbers. Raw
    keys are recognised if they are uint32 `[..., 2]` or `[..., 4]` below a name with `key` or `rng`
    in it; other uint32 arrays are integers like any. A part of an algorithm whose rule is
    `"first"` stays node 0's on all nodes, keys too.

    Gossip may be of a part of the parameters (`optax.masked`, `optax.multi_transform`), of the same
    part in both chains. The other parameters are averaged over the nodes, without weights.

    Args:
      params: `[N, ...]`, the parameters that the user holds: NumPy arrays or JAX's, whole in this
        process.
      opt_state: the state of the whole chain, `[N, ...]`.
      tx: the new chain, built for M nodes.
      nodes: M; N is allowed.

    Returns:
      Parameters and state of `tx`, NumPy arrays `[M, ...]`, and a report.

    Raises:
      ValueError: if the leaves have no common number of nodes; if the schedule of `tx` is of
        another number of nodes than M; if the state's arrays outside the
        gossip are not those of `tx` (names the first that differs); if a parameter that gossips is
        not floating-point, the chain holds several gossip transforms, or the messages in flight are
        of other parameters than those that gossip in `tx`.

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
    require_transform(tx)
    params, opt_state = meshes.on_auto_axes((params, opt_state))
    before = _count_nodes({"params": params, "opt_state": opt_state})
    old = gossip_state(opt_state) or GossipState(np.zeros(before, np.int32))
    paths = _find_gossiped(params, old, tx)
    model, weight, fraction_in_flight = _average_model(params, old, before, paths)
    new_params = cast_like(model, params)
    template = _init_one(tx, new_params)
    _require_schedule_of(nodes, template)
    others, averaged = _average_others(opt_state, template)
    leaves, structure = jax.tree.flatten(template, is_leaf=_is_gossip)
    for i, leaf in enumerate(leaves):
        leaves[i] = (
            _resize_gossip(old, leaf, model, new_params) if _is_gossip(leaf) else others.pop(0)
        )
    state = jax.tree.unflatten(structure, leaves)
    report = ResizeReport(before, nodes, weight, fraction_in_flight, averaged)
    return _repeat(new_params, nodes), _repeat(state, nodes), report


@meshes.apart_from_set_mesh
def average_nodes(tree: Any, nodes: int) -> Any:
    """Returns the average over N nodes, `[N, ...]`, for each of M, `[M, ...]`: of statistics, say.

    Integers take the maximum; PRNG keys are made from those of node 0, as `change_nodes` does.
    Leaves keep their types.

    Raises:
      ValueError: if `nodes` is not an integer >= 1, or the leaves have no common number of nodes.

    >>> average_nodes(np.array([1.0, 3.0]), 3).tolist()
    [2.0, 2.0, 2.0]
    """
    nodes = require_int(nodes, "nodes", 1)
    if jax.tree.leaves(tree):
        _count_nodes({"tree": tree})
    return _repeat(_average(meshes.on_auto_axes(tree)), nodes)


def _require_schedule_of(nodes: int, opt_state: optax.OptState) -> None:
    """Raises `ValueError` if gossip in the new state is for another number of nodes."""
    new = gossip_state(opt_state)
    if new is not None and new.schedule is not None and new.schedule.size != nodes:
        raise ValueError(
            f"nodes must be those of the schedule of tx, {new.schedule.size}, got {nodes}: build "
            f"tx with a schedule for {nodes} nodes."
        )


def _init_one(tx: optax.GradientTransformation, params: optax.Params) -> optax.OptState:
    """The state of one node that starts from `params`, `[...]`."""
    one = Nodes(1)
    stacked = one.spmd(tx.init)(jax.tree.map(lambda x: x[None], params))
    return jax.tree.map(lambda x: x[0], stacked)


def _resize_gossip(old: GossipState, new: GossipState, model: Any, params: Any) -> GossipState:
    """`new`, as `tx.init` makes it from the model, with what survives of `old`."""
    residual = None
    if new.residual is not None:
        held = _pick(params, new.residual)
        rest = jax.tree.map(np.subtract, _pick(model, new.residual), held)
        residual = cast_like(rest, new.residual)
    extra = new.extra
    if extra is not None:
        old_extra = old.extra or {}
        extra = {name: _resize_extra(old_extra.get(name), part) for name, part in extra.items()}
    return new._replace(count=np.asarray(old.count).max(axis=0), residual=residual, extra=extra)


def _resize_extra(old: Extra | None, new: Extra) -> Extra:
    if old is None or new.on_resize == "restart" or not _have_same_shapes(old.value, new.value):
        return new
    rules = {
        "average": _average,
        "max": lambda tree: jax.tree.map(lambda leaf: np.asarray(leaf).max(axis=0), tree),
        "first": lambda tree: jax.tree.map(lambda leaf: leaf[0], tree),
    }
    rule = rules[new.on_resize]
    value = rule(old.value)
    value = jax.tree.map(_cast, value, new.value)
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
    """`[...]` -> `[M, ...]`: views of one array; each node has other keys."""

    def broadcast(leaf: Any) -> Any:
        numpy = jnp if is_key(leaf) else np
        return numpy.broadcast_to(leaf, (nodes, *leaf.shape))

    def repeat(path: Any, leaf: Any) -> Any:
        if isinstance(leaf, Extra):
            return jax.tree.map(broadcast, leaf)
        return fold_in_nodes(leaf, nodes) if holds_keys(path, leaf, 0) else broadcast(leaf)

    return jax.tree_util.tree_map_with_path(repeat, tree, is_leaf=_is_shared)


def _is_shared(node: Any) -> bool:
    return isinstance(node, Extra) and node.on_resize == "first"


def _average(tree: Any) -> Any:
    """`[N, ...]` -> `[...]`."""
    return jax.tree_util.tree_map_with_path(_average_leaf, tree)


def _average_leaf(path: Any, leaf: Any) -> Any:
    if holds_keys(path, leaf, 1):
        return leaf[0]
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return np.mean(np.asarray(leaf), axis=0, dtype=np.float64).astype(leaf.dtype)
    return np.asarray(leaf).max(axis=0)


def _find_gossiped(params: Any, old: GossipState, tx: optax.GradientTransformation) -> list[str]:
    """The paths of the parameters that gossip; a mask hides the others.

    The residuals are of these. Where the old state has none, those that `tx` would keep for
    parameters of low precision are.
    """
    residual = old.residual
    if residual is None:

        def narrow(leaf: Any) -> jax.ShapeDtypeStruct:
            is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
            dtype = jnp.bfloat16 if is_float else jax.dtypes.canonicalize_dtype(leaf.dtype)
            return jax.ShapeDtypeStruct((1, *leaf.shape[1:]), dtype)

        state = jax.eval_shape(Nodes(1).spmd(tx.init), jax.tree.map(narrow, params))
        new = gossip_state(state)
        residual = None if new is None else new.residual
    tree = params if residual is None else residual
    gossiped = dict(jax.tree_util.tree_leaves_with_path(tree))
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if path in gossiped:
            require_floats(leaf, f"params{jax.tree_util.keystr(path)}")
    return list(map(jax.tree_util.keystr, gossiped))


def _pick(model: Any, like: Any) -> Any:
    """The part of the model that `like` has, in float64."""
    leaves = dict(jax.tree_util.tree_leaves_with_path(model))
    return jax.tree_util.tree_map_with_path(
        lambda path, _: np.asarray(leaves[path], np.float64), like
    )


def _average_model(
    params: Any, old: GossipState, nodes: int, paths: list[str]
) -> tuple[Any, float, float | None]:
    """`z` in float64, the sum of the weights, and the share of it that is in flight."""
    leaves = {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    weights = np.ones(nodes)
    if old.weight is not None:
        weights = np.asarray(old.weight, np.float64)
    gossiped = [leaves[path] for path in paths]
    x = [_weighted_sum(leaf, weights) for leaf in gossiped]
    if old.residual is not None:
        rest = [_weighted_sum(leaf, weights) for leaf in jax.tree.leaves(old.residual)]
        x = list(map(np.add, x, rest))
    weight = weights.sum()
    fraction: float | None = 0.0
    if old.in_flight is not None:
        sums = jax.tree.map(lambda leaf: _weighted_sum(leaf, np.ones(nodes)), old.in_flight)
        sent = _unpack_messages(sums, gossiped, old)
        x = [a + b for a, b in zip(x, sent.x, strict=True)]
        weight += sent.weight or 0.0
        fraction = None if sent.weight is None else float(sent.weight / weight)
    averages = dict(zip(paths, [a / weight for a in x], strict=True))
    model = [
        averages[path] if path in averages else _average(leaf) for path, leaf in leaves.items()
    ]
    return jax.tree.unflatten(jax.tree.structure(params), model), float(weight), fraction


def _weighted_sum(array: Any, weights: Any) -> np.ndarray:
    return np.tensordot(weights, np.asarray(array, np.float64), 1)


def _unpack_messages(sums: InFlight | PushSum, gossiped: list[Any], old: GossipState) -> PushSum:
    """The sums of all messages: their weight, and a list of numerators like `gossiped`."""
    if isinstance(sums, PushSum):
        return PushSum(sums.weight, jax.tree.leaves(sums.x))
    buffers = sums.buffers
    like_one = [np.empty(z.shape[1:], accumulation_dtype(z.dtype)) for z in gossiped]
    first = old._replace(weight=jax.tree.map(lambda w: w[0], old.weight))
    layout = message_layout(like_one, first)
    expected = [-(-size // old.overlap) * old.overlap for size in layout.sizes]
    actual = [buffer.size for buffer in buffers]
    if actual != expected:
        raise ValueError(
            "the messages in flight must be of the parameters that gossip in the new chain, "
            f"{expected} numbers per node, got {actual}: a mask must hide the same parameters as "
            "in the old chain."
        )
    return PushSum(*layout.unpack(buffers))  # pyright: ignore[reportArgumentType]


def _average_others(opt_state: Any, template: Any) -> tuple[list[Any], tuple[str, ...]]:
    """The arrays outside the gossip, averaged, in the types of the new ones, and their paths."""
    old = _others(opt_state)
    new = _others(template)
    for old_item, new_item in itertools.zip_longest(old, new):
        actual = _describe(old_item, 1)
        expected = _describe(new_item, 0)
        if actual != expected:
            paths = [jax.tree_util.keystr(item[0]) if item else "" for item in (old_item, new_item)]
            actual = f"opt_state{paths[0]}, {actual} per node" if old_item else "nothing more"
            expected = f"opt_state{paths[1]}, {expected} per node" if new_item else "no more"
            raise ValueError(
                f"outside the gossip, the old state must have {expected}, as the new optimizer, "
                f"got {actual}: the gossip may change, the optimizer before it must be the same."
            )
    averages = [_average_leaf(path, leaf) for path, leaf in old]
    paths = [path for path, leaf in old if jnp.issubdtype(leaf.dtype, jnp.floating)]
    cast = [_cast(leaf, like) for leaf, (_, like) in zip(averages, new, strict=True)]
    return cast, tuple(map(jax.tree_util.keystr, paths))


def _describe(item: tuple[Any, Any] | None, leading: int) -> str | None:
    """The shape of a leaf, without the leading axes, and the type of keys, which have one only."""
    if item is None:
        return None
    shape = str(list(item[1].shape[leading:]))
    return f"{shape} of {item[1].dtype}" if is_key(item[1]) else shape


def _others(state: Any) -> list[tuple[Any, Any]]:
    """Path and array of every leaf outside the gossip."""
    return [
        (path, leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state, is_leaf=_is_gossip)
        if not _is_gossip(leaf)
    ]


def _is_gossip(node: Any) -> bool:
    return isinstance(node, GossipState)


def _count_nodes(trees: dict[str, Any]) -> int:
    """N of the node-stacked trees, by name; of the first, which must have a leaf."""
    leaves = [
        (f"{name}{jax.tree_util.keystr(path)}", list(np.shape(leaf)[:1]))
        for name, tree in trees.items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]
    if not leaves:
        raise ValueError(f"{next(iter(trees))} must have at least one array, got none.")
    first_name, first = leaves[0]
    for name, axis in leaves:
        if not axis or axis != first:
            raise ValueError(
                f"all arrays must be node-stacked, [N, ...], with one N, got {axis or 'no axis'} "
                f"for {name} and {first or 'no axis'} for {first_name}."
            )
    return first[0]
