"""Gossip as optax transforms: what they share (frame), then a file per algorithm."""

from gossipjax.algorithms import (
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
