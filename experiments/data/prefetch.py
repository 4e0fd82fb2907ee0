"""Input that is made ahead of its use, or only where it is used."""

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np

T = TypeVar("T")
R = TypeVar("R")


class LazyBatch(NamedTuple):
    """A batch of E examples of which a process reads those that it needs."""

    size: int  # E
    read: Callable[[np.ndarray], Any]  # integers `[...]` below E -> arrays `[..., ...]`


def map_ahead(function: Callable[[T], R], items: Iterable[T], ahead: int) -> Iterator[R]:
    """Yields `function(item)` in order; threads compute it for the next `ahead` items, too.

    Threads and not processes, because decoding and resizing images run without Python's lock, and
    nothing is copied from process to process. An error is raised where its result is asked for.

    `items` may be infinite; they are taken in the thread that asks for the results. `ahead` of them
    are being worked on, by as many threads as cores, or wait to be taken.

    >>> list(map_ahead(lambda x: x * x, range(4), ahead=2))
    [0, 1, 4, 9]
    """
    iterator = iter(items)
    executor = ThreadPoolExecutor(count_cores(), thread_name_prefix="map_ahead")
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
