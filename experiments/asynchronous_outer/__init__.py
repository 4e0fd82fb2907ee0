"""Simulated: outer optimizers of workers that are not equally fast, with a server and without."""
