"""Signal handlers for the duration of a context, and names of signals."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

Handler = Callable[[int, FrameType | None], object] | signal.Handlers


@contextlib.contextmanager
def signal_handlers(signals: Iterable[signal.Signals], handler: Handler) -> Iterator[None]:
    """Call `handler` on these signals within the context, and restore the former handlers after it.

    On threads other than the main thread this does nothing, because Python sets signal handlers
    on the main thread only. SIGHUP stays ignored where it is ignored (`nohup`).

    Args:
      signals: for example `[signal.SIGTERM]`.
      handler: called as `handler(number, frame)`, on the main thread; or `signal.SIG_IGN`.

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


def describe_signal(number: int) -> str:
    """Name and number of a signal.

    >>> describe_signal(9)
    'SIGKILL, signal 9'
    """
    names = {int(s): s.name for s in signal.Signals}
    return f"{names.get(number, 'unnamed')}, signal {number}"
