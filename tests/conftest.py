"""Eight virtual CPU devices, two threads for each, set before JAX starts its backend."""

import os

import jax

jax.config.update("jax_num_cpu_devices", 8)
os.environ.setdefault("NPROC", "16")
