"""Input that is made ahead of its use."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def prefetch(items: Iterator[T], count: int = 2) -> Iterator[T]:
    """Yields the items, which a thread makes ahead of their use: `count` of them are kept ready.

    An error in making an item is raised where that item is asked for.

    >>> list(prefetch(iter(range(3))))
    [0, 1, 2]
    """
    end = object()
    executor = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
    try:
        ready = deque(executor.submit(next, items, end) for _ in range(count))
        while (item := ready.popleft().result()) is not end:
            ready.append(executor.submit(next, items, end))
            yield item  # pyright: ignore[reportReturnType]
    finally:
        # Not waiting for the thread: garbage is collected by any thread, the input's included.
        executor.shutdown(wait=False, cancel_futures=True)
