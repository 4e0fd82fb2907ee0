"""Gossip as optax transforms: what they share (frame), then a file per algorithm."""

__all__: list[str] = []
