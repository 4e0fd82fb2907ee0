"""Batches that a thread makes ahead of their use."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

from gossipjax.topology.schedule import require_int

T = TypeVar("T")


def prefetch(
    items: Iterable[T],
    count: int = 2,
    waiting: contextlib.AbstractContextManager[Any] | None = None,
) -> Iterator[T]:
    """Yields the items, which a thread makes ahead of their use: `count` of them are kept ready.

    The next batches are read and put on the devices while a step runs:

        for batch in gx.prefetch(map(nodes.split, loader)):

    where `loader` is any iterable of batches: of Grain, tfds, torch's DataLoader, or a generator.

    Args:
      items: the batches. An error in making one is raised where that one is asked for.
      count: how many are kept ready; one more is being made.
      waiting: a context, such as a clock, that is entered while a batch is waited for.

    Raises:
      ValueError: if `count` is not an integer >= 1.

    >>> import numpy as np, gossipjax as gx
    >>> batches = (np.full(4, step) for step in range(2))
    >>> [batch.tolist() for batch in gx.prefetch(map(gx.Nodes(2).split, batches))]
    [[[0, 0], [0, 0]], [[1, 1], [1, 1]]]
    """
    return _prefetch(iter(items), require_int(count, "count of prefetch", 1), waiting)


def _prefetch(
    items: Iterator[T], count: int, waiting: contextlib.AbstractContextManager[Any] | None
) -> Iterator[T]:
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
