"""Benchmarks of training steps, run by `python -m experiments.speed`."""
