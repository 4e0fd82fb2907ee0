"""A check that the batches of a run fit into the memory of this machine."""

import os

import jax
import numpy as np

import gossipjax as gx
from experiments.training.options import TrainingOptions
from experiments.training.task import Task

COPIES = 4  # of a batch: two are kept ready, one is being made, and one is on the devices


def require_memory(task: Task, options: TrainingOptions, nodes: gx.Nodes) -> None:
    """Raises `ValueError` if this process's batches alone need more memory than the machine has.

    A batch of one example per node is made and measured. What the model needs for a larger batch,
    its activations above all, comes on top and is not known here.
    """
    total = total_memory()
    if total is None:
        return
    examples = next(task.batches(nodes, 1, options.seed[0], start=0))
    row_bytes = sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(examples))
    needed = COPIES * row_bytes * options.batch_size_per_node
    if needed > total:
        raise ValueError(
            f"batches of {len(nodes.local)} nodes must fit into {total / 1e9:.1f} GB of memory, "
            f"got {needed / 1e9:.1f} GB for {COPIES} batches with "
            f"--batch-size-per-node {options.batch_size_per_node}: lower it, or --nodes."
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
