"""Stacks arrays of one node or one batch for N nodes, and back: `[...]` <-> `[N, ...]`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gossipjax.processes import is_key
from gossipjax.sharding import Specs, is_spec

if TYPE_CHECKING:
    from gossipjax.nodes import Nodes

# By how much rows may differ that are copies of one model, relative to its largest value.
MAX_SPREAD = 1e-2


def repeat_rows(tree: Any, count: int) -> Any:
    """Repeats `[...]` to `[count, ...]`, equal rows, without copies of arrays on the host."""

    def repeat(leaf: Any) -> Any:
        if is_key(leaf) or isinstance(leaf, Tracer):
            return jnp.broadcast_to(leaf, (count, *leaf.shape))
        array = np.asarray(leaf, jnp.result_type(leaf))
        return np.broadcast_to(array, (count, *array.shape))

    return jax.tree.map(repeat, tree)


def require_one_model(tree: Any, size: int) -> None:
    """Raises `ValueError` if all arrays are already copies for all nodes, `[N, ...]`.

    Copies have N equal rows, and more than one value, unlike an array of zeros.
    """
    leaves = jax.tree.leaves(tree)
    if size == 1 or any(isinstance(leaf, Tracer) for leaf in leaves):
        return
    if any(jnp.shape(leaf)[:1] != (size,) or is_key(leaf) for leaf in leaves):
        return
    if not all(getattr(leaf, "is_fully_addressable", True) for leaf in leaves):
        return  # this process cannot look at all of it
    arrays = [np.asarray(leaf) for leaf in leaves]
    are_equal = all(np.array_equal(x, np.broadcast_to(x[:1], x.shape)) for x in arrays)
    if are_equal and any((x != x.flat[0]).any() for x in arrays if x.size):
        raise ValueError(
            f"the tree must be the tree of one node, [...], got arrays of {size} equal rows, one "
            "for each node: give the tree before it is stacked. For parameters that are stacked "
            "already, nodes.run(tx.init, params) makes the state."
        )


def is_raw_key(leaf: Any, leading: int = 1) -> bool:
    """Says whether an array may have a `jax.random.PRNGKey`, two numbers, behind `leading` axes."""
    return jnp.shape(leaf)[leading:] == (2,) and jnp.result_type(leaf) == jnp.uint32


def fold_in_nodes(rows: Any, numbers: Sequence[int]) -> Any:
    """Folds the number of its node into each key of rows `[rows, ...]`.

    Row `i` has the keys of node `numbers[i]`. Leaves that are no keys stay as they are.
    """
    leaves = jax.tree.leaves(rows)
    if not any(map(is_key, leaves)) or any(map(is_raw_key, leaves)):
        raise ValueError(
            "fold_in must find keys, as jax.random.key makes them, got a tree without keys, or "
            "with a jax.random.PRNGKey, which is an array of numbers: make a key of it by "
            "jax.random.wrap_key_data."
        )

    def fold_in(leaf: Any) -> Any:
        """Folds the number of each row's node into the keys of that row of one leaf."""
        if not is_key(leaf):
            return leaf
        fold_column = jax.vmap(lambda key, number: jax.random.fold_in(key, number))
        flat = leaf.reshape(len(numbers), -1)  # a column has one key of each node
        folded = jax.vmap(fold_column, (1, None), 1)(flat, np.asarray(numbers, np.uint32))
        return folded.reshape(leaf.shape)

    return jax.tree.map(fold_in, rows)


def split_rows(batch: Any, count: int, axis: int = 0) -> Any:
    """Splits a batch into `count` rows: `[B, ...]` -> `[count, B / count, ...]`.

    `axis` is the axis of the B examples in the batch; the rows are always the first axis.
    """
    lengths: set[int] = set()

    def split(path: Any, leaf: Any) -> Any:
        """Splits a leaf; raises `ValueError` if it does not fit `count` or the leaves before."""
        array = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
        name = f"batch{jax.tree_util.keystr(path)}"
        if getattr(array.dtype, "kind", "") in tuple("OSUM"):  # objects, texts, dates
            raise ValueError(
                f"{name} must be numbers, got {array.dtype}: encode texts before, or take them out "
                "of the batch."
            )
        if not 0 <= axis < array.ndim or array.shape[axis] % count:
            got = f"shape {list(array.shape)}" if array.shape else f"{leaf!r}"
            which = f"an axis {axis}" if axis else "a leading axis"
            raise ValueError(
                f"{name} must have {which} of examples that the {count} nodes of this "
                f"process divide, got {got}: give batches of a multiple of {count}, and have the "
                "loader drop the rest at the end (drop_remainder=True)."
            )
        lengths.add(array.shape[axis])
        if len(lengths) > 1:
            raise ValueError(
                f"{name} must have as many examples as the leaves before it, got lengths "
                f"{sorted(lengths)}: nodes.replicate gives every node all of an array."
            )
        shape = array.shape
        parts = array.reshape(*shape[:axis], count, shape[axis] // count, *shape[axis + 1 :])
        return parts.transpose(axis, *range(axis), *range(axis + 1, parts.ndim))

    return jax.tree_util.tree_map_with_path(split, batch)


def make_rows(
    make: Callable[..., Any],
    shapes: Any,
    specs: Any,
    nodes: Nodes,
    *args: Any,
    fold_in: bool = False,
) -> Any:
    """Makes N equal rows of what `make(*args)` returns, `[N, ...]`: each device makes its part.

    `shapes` are the result of `jax.eval_shape(make)`. The rows get this structure, because static
    parts of what `make` returns may differ from call to call. `specs` has a spec for each leaf, or
    is one spec for all, or None if nothing is sharded inside a node. With `fold_in` the rows get
    different keys, as `fold_in_nodes` makes them.
    """

    def make_all(*args: Any) -> list[jax.Array]:
        """Returns the rows' leaves. XLA computes on each device only what this device needs."""

        def repeat(leaf: Any) -> jax.Array:
            return jnp.broadcast_to(leaf, (nodes.size, *jnp.shape(leaf)))

        rows = list(map(repeat, jax.tree.leaves(make(*args))))
        return fold_in_nodes(rows, range(nodes.size)) if fold_in else rows

    structure = jax.tree.structure(shapes)
    shardings = None
    if nodes.mesh is not None:
        if not is_spec(specs):
            specs = structure.flatten_up_to(specs)
        shardings = _stack_shardings(specs, nodes.mesh, nodes.axis_name)
    leaves = jax.jit(make_all, out_shardings=shardings)(*args)
    return jax.tree.unflatten(structure, leaves)


def shard_rows(rows: Any, specs: Any, mesh: Mesh, axis_name: str) -> Any:
    """Returns shardings of `rows` `[N, ...]`, whose rows are sharded inside a node by `specs`.

    `specs` is a spec for all arrays, or a tree of specs like `rows`, and must fit the arrays.
    """
    if isinstance(specs, P):
        specs = jax.tree.map(lambda _: specs, rows)
    sizes = {name: size for name, size in mesh.shape.items() if name != axis_name}
    row = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), rows)
    Specs.make(specs).require(row, sizes, may_repeat=True)
    return _stack_shardings(specs, mesh, axis_name)


