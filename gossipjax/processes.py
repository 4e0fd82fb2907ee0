"""What all processes of a job find out together."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def everywhere(true: bool) -> bool:
    """Whether it is true on all processes, which meet here."""
    if jax.process_count() == 1:
        return true
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("all",)), P("all"))
    flags = jax.make_array_from_callback(
        (jax.device_count(),), sharding, lambda index: np.array([true])
    )
    return bool(jax.jit(jnp.all)(flags))


def require_shared_folder(folder: Path) -> None:
    """Raises `OSError` unless the first process can write there and all others see it."""
    problem, probe = None, folder / ".is_writable"
    if jax.process_index() == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe.touch()
        except OSError as error:
            problem = error.strerror
    everywhere(True)  # it is there now, or never
    if problem is None and not probe.exists():
        problem = f"process {jax.process_index()} does not see what process 0 writes there"
    if not everywhere(problem is None):
        raise OSError(
            f"checkpoints cannot be written to {folder}: "
            f"{problem or 'it is not one folder for all processes'}."
        )
    probe.unlink(missing_ok=True)
