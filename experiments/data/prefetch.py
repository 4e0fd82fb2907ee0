"""Input that is made ahead of its use."""

import contextlib
import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")


def prefetch(
    items: Iterator[T],
    count: int = 2,
    waiting: contextlib.AbstractContextManager[Any] | None = None,
) -> Iterator[T]:
    """Yields the items, which a thread makes ahead of their use: `count` of them are kept ready.

    An error in making an item is raised where that item is asked for.

    Args:
        items: what is made.
        count: number of items that are kept ready.
        waiting: entered while an item is asked for that is not ready, such as a clock.

    >>> list(prefetch(iter(range(3))))
    [0, 1, 2]
    """
    end = object()
    waiting = waiting or contextlib.nullcontext()
    executor = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
    try:
        ready = deque(executor.submit(next, items, end) for _ in range(count))
        while True:
            future = ready.popleft()
            if not future.done():
                with waiting:
                    wait([future])
            if (item := future.result()) is end:
                return
            ready.append(executor.submit(next, items, end))
            yield item  # pyright: ignore[reportReturnType]
    finally:
        # Not waiting for the thread: garbage is collected by any thread, the input's included.
        executor.shutdown(wait=False, cancel_futures=True)


def map_ahead(
    function: Callable[[T], R], items: Iterable[T], ahead: int, threads: int | None = None
) -> Iterator[R]:
    """Yields `function(item)` in order; threads compute it for the next `ahead` items, too.

    Threads and not processes, because decoding and resizing images run without Python's lock, and
    because nothing is copied from process to process, or forked under JAX. An error is raised where
    its result is asked for.

    Args:
        function: may run for several items at a time.
        items: may be infinite; taken in the thread that asks for the results.
        ahead: number of items that are being worked on or wait to be taken.
        threads: None is the number of cores.

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
    """Returns the number of cores that this process may use.

    >>> count_cores() >= 1
    True
    """
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1
