"""Eight virtual CPU devices, two threads for each, and one process: set before JAX's first use.

Most of the tests' time is compilation, so programs are compiled without effort, and only once.
The library's public functions must keep to their type hints, and it may promote neither ranks nor
types implicitly.
"""

import gc
import os
import tempfile

import jax
import pytest
from type_checks import check_types

check_types("gossipjax")  # from its first import on

from gossipjax import launch  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
os.environ.setdefault("NPROC", "16")
FAST_TO_COMPILE = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",  # the programs are small
)
if jax.__version_info__ < (0, 11):  # XLA ends a process at a flag that it does not know
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FAST_TO_COMPILE])
else:  # as quick there
    jax.config.update("jax_disable_most_optimizations", True)
cache = tempfile.TemporaryDirectory(prefix="gossipjax-tests-")  # of this process: no other writes
jax.config.update("jax_compilation_cache_dir", cache.name)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
os.environ["JAX_COMPILATION_CACHE_DIR"] = ""  # the programs that tests start have none
launch.initialize(num_processes=1)  # programs that ask again later, in this process, get the same


# The README's command runs the first lane: the library, and the tests of programs that are named
# here. All other tests of experiments, pages and long jobs are the second lane, `pytest -m lab`.
FIRST_LANE = {"test_image.py", "test_plan.py"}
LONG_JOBS = {
    *("test_checkpoint_jobs.py", "test_image_runs.py", "test_recipes.py", "test_restarts.py"),
    *("test_train_steps.py", "test_two_machines.py"),
}


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(items):
    for item in items:
        is_experiment = item.path.parent.name == "experiments" and item.path.name[:5] == "test_"
        if item.path.name in LONG_JOBS or (is_experiment and item.path.name not in FIRST_LANE):
            item.add_marker(pytest.mark.lab)


def pytest_collection_finish():
    """The garbage collector looks at what was imported no more, and less often at the rest."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


@pytest.fixture(scope="module", autouse=True)
def promotion_of_types(request):
    """Programs that train may promote: flax's and optax's code does, BatchNorm and Adam."""
    if request.path.parent.name in ("experiments", "launch"):
        jax.config.update("jax_numpy_dtype_promotion", "standard")
    yield
    jax.config.update("jax_numpy_dtype_promotion", "strict")
