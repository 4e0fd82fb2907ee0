"""One per-node function, four ways of running it for N nodes on node-stacked arrays."""

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

MODES = ("vmap", "shard_map", "shard_map_check_vma", "pmap")


def mesh(nodes):
    return Mesh(np.array(jax.devices()[:nodes]), ("nodes",))


def run(mode, fn, nodes, shared=(), jit=True):
    """`fn(*args)` per node -> a function of stacked arguments; `shared` ones have no node axis."""

    def axes(args, stacked, single):
        return tuple(single if i in shared else stacked for i in range(len(args)))

    if mode == "pmap":
        return lambda *args: jax.pmap(
            fn, "nodes", in_axes=axes(args, 0, None), devices=jax.devices()[:nodes]
        )(*args)

    def call(*args):
        if mode == "vmap":
            return jax.vmap(fn, axes(args, 0, None), axis_name="nodes")(*args)

        def one(*values):
            values = [
                v if i in shared else jax.tree.map(lambda x: x[0], v) for i, v in enumerate(values)
            ]
            return jax.tree.map(lambda x: x[None], fn(*values))

        return jax.shard_map(
            one,
            mesh=mesh(nodes),
            in_specs=axes(args, P("nodes"), P()),
            out_specs=P("nodes"),
            check_vma=mode == "shard_map_check_vma",
        )(*args)

    # What is computed is under test, not how fast: compiled in two thirds of the time.
    return jax.jit(call, compiler_options={"xla_backend_optimization_level": 0}) if jit else call
