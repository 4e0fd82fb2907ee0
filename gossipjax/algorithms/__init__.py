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
    outer,
    rounding,
    sgp,
    state,
    uneven_data,
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
    "outer",
    "rounding",
    "sgp",
    "state",
    "uneven_data",
]
