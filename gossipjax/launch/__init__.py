"""Processes, hosts and meshes; `python -m gossipjax.launch` runs a job on this machine.

A program calls `initialize()` before JAX's first use and then runs unchanged in one process, under
the launcher and on the hosts of a cluster. This package imports nothing else of `gossipjax`.
"""

from gossipjax.launch._gpu import GpuSetting, gpu_settings, set_gpu_settings
from gossipjax.launch._initialize import exit_process, initialize
from gossipjax.launch._mesh import mesh, surviving_nodes
from gossipjax.launch._node_info import NodeInfo, find_node
from gossipjax.launch._process_info import ProcessInfo, secret_from_env
from gossipjax.launch.supervisor import MALLOC_ENVIRONMENT, advance, signal_handlers

__all__ = [
    "MALLOC_ENVIRONMENT",
    "GpuSetting",
    "NodeInfo",
    "ProcessInfo",
    "advance",
    "exit_process",
    "find_node",
    "gpu_settings",
    "initialize",
    "mesh",
    "secret_from_env",
    "set_gpu_settings",
    "signal_handlers",
    "surviving_nodes",
]
