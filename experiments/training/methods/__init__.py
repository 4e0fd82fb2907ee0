"""The algorithms and topologies that programs know by name."""
