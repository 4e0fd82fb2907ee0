"""Input that is made ahead of its use, or only where it is used, and the memory that it takes."""

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

T = TypeVar("T")
R = TypeVar("R")

COPIES = 4  # of a batch: two are kept ready, one is being made, and one is on the devices


class LazyBatch(NamedTuple):
    """A batch of E examples of which a process reads those that it needs."""

    size: int  # E
    read: Callable[[np.ndarray], Any]  # integers `[...]` below E -> arrays `[..., ...]`


def map_ahead(
    function: Callable[[T], R], items: Iterable[T], ahead: int, threads: int | None = None
) -> Iterator[R]:
    """Yields `function(item)` in order; threads compute it for the next `ahead` items, too.

    Threads and not processes, because decoding and resizing images run without Python's lock, and
    nothing is copied from process to process. An error is raised where its result is asked for.

    `items` may be infinite; they are taken in the thread that asks for the results. `ahead` of them
    are being worked on or wait to be taken, by as many threads as cores if not given.

    >>> list(map_ahead(lambda x: x * x, range(4), ahead=2))
    [0, 1, 4, 9]
    """
    iterator = iter(items)
    executor = ThreadPoolExecutor(threads or count_cores(), thread_name_prefix="map_ahead")
    try:
        first = itertools.islice(iterator, ahead)
        results = deque(executor.submit(function, item) for item in first)
        while results:
            result = results.popleft().result()
            results.extend(
                executor.submit(function, item) for item in itertools.islice(iterator, 1)
            )
            yield result
    finally:
        executor.shutdown(wait=False, cancel_futures=True)


def count_cores() -> int:
    """Returns the number of cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def require_memory(
    examples: Any,
    batch_size_per_node: int,
    option: str = "--batch-size-per-node",
    examples_per_node: int = 1,
) -> None:
    """Raises `ValueError` if a process's batches alone need more memory than the machine has.

    `examples` is a small batch of the nodes of this process, `examples_per_node` of each; `option`
    is the name of `batch_size_per_node` on the command line.
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
    """Returns the bytes of memory of this machine; None where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
