"""Gossip as optax transforms: what they share (frame), then a file per algorithm."""

from gossipjax.algorithms import (
    accumulate,
    adpsgd,
    allreduce,
    apply_if_finite,
    choco,
    deepsqueeze,
    dpsgd,
    easgd,
    frame,
    osgp,
    outer,
    sgp,
    uneven_data,
)

__all__ = [
    "accumulate",
    "adpsgd",
    "allreduce",
    "apply_if_finite",
    "choco",
    "deepsqueeze",
    "dpsgd",
    "easgd",
    "frame",
    "osgp",
    "outer",
    "sgp",
    "uneven_data",
]
