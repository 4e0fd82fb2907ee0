"""A thread that prepares batches before the training loop needs them."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import jax

from gossipjax.launch import peers
from gossipjax.processes import MEETING_SECONDS
from gossipjax.topology.schedule import require_int

T = TypeVar("T")
# Numbers the calls of `prefetch` with `together`, so that all processes give a call the same name.
_call_numbers = itertools.count()


def prefetch(
    items: Iterable[T],
    count: int = 2,
    *,
    waiting: contextlib.AbstractContextManager[Any] | None = None,
    together: bool = False,
) -> Iterator[T]:
    """Yields the items. A thread makes the items in advance, and keeps `count` of them ready.

    While a step runs, the thread reads the next batches and puts them on the devices:

        for batch in gx.prefetch(map(nodes.split, loader)):

    `loader` is any iterable of batches: Grain, tfds, torch's DataLoader, or a generator.

    Args:
      items: the batches. If making a batch fails, the error is raised when you ask for this batch.
      count: how many batches are kept ready, while the thread makes one more.
      waiting: a context, such as a clock, that is entered while your loop waits for a batch.
      together: whether all processes stop when the first of them has no more batches. Without
        `together`, a process with more batches makes a step alone and waits for the others. The
        threads agree on each batch before it is used, so all processes must call `prefetch` in the
        same order.

    Raises:
      ValueError: if `count` is not an integer >= 1, or `together` is true and the processes have
        not met by `gx.launch.initialize` at a known address.

    >>> import numpy as np, gossipjax as gx
    >>> batches = (np.full(4, step) for step in range(2))
    >>> [batch.tolist() for batch in gx.prefetch(map(gx.Nodes(2).split, batches))]
    [[[0, 0], [0, 0]], [[1, 1], [1, 1]]]
    """
    if together and jax.process_count() > 1:
        if peers.kept is None:
            raise ValueError(
                "together must be False where JAX has found the job by itself, got True: set "
                "GOSSIPJAX_COORDINATOR_ADDRESS for gx.launch.initialize, or give all processes "
                "equally many batches."
            )
        items = _until_one_ends(iter(items), f"gx.prefetch {next(_call_numbers)}", peers.kept)
    return _prefetch(iter(items), require_int(count, "count of prefetch", 1), waiting)


def _until_one_ends(items: Iterator[T], name: str, others: peers.Peers) -> Iterator[T]:
    """Yields items until a process has no more: all say before each item whether they have one."""
    end: Any = object()
    while True:
        item = next(items, end)
        has_item = item is not end
        if not all(others.gather(name, has_item, MEETING_SECONDS)):
            return
        yield item


def _prefetch(
    items: Iterator[T], count: int, waiting: contextlib.AbstractContextManager[Any] | None
) -> Iterator[T]:
    """Yields the items, of which a thread makes `count` in advance."""
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
        # Do not wait for the thread. Of a generator that you leave early, this runs when garbage is
        # collected, maybe in the thread itself, which would wait for its own end.
        executor.shutdown(wait=False, cancel_futures=True)
