"""A per-node function becomes a jitted function on node-stacked arrays: on a mesh or one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

Argnums = int | Sequence[int]


def _numbers(argnums: Argnums) -> tuple[int, ...]:
    return (argnums,) if isinstance(argnums, int) else tuple(argnums)


def spmd(
    fn: Callable[..., Any],
    mesh: Mesh | None = None,
    nodes: int | None = None,
    *,
    axis_name: str = "nodes",
    local_axis_name: str = "local",
    static_argnums: Argnums = (),
    donate_argnums: Argnums = (),
    shared_argnums: Argnums = (),
    local_argnums: Argnums = (),
    check_vma: bool = False,
) -> Callable[..., Any]:
    """Runs `fn`, written from one node's point of view, for all N nodes at once, jitted.

    Every array that goes in or comes out is node-stacked: `[N, ...]`, while `fn` sees `[...]`.
    Inside `fn` collectives over `axis_name` work, and so do all transforms of this library.

    Args:
      fn: `fn(*args) -> pytree`, of positional arguments.
      mesh: run by `shard_map` over its axis `axis_name`, one node per device (or per row of
        devices, if it has the axis `local_axis_name` too). N is that axis' size.
      nodes: without a mesh: N nodes simulated on one device by `vmap`. With neither, the mesh is
        all devices.
      static_argnums: arguments that are fixed when traced, as in `jax.jit`; not node-stacked.
      donate_argnums: arguments whose memory the results may take, as in `jax.jit`.
      shared_argnums: arguments given once, the same for every node, with no node axis.
      local_argnums: arguments such as batches, `[N, B, ...]`, whose second axis is split over a
        node's local devices: `fn` sees `[B / L, ...]`. The others are replicated over them.
      check_vma: of `shard_map`. With a local axis it catches results that were not averaged over
        it; gradients must then be taken at `jax.lax.pcast(params, "local", to="varying")`.

    Returns:
      A jitted function: it can be lowered, and compiles once per set of shapes and static values.

    Raises:
      ValueError: if the mesh has no such axis or `nodes` contradicts it; `nodes` below 1; when
        traced, if an argument's leaf has no leading axis of size N, or its second one does not
        divide over the local devices.

    >>> import jax, jax.numpy as jnp, gossipjax as gx
    >>> gx.spmd(lambda x: x - jax.lax.pmean(x, "nodes"), nodes=2)(jnp.array([1.0, 3.0])).tolist()
    [-1.0, 1.0]
    """
    if mesh is None and nodes is None:
        mesh = Mesh(jax.devices(), (axis_name,))
    if mesh is not None:
        if axis_name not in mesh.axis_names:
            raise ValueError(
                f"the mesh has the axes {mesh.axis_names}, none named {axis_name!r}: name one so, "
                "or pass axis_name."
            )
        if nodes not in (None, mesh.shape[axis_name]):
            raise ValueError(
                f"nodes={nodes}, but the mesh has {mesh.shape[axis_name]} on {axis_name!r}; give "
                "one of the two."
            )
        nodes = mesh.shape[axis_name]
        # shard_map over Explicit axes, the default of jax.make_mesh, refuses unsharded arrays.
        mesh = Mesh(mesh.devices, mesh.axis_names)
    if nodes is None or nodes < 1:
        raise ValueError(f"nodes is at least 1; given {nodes}.")
    local = mesh.shape.get(local_axis_name, 1) if mesh is not None else 1
    static, shared, split = map(_numbers, (static_argnums, shared_argnums, local_argnums))

    def run(*args: Any) -> Any:
        dynamic = [i for i in range(len(args)) if i not in static]
        for i in dynamic:
            if i not in shared:
                _require_stacked(args[i], i, nodes, local if i in split else None)

        def call(values: Sequence[Any]) -> Any:
            given = dict(zip(dynamic, values, strict=True))
            return jax.tree.map(jnp.asarray, fn(*(given.get(i, args[i]) for i in range(len(args)))))

        values = [args[i] for i in dynamic]
        if mesh is None:
            axes = [None if i in shared else 0 for i in dynamic]
            return jax.vmap(call, (axes,), axis_name=axis_name, axis_size=nodes)(values)

        def per_device(*values: Any) -> Any:
            strip = [
                v if i in shared else jax.tree.map(lambda x: jnp.squeeze(x, 0), v)
                for i, v in zip(dynamic, values, strict=True)
            ]
            return jax.tree.map(lambda x: x[None], call(strip))

        def spec(i: int) -> P:
            if i in shared:
                return P()
            return P(axis_name, local_axis_name) if i in split and local > 1 else P(axis_name)

        mapped = jax.shard_map(
            per_device,
            mesh=mesh,
            in_specs=tuple(map(spec, dynamic)),
            out_specs=P(axis_name),
            check_vma=check_vma,
        )
        return mapped(*values)

    return jax.jit(run, static_argnums=static, donate_argnums=donate_argnums)


def _require_stacked(arg: Any, number: int, nodes: int, local: int | None) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(arg):
        shape = jnp.shape(leaf)
        where = f"argument {number}{jax.tree_util.keystr(path)} has shape {list(shape)}"
        if not shape or shape[0] != nodes:
            raise ValueError(
                f"{where}; node-stacked arrays have a leading axis of {nodes} nodes. Stack it, "
                "build it per node (gx.spmd(tx.init, ...)(params)), or list the argument in "
                "shared_argnums or static_argnums."
            )
        if local is not None and (len(shape) < 2 or shape[1] % local):
            raise ValueError(
                f"{where}; its second axis is split over {local} local devices, which do not "
                "divide it."
            )
