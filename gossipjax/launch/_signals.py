"""Handles signals while a context is open."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

Handler = Callable[[int, FrameType | None], object] | signal.Handlers


@contextlib.contextmanager
def signal_handlers(signals: Iterable[signal.Signals], handler: Handler) -> Iterator[None]:
    """Handles signals by `handler` while the context is open, and then restores former handlers.

    On other threads than the main thread `signal_handlers` does nothing, because Python sets signal
    handlers on the main thread only. If SIGHUP is ignored (`nohup`), it stays ignored.

    Args:
      signals: the signals that are handled.
      handler: the function, as for `signal.signal`.

    >>> import signal
    >>> from gossipjax import launch
    >>> received = []
    >>> with launch.signal_handlers([signal.SIGTERM], lambda number, _: received.append(number)):
    ...     signal.raise_signal(signal.SIGTERM)
    >>> received == [signal.SIGTERM]
    True
    """
    caught = [s for s in signals if s != signal.SIGHUP or signal.getsignal(s) != signal.SIG_IGN]
    if threading.current_thread() is not threading.main_thread():
        caught = []
    former_handlers = {s: signal.signal(s, handler) for s in caught}
    try:
        yield
    finally:
        for number, former in former_handlers.items():
            signal.signal(number, former)
