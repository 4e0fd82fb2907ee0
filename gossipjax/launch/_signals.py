"""Contexts that handle signals, and errors that another start would repeat."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

EX_CONFIG = 78  # of sysexits.h, which Python does not know everywhere
FINAL = (2, 64, EX_CONFIG)  # exit statuses that another start would repeat
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


@contextlib.contextmanager
def final_errors() -> Iterator[None]:
    """Lets the program end with status 78 (`EX_CONFIG`) if nobody catches a `ValueError` in it.

    The launcher, `until.sh` and others that start programs again see by this status that the next
    start would fail as well, until somebody changes a setting. `initialize`, `asynchronous.join`
    and `Checkpoints.resume` use it.

    >>> from gossipjax import launch
    >>> with launch.final_errors():
    ...     raise ValueError("rate must be > 0, got 0.")
    Traceback (most recent call last):
    ValueError: rate must be > 0, got 0.
    """
    try:
        yield
    except ValueError as error:
        error.exit_status = EX_CONFIG  # pyright: ignore[reportAttributeAccessIssue]
        if not _former_hooks:
            _former_hooks.append(sys.excepthook)
            sys.excepthook = _report
        raise


_former_hooks: list[Any] = []  # the `sys.excepthook` that `_report` replaced, if it did


def _report(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
    """Reports an uncaught error as before, and exits with the status that `final_errors` set."""
    _former_hooks[0](kind, error, traceback)  # in a job of several processes, it exits by itself
    if status := getattr(error, "exit_status", None):
        sys.exit(status)
