"""Eight virtual CPU devices, two threads for each, and one process: set before JAX's first use."""

import os

import jax

from gossipjax import launch

jax.config.update("jax_num_cpu_devices", 8)
os.environ.setdefault("NPROC", "16")
launch.initialize(processes=1)  # programs that ask again later, in this process, get the same
