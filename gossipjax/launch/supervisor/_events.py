"""What happens to a job, in the order in which the launcher hears of it."""

from __future__ import annotations

import contextlib
import math
import queue
import time
from collections.abc import Iterator
from typing import NamedTuple

from gossipjax.launch.supervisor._output import STREAMS
from gossipjax.launch.supervisor._reaper import STOP_SIGNALS
from gossipjax.launch.supervisor._signals import signal_handlers
from gossipjax.launch.supervisor._worker import DRAIN_SECONDS, Exited, OutputClosed

MAX_WAIT_SECONDS = 0.5  # for an event, without a look at signals


class Signaled(NamedTuple):
    """The launcher got a signal that asks it to stop."""

    number: int


class DeadlinePassed(NamedTuple):
    """The grace period is over."""


Event = Exited | Signaled | OutputClosed | DeadlinePassed


def next_event(events: queue.SimpleQueue[Event], deadline: float) -> Event | None:
    """Wait for the next event; return None at the deadline, by `time.monotonic()`.

    It waits in short parts: Python runs the handler of a signal that arrives immediately before a
    wait only when the wait is over.
    """
    while True:
        seconds = max(0.0, min(deadline - time.monotonic(), MAX_WAIT_SECONDS))
        try:
            return events.get(timeout=seconds)
        except queue.Empty:
            if time.monotonic() >= deadline:
                return None


@contextlib.contextmanager
def stop_signals(events: queue.SimpleQueue[Event]) -> Iterator[None]:
    """Turn signals into events within the context, and at its end wait until the output is written.

    A reader that pauses may take its time, unless a signal has stopped the job or ends the wait.
    """
    is_stopping = False

    def stop(number: int, _: object) -> None:
        nonlocal is_stopping
        is_stopping = True
        events.put(Signaled(number))

    with signal_handlers(STOP_SIGNALS, stop):
        try:
            yield
        finally:
            deadline = math.inf
            while not all(stream.wait_until_written(MAX_WAIT_SECONDS) for stream in STREAMS):
                if is_stopping:
                    deadline = min(deadline, time.monotonic() + DRAIN_SECONDS)
                if time.monotonic() >= deadline:
                    break
