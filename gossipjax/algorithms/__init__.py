"""Gossip as optax transforms: a file for each algorithm. No algorithm builds on another."""

__all__: list[str] = []
