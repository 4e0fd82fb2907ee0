"""Runs a per-node function on node-stacked arrays, on a mesh of devices or simulated on one.

- nodes: `Nodes` says once where N nodes run; `spmd` compiles a function that is written from one
  node's point of view.
- program: a compiled function, and the form of its arguments; one node per device, or all on one.
- blocks: several nodes on each device.
"""

from gossipjax.nodes.nodes import Nodes, Shared, as_nodes, donate_on_accelerators, spmd
from gossipjax.nodes.program import Program

__all__ = ["Nodes", "Program", "Shared", "as_nodes", "donate_on_accelerators", "spmd"]
