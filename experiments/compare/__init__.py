"""A grid of runs in one command, and one table of them."""
