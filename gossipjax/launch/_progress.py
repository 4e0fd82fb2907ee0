"""Lets a process tell the launcher that it advances, by numbers in a file.

The file is mapped into the memory of the process. So the process makes no system call, and the
launcher can read the file whatever the process does. This module imports nothing but the standard
library.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import signal
import struct
import time
from typing import NamedTuple

PROGRESS = "GOSSIPJAX_PROGRESS"  # environment variable of a process: the path of its file
STACK_SIGNAL = signal.SIGUSR2  # a process then writes its stacks; Slurm's scripts use SIGUSR1
NO_STEP = -1
LAYOUT = struct.Struct("=4q")  # of a `Beat` in the file


class Beat(NamedTuple):
    """The last numbers that a process wrote."""

    process_id: int = 0  # on this machine; 0 before the process has written anything
    nanoseconds: int = 0  # when it last advanced, by `time.monotonic_ns()`; 0 if never
    step: int = NO_STEP  # the newest step that the process named
    is_slow: int = 0  # 1 if something slow may follow


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
    file = open_progress()
    if file is not None:
        if step is None:
            step = Beat(*LAYOUT.unpack_from(file)).step
        LAYOUT.pack_into(file, 0, os.getpid(), time.monotonic_ns(), step, slow)


_files: list[mmap.mmap] = []  # at most one: the file of this process, mapped into its memory
os.register_at_fork(after_in_child=_files.clear)  # the child is not watched


def open_progress() -> mmap.mmap | None:
    """Returns the file in which this process says that it advances; None if no launcher watches.

    From the first call on, the launcher can ask this process for its stacks. Programs that this
    process starts then do not inherit the variable, as they must not use the file.
    """
    if not _files and os.environ.get(PROGRESS):
        # The launcher may have ended, or another thread may have taken the variable.
        with contextlib.suppress(OSError, KeyError):
            with open(os.environ.pop(PROGRESS), "r+b") as file:
                _files.append(mmap.mmap(file.fileno(), LAYOUT.size))
            LAYOUT.pack_into(_files[0], 0, *Beat(os.getpid()))
            if signal.getsignal(STACK_SIGNAL) == signal.SIG_DFL:  # else the program uses the signal
                # A handler in C writes the stacks to stderr, however the program hangs.
                faulthandler.register(STACK_SIGNAL, file=2, all_threads=True)
    return _files[0] if _files else None
