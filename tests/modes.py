"""One per-node function, and the ways of running it for N nodes on node-stacked arrays."""

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

MODES = ("vmap", "shard_map", "shard_map_check_vma", "pmap")
SERVERS = "servers"  # nodes of two devices each, along the axis "local"


def make_mesh(nodes, inner=None, name="local"):
    """A mesh of one device per node, or of `inner` devices, along an axis of this name."""
    if inner is None:
        return Mesh(np.array(jax.devices()[:nodes]), ("nodes",))
    devices = np.array(jax.devices()[: nodes * inner])
    return Mesh(devices.reshape(nodes, inner), ("nodes", name))


def run(mode, fn, nodes, shared=()):
    """`fn(*args)` per node -> a function of stacked arguments; `shared` ones have no node axis."""

    def axes(args, stacked, unstacked):
        return tuple(unstacked if i in shared else stacked for i in range(len(args)))

    def run_device(*shards):
        values = [
            shard if i in shared else jax.tree.map(lambda x: x[0], shard)
            for i, shard in enumerate(shards)
        ]
        return jax.tree.map(lambda x: x[None], fn(*values))

    def call(*args):
        if mode == "vmap":
            return jax.vmap(fn, axes(args, 0, None), axis_name="nodes")(*args)
        if mode == "pmap":
            devices = jax.devices()[:nodes]
            return jax.pmap(fn, "nodes", in_axes=axes(args, 0, None), devices=devices)(*args)
        return jax.shard_map(
            run_device,
            mesh=make_mesh(nodes, 2 if mode == SERVERS else None),
            in_specs=axes(args, P("nodes"), P()),
            out_specs=P("nodes"),
            check_vma=mode in ("shard_map_check_vma", SERVERS),
        )(*args)

    return call if mode == "pmap" else jax.jit(call)
