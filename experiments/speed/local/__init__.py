"""Checks that run on this machine: an update, simulated nodes, the input."""
