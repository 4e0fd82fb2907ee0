"""Places the nodes: on one or several devices each, or all simulated on one device."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

import gossipjax as gx
from experiments.training.methods import Sharding
from experiments.training.options import Placement, TrainingOptions
from experiments.training.plan import TrainingRun
from experiments.training.task import Task

FSDP_AXIS = "fsdp"  # name of the axis inside a node


def request_cpu_devices(count: int) -> None:
    """Requests virtual CPU devices before JAX is first used; has no effect on accelerators."""
    jax.config.update("jax_num_cpu_devices", count)
    threads = int(os.environ.get("NPROC", 0)) or os.cpu_count() or 1
    # XLA reads the size of its thread pool from NPROC: two threads per device. A device that waits
    # in a collective occupies one; with no more threads than devices the last ones to arrive can be
    # left without a thread for their convolutions, and wait forever.
    os.environ["NPROC"] = str(max(2 * count, threads))


def place_nodes(placement: Placement, nodes: int, fsdp: int = 1) -> gx.Nodes:
    """Returns N nodes, each on its own device if there are enough, else several per device.

    If the number D of devices divides N, each device holds N / D nodes; else one device simulates
    all nodes. Of several processes, each holds the same number of nodes. With `fsdp` > 1, a node
    has this many devices, which are the axis "fsdp" inside the node, and nothing is simulated.
    """
    devices = jax.devices()
    processes = jax.process_count()
    if fsdp > 1:
        return gx.Nodes(mesh=_make_islands(nodes, fsdp))
    is_divided = len(devices) < nodes and nodes % len(devices) == 0
    if processes > 1:
        if placement == "vmap":
            raise ValueError(
                f"--placement vmap must be on one process, got {processes}: use --placement mesh."
            )
        return gx.Nodes(nodes, mesh=gx.launch.mesh(None if is_divided else nodes))
    if is_divided and len(devices) > 1 and placement != "vmap":
        return gx.Nodes(nodes, mesh=gx.launch.mesh())
    if placement == "vmap" or (placement == "auto" and len(devices) < nodes):
        return gx.Nodes(nodes)
    if len(devices) < nodes:
        kind = devices[0].platform.upper()
        raise ValueError(
            f"--placement mesh needs a device per node, or several that divide them, got {nodes} "
            f"nodes, {len(devices)} {kind} devices: use --nodes {len(devices)}, or --placement "
            "vmap to simulate the nodes on one device."
        )
    return gx.Nodes(mesh=Mesh(devices[:nodes], ("nodes",)))


def _make_islands(nodes: int, fsdp: int) -> Mesh:
    """Makes a mesh of nodes with several devices each."""
    devices = jax.devices()
    if len(devices) < nodes * fsdp:
        kind = devices[0].platform.upper()
        raise ValueError(
            f"--nodes * --fsdp must be at most the number of devices, got {nodes} * {fsdp} and "
            f"{len(devices)} {kind} devices: lower one of them, or start with more devices, in "
            "several processes by --local-devices of gossipjax.launch."
        )
    return gx.launch.mesh(nodes, fsdp=fsdp)


def make_put(nodes: gx.Nodes) -> Callable[[Any], Any]:
    """Returns a function that puts batches `[len(nodes.local), B, ...]` on the devices.

    The examples of a node are divided over its devices.
    """
    specs = PartitionSpec(FSDP_AXIS) if nodes.inner_axes else None
    return lambda rows: nodes.put(rows, specs)


def gather_where_used(params: Any) -> Any:
    """Gathers the parameters of one node on each of its devices, to compute gradients."""
    # XLA gathers each of them for its products. Without this it would divide the products as the
    # parameters are, and exchange activations, which are larger.
    return jax.lax.with_sharding_constraint(params, jax.tree.map(lambda _: PartitionSpec(), params))


def count_devices_per_node(nodes: gx.Nodes) -> int:
    """Returns the number of devices over which a node's model is sharded, or 1."""
    return 1 if nodes.mesh is None else nodes.mesh.shape.get(FSDP_AXIS, 1)


def describe_nodes(nodes: gx.Nodes) -> str:
    """Says in words on how many processes and devices the nodes run.

    >>> describe_nodes(gx.Nodes(8))
    'simulated on one CPU device by vmap'
    """
    kind = jax.devices()[0].platform.upper()
    if nodes.is_simulated:
        return f"simulated on one {kind} device by vmap"
    processes = jax.process_count()
    prefix = f"{processes} processes, " if processes > 1 else ""
    devices = count_devices_per_node(nodes)
    if devices > 1:
        return f"{prefix}{devices} {kind} devices per node, the model sharded over them"
    if nodes.per_device > 1:
        return f"{prefix}{nodes.per_device} nodes on each {kind} device"
    return f"{prefix}one {kind} device per node"


def make_sharding(task: Task, nodes: gx.Nodes) -> Sharding | None:
    """Returns how the model is sharded inside a node; None if a node is one device."""
    devices = count_devices_per_node(nodes)
    if devices == 1:
        return None
    assert nodes.mesh is not None
    params = jax.eval_shape(lambda: task.init(0))["params"]
    return Sharding(params, gx.fsdp_specs(params, nodes.mesh), devices)


def require_parts(
    task: Task, nodes: gx.Nodes, options: TrainingOptions, runs: Sequence[TrainingRun]
) -> None:
    """Raises `ValueError` unless a node's batches and model can be divided over its devices."""
    devices = count_devices_per_node(nodes)
    if devices == 1:
        return
    sizes = {options.examples_per_node}
    shapes = task.make_shapes(nodes, options.examples_per_node)
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
        # Raises if an algorithm's state cannot be divided as the parameters are.
        jax.eval_shape(nodes.spmd(run.method.transform.init), stacked)


def make_whole(params: Any, devices: int) -> Sharding:
    """Returns the sharding of a saved run, for a run whose nodes have one device each.

    `params` are `[N, ...]`.
    """
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), params)
    return Sharding(shapes, jax.tree.map(lambda _: PartitionSpec(), shapes), devices)
