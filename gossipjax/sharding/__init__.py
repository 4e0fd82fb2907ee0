"""Models that are sharded inside a node: which device has which part, and functions of the parts.

A node is then a mesh of its own: a mesh with further axes beside that of the nodes, such as
`gx.launch.mesh(4, fsdp=2)`. `gx.spmd` is manual over the nodes alone, and inside a node XLA
partitions the computation (GSPMD) as the arrays are sharded over the further axes, the inner ones.
"""

from gossipjax.sharding._parts import (
    ShardedState,
    constrain,
    inner_axes,
    on_shards,
    require_whole,
    shard_specs,
    specs_here,
    use_specs,
)
from gossipjax.sharding._specs import Specs, axes_of, fsdp_specs, state_specs

__all__ = [
    "ShardedState",
    "Specs",
    "axes_of",
    "constrain",
    "fsdp_specs",
    "inner_axes",
    "on_shards",
    "require_whole",
    "shard_specs",
    "specs_here",
    "state_specs",
    "use_specs",
]
