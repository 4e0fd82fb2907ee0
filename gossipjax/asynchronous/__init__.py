"""Asynchronous training: each node is its own program, and sends while it computes.

`join` needs pyzmq (`pip install pyzmq`). Nothing needs `jax.distributed`.
"""

from gossipjax.asynchronous._join import join
from gossipjax.asynchronous._journal import Account, account, measure_delays
from gossipjax.asynchronous._node import Node, Statistics
from gossipjax.asynchronous._outliers import refuse_outliers
from gossipjax.asynchronous._replay import ReplayedStep, replay
from gossipjax.asynchronous.algorithms import Algorithm, Outer, adpsgd, outer, sgp

__all__ = [
    "Account",
    "Algorithm",
    "Node",
    "Outer",
    "ReplayedStep",
    "Statistics",
    "account",
    "adpsgd",
    "join",
    "measure_delays",
    "outer",
    "refuse_outliers",
    "replay",
    "sgp",
]
