"""Eight virtual CPU devices, two threads for each, and one process: set before JAX's first use.

Most of the tests' time is compilation, so programs are compiled without effort, and only once.
"""

import os
import tempfile

import jax

from gossipjax import launch

jax.config.update("jax_num_cpu_devices", 8)
os.environ.setdefault("NPROC", "16")
flags = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = f"{flags} --xla_backend_optimization_level=0"
cache = tempfile.TemporaryDirectory(prefix="gossipjax-tests-")  # of this process: no other writes
jax.config.update("jax_compilation_cache_dir", cache.name)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
launch.initialize(num_processes=1)  # programs that ask again later, in this process, get the same
