"""How many calls run at a time, and the devices of each."""

import dataclasses
import os
import subprocess
import sys

MAX_CPU_JOBS = 8
PROBE = "import jax; print(jax.default_backend(), jax.local_device_count())"


@dataclasses.dataclass(frozen=True)
class Devices:
    """What runs side by side can have.

    Attributes:
      environments: environment variables of each.
    """

    environments: tuple[dict[str, str], ...]

    @property
    def jobs(self) -> int:
        """How many runs at a time."""
        return len(self.environments)


def find_devices(jobs: int | None) -> Devices:
    """Returns what each of some runs has: a GPU; without GPUs, all share the cores.

    Args:
      jobs: how many; None is one for each GPU, or for each core, at most 8.

    Raises:
      ValueError: if there are fewer GPUs.
    """
    probe = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True)
    platform, count = (probe.stdout.split() or ["cpu", "1"])[-2:]
    if platform == "cpu":
        return Devices(({},) * (jobs or min(MAX_CPU_JOBS, os.cpu_count() or 1)))
    devices = int(count) if platform in ("gpu", "cuda", "rocm") else 1
    if jobs is not None and jobs > devices:
        raise ValueError(
            f"--jobs must be at most {devices}, one for each device of {platform}, got {jobs}."
        )
    if devices == 1 or jobs == 1:
        return Devices(({},))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = visible if len(visible) == devices else [f"{index}" for index in range(devices)]
    return Devices(tuple({"CUDA_VISIBLE_DEVICES": name} for name in names[:jobs]))