def _stack_shardings(specs: Any, mesh: Mesh, axis_name: str) -> Any:
    """Returns the shardings of node-stacked arrays, from the specs of their rows."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, P(axis_name, *(spec or ()))), specs, is_leaf=is_spec
    )


def spec_of_row(stacked: Any) -> P:
    """Says how a row of a node-stacked array `[N, ...]` is sharded inside a node."""
    sharding = getattr(stacked, "sharding", None)
    return P(*sharding.spec[1:]) if isinstance(sharding, NamedSharding) else P()


@functools.cache
def first_row(mesh: Mesh | None, specs: tuple[P, ...] | None = None, compares: bool = True) -> Any:
    """Makes a program that takes the first row of node-stacked arrays, and compares the others.

    The program returns the row `[...]`, and for each leaf how far other rows are from it, as
    `_difference` says, or None with `compares=False`, which saves most of the time to compile.
    `specs` are the specs of the row's leaves; without specs every device gets the whole row.
    """

    def first_row(stacked: Any) -> tuple[Any, jax.Array | None]:
        """Returns the first row, and, if asked for, how far each leaf's other rows are from it."""
        leaves, structure = jax.tree.flatten(stacked)
        row = [x[0] for x in leaves]
        if mesh is not None and specs is not None:
            shardings = [NamedSharding(mesh, spec) for spec in specs]
            row = list(map(jax.lax.with_sharding_constraint, row, shardings))
        spreads = jnp.stack(list(map(_difference, leaves))) if compares else None
        return jax.tree.unflatten(structure, row), spreads

    if mesh is None:
        return jax.jit(first_row)
    whole = NamedSharding(mesh, P())
    return jax.jit(first_row, out_shardings=(None, whole) if specs else whole)


def _difference(x: jax.Array) -> jax.Array:
    """Returns how far rows `[N, ...]` are from the first one, relative to the largest finite value.

    The result is infinite if integers or keys differ at all, or if a number that differs from that
    of the first row is not finite in either. NaN is equal to NaN of any bits, and 0.0 to -0.0.
    """
    if is_key(x):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], axis=-1)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.where(jnp.all(x == x[:1]), jnp.float32(0), jnp.inf)
    x = x.astype(x.dtype if x.dtype.itemsize > 4 else jnp.float32)
    first = x[:1]
    is_equal = (x == first) | (jnp.isnan(x) & jnp.isnan(first))
    distance = jnp.where(is_equal, jnp.zeros_like(x), jnp.abs(x - first))
    distance = jnp.where(jnp.isnan(distance), jnp.inf, distance)
    sizes = jnp.where(jnp.isfinite(x), jnp.abs(x), jnp.zeros_like(x))
    scale = jnp.max(sizes, initial=jnp.finfo(x.dtype).tiny)
    return (jnp.max(distance, initial=0.0) / scale).astype(jnp.float32)


def require_equal_rows(stacked: Any, spreads: np.ndarray) -> None:
    """Raises `ValueError` if the rows of a leaf differ by more than `MAX_SPREAD`."""
    worst = int(spreads.argmax())
    if spreads[worst] <= MAX_SPREAD:
        return
    path, leaf = jax.tree_util.tree_leaves_with_path(stacked)[worst]
    name = jax.tree_util.keystr(path) or "its only leaf"
    size = f" by {spreads[worst]:.1%}" if np.isfinite(spreads[worst]) else ""
    raise ValueError(
        f"the rows of all nodes must be equal, got {leaf.dtype} rows of {name} that differ{size}: "
        "average the models, by gx.average_model(params, opt_state, nodes=nodes)."
    )
