"""Checks that run on this machine: simulated nodes."""
