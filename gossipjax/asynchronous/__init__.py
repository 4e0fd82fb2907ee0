"""Nodes that are programs of their own, exchange messages beside the computation, and wait for
nobody.

`join` needs pyzmq, `pip install "gossipjax[asynchronous]"`; nothing needs `jax.distributed`.
"""

from gossipjax.asynchronous._join import join
from gossipjax.asynchronous._node import Node, Statistics
from gossipjax.asynchronous._replay import ReplayedStep, replay
from gossipjax.asynchronous.algorithms import Algorithm, adpsgd, sgp

__all__ = ["Algorithm", "Node", "ReplayedStep", "Statistics", "adpsgd", "join", "replay", "sgp"]
