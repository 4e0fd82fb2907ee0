"""Handles signals while a context is open."""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType

GRACE = "GOSSIPJAX_GRACE"  # environment variable of a process: seconds from SIGTERM to SIGKILL
NOTICE_SECONDS = 4.0  # after a signal
NO_SIGNAL = b"\0"

Handler = Callable[[int, FrameType | None], object] | signal.Handlers


@contextlib.contextmanager
def signal_handlers(
    signals: Iterable[signal.Signals], handler: Handler, notice: Callable[[], str] | None = None
) -> Iterator[None]:
    """Handles signals by `handler` while the context is open, and then restores former handlers.

    On other threads than the main thread `signal_handlers` does nothing, because Python sets signal
    handlers on the main thread only. If SIGHUP is ignored (`nohup`), it stays ignored.

    Args:
      signals: the signals that are handled.
      handler: the function, as for `signal.signal`.
      notice: a function that returns a text. If the context is still open 4 s after a signal, a
        thread writes the text to stderr, once. The thread runs even while the main thread compiles,
        when no handler can run.

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
    noticing = _noticing(caught, notice) if notice and caught else contextlib.nullcontext()
    former_handlers = {s: signal.signal(s, handler) for s in caught}
    try:
        with noticing:
            yield
    finally:
        for number, former in former_handlers.items():
            signal.signal(number, former)


@contextlib.contextmanager
def _noticing(signals: Sequence[int], notice: Callable[[], str]) -> Iterator[None]:
    """Python writes the numbers of signals to a pipe at once, also while it compiles."""
    near, far = os.pipe()
    os.set_blocking(far, False)
    _forget_in_children()
    former = signal.set_wakeup_fd(far, warn_on_full_buffer=False)
    arguments = (near, former, signals, notice)
    threading.Thread(target=_notice, args=arguments, daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(former)
        os.write(far, NO_SIGNAL)  # children may have this end, too, so closing it tells nothing
        os.close(far)


@functools.cache
def _forget_in_children() -> None:
    """After a fork, signals to the child do not reach this process."""
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


def _notice(near: int, former: int, signals: Sequence[int], notice: Callable[[], str]) -> None:
    seconds = None
    with open(near, "rb", buffering=0) as numbers:
        while True:
            if select.select([numbers], [], [], seconds)[0]:
                number = numbers.read(1)
                if number == NO_SIGNAL:
                    return
                if former != -1:
                    os.write(former, number)
                seconds = NOTICE_SECONDS if number[0] in signals else seconds
                continue
            grace = os.environ.get(GRACE)
            limit = f" It is killed {grace} s after the signal (--grace)." if grace else ""
            print(f"gossipjax: {notice()}{limit}", file=sys.stderr, flush=True)
            seconds = None
            signals = ()  # once is enough


def describe_signal(number: int) -> str:
    """Returns the name and number of a signal.

    >>> describe_signal(9)
    'SIGKILL, signal 9'
    """
    names = {int(s): s.name for s in signal.Signals}
    return f"{names.get(number, 'unnamed')}, signal {number}"
