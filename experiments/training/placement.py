"""Placement of the nodes: a device for each of them, or one device that simulates all."""

import os
from typing import Literal

import jax
from jax.sharding import Mesh

import gossipjax as gx

Placement = Literal["auto", "mesh", "vmap"]


def request_cpu_devices(count: int) -> None:
    """Requests virtual CPU devices, before JAX's first use; has no effect on accelerators.

    XLA's thread pool gets two threads per device: a device that waits in a collective occupies one,
    and with no more threads than devices the last ones to arrive can be left without a thread for
    their convolutions, and wait forever. XLA reads the size of its pool from NPROC.
    """
    jax.config.update("jax_num_cpu_devices", count)
    threads = int(os.environ.get("NPROC", 0)) or os.cpu_count() or 1
    os.environ["NPROC"] = str(max(2 * count, threads))


def place_nodes(placement: Placement, nodes: int) -> gx.Nodes:
    """Returns N nodes on one device each if there are enough, or several on each, or all on one.

    Several devices that divide N hold N / D nodes each. With several processes, each holds the same
    number of nodes.

    Raises:
      ValueError: for a mesh of more nodes than devices that do not divide them, or nodes that
        cannot be divided over the processes.
    """
    devices = jax.devices()
    processes = jax.process_count()
    is_divided = len(devices) < nodes and nodes % len(devices) == 0
    if processes > 1:
        if placement == "vmap":
            raise ValueError(
                f"--placement vmap must be on one process, got {processes}: use --placement mesh."
            )
        return gx.Nodes(nodes, gx.launch.mesh(None if is_divided else nodes))
    if is_divided and len(devices) > 1 and placement != "vmap":
        return gx.Nodes(nodes, gx.launch.mesh())
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


def describe_nodes(nodes: gx.Nodes) -> str:
    """Returns a phrase for people: how many processes and devices the nodes run on.

    >>> describe_nodes(gx.Nodes(8))
    'simulated on one CPU device by vmap'
    """
    kind = jax.devices()[0].platform.upper()
    if nodes.is_simulated:
        return f"simulated on one {kind} device by vmap"
    processes = jax.process_count()
    prefix = f"{processes} processes, " if processes > 1 else ""
    if nodes.per_device > 1:
        return f"{prefix}{nodes.per_device} nodes on each {kind} device"
    return f"{prefix}one {kind} device per node"
