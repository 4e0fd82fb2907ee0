"""Nodes that are programs of their own, exchange messages beside the computation, and wait for
nobody.

`join` needs pyzmq, `pip install "gossipjax[asynchronous]"`; nothing needs `jax.distributed`.
"""

from gossipjax.asynchronous._account import Account, account
from gossipjax.asynchronous._delays import measure_delays
from gossipjax.asynchronous._join import join
from gossipjax.asynchronous._node import Node, Statistics
from gossipjax.asynchronous._replay import ReplayedStep, replay
from gossipjax.asynchronous.algorithms import Algorithm, adpsgd, sgp

__all__ = [
    "Account",
    "Algorithm",
    "Node",
    "ReplayedStep",
    "Statistics",
    "account",
    "adpsgd",
    "join",
    "measure_delays",
    "replay",
    "sgp",
]
