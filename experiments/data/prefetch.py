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

    Threads are enough, because decoding and resizing images run without Python's lock. An error is
    raised where its result is asked for. `items` may be infinite, and are taken in the thread that
    asks for the results.

    >>> list(map_ahead(lambda x: x * x, range(4), ahead=2))
    [0, 1, 4, 9]
    """
    executor = ThreadPoolExecutor(count_cores(), thread_name_prefix="map_ahead")
    try:
        started = (executor.submit(function, item) for item in items)
        results = deque(itertools.islice(started, ahead))
        while results:
            result = results.popleft().result()
            results.extend(itertools.islice(started, 1))
            yield result
    finally:
        executor.shutdown(wait=False, cancel_futures=True)


def count_cores() -> int:
    """Returns the number of cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1
