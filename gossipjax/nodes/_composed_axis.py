"""Collectives over N nodes, with k = N / D nodes on each of D devices.

They run inside `shard_map` over the devices and `vmap` over the nodes of a device; both axes have
names here. A collective over all nodes is composed of one collective over each of the two axes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from gossipjax.topology.permutations import plan_block_exchange

Groups = Sequence[Sequence[int]]


class ComposedAxis(NamedTuple):
    """Joins the axis of D devices and the `vmap` axis of the k nodes on each: N = D k nodes.

    Node `i` is row `i % k` of device `i // k`.
    """

    name: str  # the name of the axis of all nodes, and of the devices' axis of `shard_map`
    devices: int  # D
    per_device: int  # k

    @property
    def size(self) -> int:
        """N, the number of nodes."""
        return self.devices * self.per_device

    @property
    def row_axis(self) -> str:
        """The axis of `vmap`, over the nodes of one device."""
        return f"{self.name} of a device"


def _index(axis: ComposedAxis, **params: Any) -> list[jax.Array]:
    """Returns this node's number, 0 to N - 1, in a list, as all functions of `COLLECTIVES` do."""
    device = jax.lax.axis_index(axis.name)
    return [device * axis.per_device + jax.lax.axis_index(axis.row_axis)]


def _make_reduction(reduce_axis: Callable[..., Any], reduce_rows: Callable[..., Any]) -> Any:
    """Makes a reduction over all nodes or over groups of them, such as a sum.

    `reduce_axis` reduces over named axes, as `lax.psum` does, and `reduce_rows` over axes of an
    array, as `jnp.sum` does.
    """

    def reduction(
        axis: ComposedAxis,
        *operands: Any,
        axes: Sequence[str | int],
        axis_index_groups: Groups | None,
        **params: Any,
    ) -> list[jax.Array]:
        """Reduces every operand over all nodes, or over the nodes of each group."""
        # `axes` has the axis of the nodes, and a number for each axis of a `vmap` inside a node's
        # function over which the sum goes, too.
        numbers = tuple(name for name in axes if isinstance(name, int))
        if len(numbers) + 1 < len(axes):
            raise ValueError(
                f"a reduction must be over {axis.name!r} alone where devices hold several nodes "
                f"each, got {axes}: reduce over one axis at a time, or use a node per device."
            )
        if numbers:
            operands = tuple(reduce_rows(x, axis=numbers) for x in operands)
        if axis_index_groups is None:
            return list(reduce_axis(operands, (axis.row_axis, axis.name)))
        # A group may contain some nodes of a device and not others, so no collective over whole
        # devices can reduce it: every node gathers its group and reduces it.
        return [reduce_rows(_gather_group(axis, x, axis_index_groups), axis=0) for x in operands]

    return reduction


def _sum_rows(rows: jax.Array, axis: int | tuple[int, ...]) -> jax.Array:
    """Sums over axes of an array, in the type of the array."""
    return jnp.sum(rows, axis, dtype=rows.dtype)  # int8 stays int8, as in lax.psum


def _permute(axis: ComposedAxis, *operands: Any, perm: Any, **params: Any) -> list[jax.Array]:
    """Runs `lax.ppermute` for several arrays."""
    edges = np.array(perm, int).reshape(-1, 2)
    return [permute(axis, x, edges) for x in operands]


def permute(axis: ComposedAxis, x: jax.Array, edges: np.ndarray) -> jax.Array:
    """Runs `lax.ppermute` over all nodes by `edges` `[E, 2]`, each a sender and a receiver.

    A device sends rows of its block to other devices, and then picks its new rows from its block
    and from all rows that came in. Nodes to which nobody sends get zeros.
    """
    senders, receivers = edges.T
    plan = plan_block_exchange(receivers, senders, axis.size, axis.devices)
    block = jax.lax.all_gather(x, axis.row_axis)  # `[k, ...]`: the rows of this device, no copy
    parts = [block]
    for transfer in plan.transfers:
        sent = _select_rows(axis, block, transfer.rows)
        parts.append(jax.lax.ppermute(sent, axis.name, transfer.pairs))
    row = _own_row(axis, _select_rows(axis, jnp.concatenate(parts), plan.sources))
    if plan.arrives.all():
        return row
    return jnp.where(jnp.asarray(plan.arrives.ravel())[_index(axis)[0]], row, jnp.zeros_like(row))


def _select_rows(axis: ComposedAxis, block: jax.Array, table: np.ndarray) -> jax.Array:
    """Selects m rows of a device's block: row `d` of `table` `[D, m]` lists them for device `d`."""
    if (table != table[0]).any():
        return block[jnp.asarray(table)[jax.lax.axis_index(axis.name)]]
    # All devices select the same rows. Slices of consecutive rows need no index when the program
    # runs, and XLA copies them faster than single rows.
    # A run starts where a row does not follow the one before it; `prepend` starts the first run.
    starts = np.flatnonzero(np.diff(table[0], prepend=table[0][0] - 2) != 1)
    runs = np.split(table[0], starts[1:])
    return jnp.concatenate([block[run[0] : run[-1] + 1] for run in runs])


