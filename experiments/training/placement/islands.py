"""How the model of a run is sharded inside a node of several devices, and what that asks for."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

import gossipjax as gx
from experiments.training.methods import Sharding
from experiments.training.options import TrainingOptions
from experiments.training.placement.nodes import count_devices_per_node
from experiments.training.plan import Run
from experiments.training.task import Task


def make_sharding(task: Task, nodes: gx.Nodes) -> Sharding | None:
    """Returns how the model is sharded inside a node; None if a node is one device."""
    devices = count_devices_per_node(nodes)
    if devices == 1:
        return None
    assert nodes.mesh is not None
    params = jax.eval_shape(lambda: task.init(0))["params"]
    return Sharding(params, gx.fsdp_specs(params, nodes.mesh), devices)


def require_parts(
    task: Task, nodes: gx.Nodes, options: TrainingOptions, runs: Sequence[Run]
) -> None:
    """Raises `ValueError` unless the devices of a node can share its batches and model."""
    devices = count_devices_per_node(nodes)
    if devices == 1:
        return
    sizes = {options.batch_size_per_node}
    shapes = task.make_shapes(nodes, options.batch_size_per_node)
    if shapes:
        sizes = {array.shape[1] for batch in shapes for array in jax.tree.leaves(batch)}
    for size in sorted(sizes):
        if size % devices:
            raise ValueError(
                f"{options.BATCH_OPTION} must give each of the {devices} devices of a node as many "
                f"examples, got a batch of {size} with --fsdp {devices}: choose another."
            )
    for run in runs:
        assert run.method.sharding is not None

        def stack(leaf: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((nodes.size, *leaf.shape), leaf.dtype)

        stacked = jax.tree.map(stack, run.method.sharding.params)
        jax.eval_shape(nodes.spmd(run.method.transform.init), stacked)


def make_whole(params: Any, devices: int) -> Sharding:
    """Returns the sharding of a run whose nodes had several devices, for one with one device each.

    Args:
      params: `[N, ...]`.
      devices: of a node of that run.
    """
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), params)
    return Sharding(shapes, jax.tree.map(lambda _: PartitionSpec(), shapes), devices)
