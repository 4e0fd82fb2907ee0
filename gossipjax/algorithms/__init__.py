"""Gossip as optax transforms: state and wrapper, then a file per algorithm."""

from gossipjax.algorithms import (
    adpsgd,
    allreduce,
    apply_if_finite,
    choco,
    dpsgd,
    easgd,
    masks,
    osgp,
    rounding,
    sgp,
    state,
)

__all__ = [
    "adpsgd",
    "allreduce",
    "apply_if_finite",
    "choco",
    "dpsgd",
    "easgd",
    "masks",
    "osgp",
    "rounding",
    "sgp",
    "state",
]
