"""Gossip as optax transforms: state and wrapper, then a file per algorithm."""

from gossipjax.algorithms import (
    adpsgd,
    allreduce,
    apply_if_finite,
    d2,
    dpsgd,
    easgd,
    gradient_tracking,
    masks,
    osgp,
    quasi_global,
    relay,
    rounding,
    sgp,
    state,
    trees,
)

__all__ = [
    "adpsgd",
    "allreduce",
    "apply_if_finite",
    "d2",
    "dpsgd",
    "easgd",
    "gradient_tracking",
    "masks",
    "osgp",
    "quasi_global",
    "relay",
    "rounding",
    "sgp",
    "state",
    "trees",
]
