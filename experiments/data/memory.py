"""A check that the batches of a run fit into the memory of this machine."""

import os
from typing import Any

import jax
import numpy as np

COPIES = 4  # of a batch: two are kept ready, one is being made, and one is on the devices


def require_memory(
    examples: Any,
    batch_size_per_node: int,
    option: str = "--batch-size-per-node",
    examples_per_node: int = 1,
) -> None:
    """Raises `ValueError` if a process's batches alone need more memory than the machine has.

    What a model needs for a larger batch, its activations above all, comes on top and is not known
    here.

    Args:
      examples: a small batch of the nodes of this process.
      batch_size_per_node: examples per node and step.
      option: its name on the command line.
      examples_per_node: those in `examples`.
    """
    total = total_memory()
    nbytes = sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(examples))
    needed = COPIES * nbytes * batch_size_per_node / examples_per_node
    if total is not None and needed > total:
        raise ValueError(
            f"the batches must fit into {total / 1e9:.1f} GB of memory, got {needed / 1e9:.1f} GB "
            f"for {COPIES} of them with {option} {batch_size_per_node}: lower it, or "
            "--nodes."
        )


def total_memory() -> int | None:
    """Returns the bytes of memory of this machine; None where the system does not tell.

    >>> total_memory() is None or total_memory() > 0
    True
    """
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
