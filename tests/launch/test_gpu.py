"""Settings of XLA and NCCL: what is set, and when it is too late."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from gossipjax import launch

ROOT = Path(__file__).parents[2]
PROGRAM = """
import os
from gossipjax import launch
print(launch.set_gpu_settings(sockets=True, connected_components=True))
print(launch.set_gpu_settings(connected_components=True))
print(os.environ["XLA_FLAGS"])
import jax
print(jax.devices()[0].platform, jax.config.jax_num_cpu_devices, len(jax.devices()))
"""


def test_settings_that_are_given_stay_and_xla_takes_the_others():
    """XLA ends a process at a flag that it does not know."""
    given = "--xla_force_host_platform_device_count=2"
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("NCCL_")},
        "XLA_FLAGS": f" {given}",
        "NCCL_SOCKET_NTHREADS": "2",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    environment.pop("JAX_NUM_CPU_DEVICES", None)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True
    )
    flag = "--xla_gpu_collective_permute_connected_components"
    settings = {"NCCL_NCHANNELS_PER_NET_PEER": "4", "NCCL_NSOCKS_PERTHREAD": "4", flag: "true"}
    lines = [str(settings), "{}", f"{given} {flag}=true", "cpu -1 2"]
    assert done.stdout.splitlines() == lines, done.stderr[-2000:]


def test_settings_come_before_the_first_use_of_jax():
    jax.devices()
    before = dict(os.environ)
    with pytest.raises(RuntimeError, match="must be called before JAX's first use"):
        launch.set_gpu_settings()
    assert dict(os.environ) == before
