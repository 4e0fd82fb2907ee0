"""Asynchronous training: each node is its own program, and sends while it computes.

`join` needs pyzmq (`pip install pyzmq`). Nothing needs `jax.distributed`.
"""

from gossipjax.asynchronous._join import join
from gossipjax.asynchronous._journal import Account, account
from gossipjax.asynchronous._node import Node, Statistics
from gossipjax.asynchronous.algorithms import Algorithm, Outer, adpsgd, outer, sgp
from gossipjax.renamed import old_names

__all__ = [
    "Account",
    "Algorithm",
    "Node",
    "Outer",
    "Statistics",
    "account",
    "adpsgd",
    "join",
    "outer",
    "sgp",
]
__getattr__ = old_names("asynchronous")
