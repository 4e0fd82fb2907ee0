"""Lets a process tell the launcher that it advances, by numbers in a file.

The file is mapped into the memory of the process. So the process makes no system call, and the
launcher can read the file whatever the process does. This module imports nothing but the standard
library.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import mmap
import os
import signal
import struct
import time
from pathlib import Path
from typing import NamedTuple

PROGRESS = "GOSSIPJAX_PROGRESS"  # environment variable of a process: the path of its file
STACK_SIGNAL = signal.SIGUSR2  # a process then writes its stacks; Slurm's scripts use SIGUSR1
NO_STEP = -1

_LAYOUT = struct.Struct("=4q")


class Beat(NamedTuple):
    """The last numbers that a process wrote."""

    process_id: int  # on this machine; 0 before the process has written anything
    nanoseconds: int  # when it last advanced, by `time.monotonic_ns()`; 0 if never
    step: int | None  # the newest step that the process named
    is_slow: bool  # something slow may follow


def advance(step: int | None = None, *, slow: bool = False) -> None:
    """Tells `python -m gossipjax.launch --stall SECONDS` that this process advances.

    `gx.TrainStep`, asynchronous nodes and checkpoints call `advance` for you. If your loop uses
    nothing of the kind, call `advance` at every step, and also between two steps if something takes
    long. A call takes a microsecond, works on any thread, and does nothing outside of the launcher.

    Args:
      step: the number of the step that begins. By this number the launcher finds the process that
        is behind.
      slow: whether something slow follows: compilation, a download or a long evaluation. Until the
        next call, the limit is then `--stall-slow`.

    >>> from gossipjax import launch
    >>> for step in range(3):
    ...     launch.advance(step)
    >>> launch.advance(slow=True)  # before something slow, and
    >>> launch.advance()  # after it
    """
    writer = find_writer()
    if writer is not None:
        writer.write(step, slow, time.monotonic_ns())


def create_beat(path: Path) -> None:
    """Creates the file of a process that has said nothing."""
    path.write_bytes(_LAYOUT.pack(0, 0, NO_STEP, 0))


def read_beat(path: Path) -> Beat:
    """Reads the last numbers that a process wrote."""
    process_id, nanoseconds, step, is_slow = _LAYOUT.unpack(path.read_bytes()[: _LAYOUT.size])
    return Beat(process_id, nanoseconds, None if step == NO_STEP else step, bool(is_slow))


class _Writer:
    """The file of this process, mapped into its memory."""

    def __init__(self, path: Path):
        with path.open("r+b") as file:
            self._words = mmap.mmap(file.fileno(), _LAYOUT.size)
        self._process_id = os.getpid()
        self._step = NO_STEP
        if signal.getsignal(STACK_SIGNAL) == signal.SIG_DFL:  # else the program itself uses it
            # A handler in C writes the stacks to stderr, however the program hangs.
            faulthandler.register(STACK_SIGNAL, file=2, all_threads=True)
        self.write(None, False, 0)

    def write(self, step: int | None, slow: bool, nanoseconds: int) -> None:
        if step is not None:
            self._step = step
        _LAYOUT.pack_into(self._words, 0, self._process_id, nanoseconds, self._step, slow)


@functools.cache
def find_writer() -> _Writer | None:
    """Returns the file of this process; None without a launcher that watches.

    From the first call on, the launcher can ask this process for its stacks.

    Programs that this process starts inherit the variable, and must not use the file.
    """
    path = os.environ.get(PROGRESS)
    if path:
        with contextlib.suppress(OSError):  # the launcher that made it has ended
            process_id = read_beat(Path(path)).process_id
            if process_id in (0, os.getpid()) or not _is_alive(process_id):
                return _Writer(Path(path))
    return None


# A child of the process is not watched, however it was made.
os.register_at_fork(after_in_child=find_writer.cache_clear)


def _is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
