"""Gossip as optax transforms: state and wrapper, then a file per algorithm."""

__all__ = ["adpsgd", "allreduce", "dpsgd", "easgd", "osgp", "sgp", "state"]
