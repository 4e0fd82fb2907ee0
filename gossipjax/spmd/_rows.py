"""Rows of node-stacked arrays: repeated, made on the devices, sharded, and taken out again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gossipjax.sharding import Specs


def repeat_rows(tree: Any, count: int) -> Any:
    """`[...]` -> `[count, ...]`: views of host arrays, but for PRNG keys."""

    def repeat(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jnp.broadcast_to(leaf, (count, *leaf.shape))
        array = np.asarray(leaf, jnp.result_type(leaf))
        return np.broadcast_to(array, (count, *array.shape))

    return jax.tree.map(repeat, tree)


def make_rows(
    make: Callable[[], Any], specs: Any, size: int, mesh: Mesh | None, axis_name: str
) -> Any:
    """`make()` for every node, `[N, ...]`: each device makes its part, by `specs` if given."""

    def make_all() -> Any:
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (size, *x.shape)), make())

    if mesh is None:
        return jax.jit(make_all)()
    if specs is None:
        return jax.jit(make_all, out_shardings=NamedSharding(mesh, P(axis_name)))()
    return jax.jit(make_all, out_shardings=_stack_shardings(specs, mesh, axis_name))()


def shard_rows(rows: Any, specs: Any, mesh: Mesh, axis_name: str) -> Any:
    """The shardings of node-stacked arrays whose rows have these specs.

    Args:
      rows: `[..., ...]`, of any number of nodes.
      specs: a tree like `rows` of `PartitionSpec`s over the axes inside a node, or one for all.

    Raises:
      ValueError: if the specs are not like the rows, or do not fit them or the mesh.
    """
    if isinstance(specs, P):
        specs = jax.tree.map(lambda _: specs, rows)
    sizes = {name: mesh.shape[name] for name in mesh.axis_names}
    row = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), rows)
    Specs.make(specs, axis_name).require(row, sizes, may_repeat=True)
    return _stack_shardings(specs, mesh, axis_name)


def _stack_shardings(specs: Any, mesh: Mesh, axis_name: str) -> Any:
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, P(axis_name, *(spec or ()))),
        specs,
        is_leaf=lambda spec: spec is None or isinstance(spec, P),
    )


def spec_of_row(stacked: Any) -> P:
    """How a row of `[N, ...]` is sharded inside a node."""
    sharding = getattr(stacked, "sharding", None)
    return P(*sharding.spec[1:]) if isinstance(sharding, NamedSharding) else P()


@functools.cache
def first_row(mesh: Mesh | None, specs: tuple[P, ...] | None = None) -> Any:
    """A program `[N, ...] -> ([...], largest relative difference between rows)`.

    `specs` are those of the row's leaves; without them every device gets all of it.
    """

    def difference(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.number):
            return jnp.zeros((), jnp.float32)
        x = x.astype(jnp.float32)
        scale = jnp.max(jnp.abs(x[0]), initial=jnp.finfo(jnp.float32).tiny)
        return jnp.max(jnp.abs(x - x[:1]), initial=0.0) / scale

    def first_row(stacked: Any) -> tuple[Any, jax.Array]:
        leaves, structure = jax.tree.flatten(stacked)
        row = [x[0] for x in leaves]
        if mesh is not None and specs is not None:
            shardings = [NamedSharding(mesh, spec) for spec in specs]
            row = list(map(jax.lax.with_sharding_constraint, row, shardings))
        spread = jnp.max(jnp.stack([difference(x) for x in leaves]))
        return jax.tree.unflatten(structure, row), spread

    if mesh is None:
        return jax.jit(first_row)
    whole = NamedSharding(mesh, P())
    return jax.jit(first_row, out_shardings=(None, whole) if specs else whole)