def _own_row(axis: ComposedAxis, block: jax.Array) -> jax.Array:
    """Returns this node's row of a block `[k, ...]` with a row for each node of the device.

    Under `vmap` over the k nodes, all results together are the block itself. The rule below says
    so; otherwise `vmap` would make a gather, which copies the block.
    """

    @custom_vmap
    def own_row(block: jax.Array, row: jax.Array) -> jax.Array:
        return block[row]

    @own_row.def_vmap
    def own_rows(size: int, is_batched: Any, block: jax.Array, row: jax.Array) -> Any:
        # The device has one block for all its rows; only the number of the row differs.
        assert tuple(is_batched) == (False, True)
        return block, True

    return own_row(block, jax.lax.axis_index(axis.row_axis))


def _gather_group(axis: ComposedAxis, x: jax.Array, groups: Groups) -> jax.Array:
    """Returns the rows of the nodes in this node's group, `[g, ...]`, in the order of the group."""
    table = np.array(groups)
    size = table.shape[1]
    positions = np.zeros(axis.size, int)
    positions[table] = np.arange(size)
    # In hop h each node gets the value of the node h positions before it in its group.
    received = [x]
    for hop in range(1, size):
        edges = np.stack([table.ravel(), np.roll(table, -hop, axis=1).ravel()], axis=1)
        received.append(permute(axis, x, edges))
    # So the value of position q arrived in hop `position - q`.
    position = jnp.asarray(positions)[_index(axis)[0]]
    return jnp.stack(received)[(position - jnp.arange(size)) % size]


def _all_gather(
    axis: ComposedAxis,
    x: Any,
    *,
    all_gather_dimension: int,
    axis_index_groups: Groups | None,
    tiled: bool,
    **params: Any,
) -> list[jax.Array]:
    """Runs `lax.all_gather` of all nodes or of groups: within a device, then between devices."""
    if axis_index_groups is None:
        rows = jax.lax.all_gather(x, axis.row_axis)
        rows = jax.lax.all_gather(rows, axis.name, tiled=True)
    else:
        rows = _gather_group(axis, x, axis_index_groups)
    return [_join(rows, all_gather_dimension, tiled)]


def _join(rows: jax.Array, dimension: int, tiled: bool) -> jax.Array:
    """Puts the first axis of `rows` at `dimension`, or joins it with the axis at `dimension`."""
    rows = jnp.moveaxis(rows, 0, dimension)
    if not tiled:
        return rows
    shape = rows.shape
    joined = shape[dimension] * shape[dimension + 1]
    return rows.reshape(*shape[:dimension], joined, *shape[dimension + 2 :])


def _all_to_all(
    axis: ComposedAxis,
    x: Any,
    *,
    split_axis: int,
    concat_axis: int,
    axis_index_groups: Groups | None,
    **params: Any,
) -> list[jax.Array]:
    """Runs `lax.all_to_all` of all nodes."""
    # There is no case for `tiled`: JAX adds and removes axes outside of the primitive, which always
    # splits one axis and joins the parts along another.
    if axis_index_groups is not None:
        raise ValueError(
            "lax.all_to_all must have no axis_index_groups where devices hold several nodes each, "
            "got some: use a node per device."
        )
    # Devices exchange what is for all k nodes of a device at once. Each node then picks its part.
    part_size = x.shape[split_axis] // axis.size
    x = x.reshape(*x.shape[:split_axis], axis.size, part_size, *x.shape[split_axis + 1 :])
    rows = jnp.moveaxis(x, split_axis, 0)  # `[N, ...]`, by receiver
    blocks = rows.reshape(axis.devices, axis.per_device, *rows.shape[1:])
    blocks = jax.lax.all_to_all(blocks, axis.name, 0, 0)  # `[D, k, ...]`: sending device, receiver
    received = jax.lax.all_gather(blocks, axis.row_axis, axis=1)  # `[D, k, k, ...]`: sender first
    received = _own_row(axis, jnp.moveaxis(received, 2, 0))
    return [_join(received.reshape(rows.shape), concat_axis, tiled=True)]


def _reduce_scatter(
    axis: ComposedAxis,
    x: Any,
    *,
    scatter_dimension: int,
    axis_index_groups: Groups | None,
    tiled: bool,
    **params: Any,
) -> list[jax.Array]:
    """Runs `lax.psum_scatter` over all nodes."""
    if axis_index_groups is not None:
        raise ValueError(
            "lax.psum_scatter must have no axis_index_groups where devices hold several nodes "
            "each, got some: use a node per device."
        )
    # Every node gets the whole sum, as by `psum`, which takes twice the traffic, and keeps a part.
    total = jax.lax.psum(x, (axis.row_axis, axis.name))
    size = total.shape[scatter_dimension] // axis.size
    start = _index(axis)[0] * size
    part = jax.lax.dynamic_slice_in_dim(total, start, size, scatter_dimension)
    return [part if tiled else jnp.squeeze(part, scatter_dimension)]


COLLECTIVES: dict[str, Callable[..., list[Any]]] = {
    "axis_index": _index,
    "psum": _make_reduction(jax.lax.psum, _sum_rows),
    "pmax": _make_reduction(jax.lax.pmax, jnp.max),
    "pmin": _make_reduction(jax.lax.pmin, jnp.min),
    "ppermute": _permute,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "reduce_scatter": _reduce_scatter,
}
"""The composed collective of each primitive: `(axis, *operands, **params) -> results`."""
