"""Saves a training run, and continues it on the same or another number of nodes.

Only `Checkpoints` needs orbax (`pip install orbax-checkpoint`). It is imported when first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from gossipjax.checkpoint._resize import ResizeReport, average_nodes, change_nodes
from gossipjax.checkpoint._train_state import Preempted
from gossipjax.train_state import TrainState

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
