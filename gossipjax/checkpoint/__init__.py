"""Checkpoints of a training run, and its continuation on another number of nodes.

`Checkpoints` needs orbax, `pip install orbax-checkpoint`, and is imported when it is first
used; `change_nodes` needs NumPy only.
"""

import importlib
from typing import TYPE_CHECKING, Any

from gossipjax.checkpoint._resize import ResizeReport, average_nodes, change_nodes
from gossipjax.checkpoint._train_state import Preempted, TrainState

if TYPE_CHECKING:
    from gossipjax.checkpoint._checkpoints import Checkpoints, Restored

__all__ = [
    "Checkpoints",
    "Preempted",
    "ResizeReport",
    "Restored",
    "TrainState",
    "average_nodes",
    "change_nodes",
]


def __getattr__(name: str) -> Any:
    if name in ("Checkpoints", "Restored"):
        return getattr(importlib.import_module("gossipjax.checkpoint._checkpoints"), name)
    raise AttributeError(f"module 'gossipjax.checkpoint' has no attribute {name!r}")
