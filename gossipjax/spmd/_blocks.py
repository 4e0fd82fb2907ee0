"""Compiled programs of several nodes on each device, by `vmap` inside of `shard_map`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from gossipjax.composed import ComposedAxis, Composition
from gossipjax.spmd.arguments import ArgumentKinds, require_all_stacked

if TYPE_CHECKING:
    from gossipjax.spmd import Nodes


def run_in_blocks(
    fn: Callable[..., Any], kinds: ArgumentKinds, nodes: Nodes, check_vma: bool
) -> Callable[..., Any]:
    """`fn` for several nodes on each device: by `vmap` there, and `shard_map` over the devices."""
    if check_vma:
        raise ValueError(
            f"check_vma must be False with {nodes.per_device} nodes per device, got True: types "
            "cannot tell apart the nodes of a device. Use a node per device."
        )
    assert nodes.mesh is not None
    axis = ComposedAxis(nodes.axis_name, nodes.mesh.size, nodes.per_device)

    def run(*args: Any) -> Any:
        dynamic = require_all_stacked(kinds, args, nodes)

        def run_node(values: dict[int, Any]) -> Any:
            return jax.tree.map(jnp.asarray, fn(*kinds.merge(args, values)))

        run_device = jax.vmap(
            Composition(axis).compose(run_node),
            ({i: None if i in kinds.shared else 0 for i in dynamic},),
            axis_name=axis.row_axis,
            axis_size=axis.per_device,
        )
        mapped = jax.shard_map(
            run_device,
            mesh=nodes.mesh,
            in_specs=({i: P() if i in kinds.shared else P(axis.name) for i in dynamic},),
            out_specs=P(axis.name),
            check_vma=False,
        )
        return mapped(dynamic)

    return run
