"""Joins processes and hosts to a job; `python -m gossipjax.launch` starts one on this machine.

A program calls `initialize()` before it first uses JAX. The program then runs unchanged in one
process, under the launcher, and on the hosts of a cluster. This package imports nothing of
`gossipjax` but old names.
"""

import importlib
from typing import TYPE_CHECKING, Any

from gossipjax.launch._process_info import NodeInfo, ProcessInfo, find_node
from gossipjax.launch._progress import advance
from gossipjax.launch._signals import final_errors, signal_handlers
from gossipjax.renamed import old_names

if TYPE_CHECKING:
    from gossipjax.launch._initialize import exit_process, initialize
    from gossipjax.launch._job import MALLOC_ENVIRONMENT
    from gossipjax.launch._mesh import mesh

__all__ = [
    "MALLOC_ENVIRONMENT",
    "NodeInfo",
    "ProcessInfo",
    "advance",
    "exit_process",
    "final_errors",
    "find_node",
    "initialize",
    "mesh",
    "signal_handlers",
]

# Name -> the module that has it, which imports JAX or starts processes.
_LATER = {
    "MALLOC_ENVIRONMENT": "_job",
    "exit_process": "_initialize",
    "initialize": "_initialize",
    "mesh": "_mesh",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Imports names at their first use, so that the launcher starts without JAX."""
        if name in _LATER:
            return getattr(importlib.import_module(f"gossipjax.launch.{_LATER[name]}"), name)
        return old_names("launch")(name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
