"""Algorithms with a lighter promise: each is one file, tested by one row of the oracle matrix."""

from gossipjax.contrib.adaptive_consensus import adaptive_consensus
from gossipjax.contrib.d2 import d2
from gossipjax.contrib.deepsqueeze import deepsqueeze
from gossipjax.contrib.desloc import desloc
from gossipjax.contrib.mixed_momentum import mixed_momentum
from gossipjax.contrib.quasi_global_adam import quasi_global_adam
from gossipjax.contrib.relay import relay
from gossipjax.contrib.robust import (
    ClippedGossip,
    ClippedSum,
    CoordinateMedian,
    NearestNeighbors,
    TrimmedMean,
    robust_gossip,
)
from gossipjax.contrib.sparta import sparta

__all__ = [
    "ClippedGossip",
    "ClippedSum",
    "CoordinateMedian",
    "NearestNeighbors",
    "TrimmedMean",
    "adaptive_consensus",
    "d2",
    "deepsqueeze",
    "desloc",
    "mixed_momentum",
    "quasi_global_adam",
    "relay",
    "robust_gossip",
    "sparta",
]
