"""How a process says that it advances: numbers in a file that the launcher reads.

The file is mapped into the memory of the process, so saying it is no system call, and the launcher
can read it whatever the process does. This module imports nothing but the standard library.
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
STACK_SIGNAL = signal.SIGUSR2  # on it a process writes its stacks; Slurm's scripts use SIGUSR1
NO_STEP = -1

_LAYOUT = struct.Struct("=5q")


class Beat(NamedTuple):
    """What a process last said."""

    process_id: int  # on this machine; 0 before it has said anything
    nanoseconds: int  # when it last advanced, by `time.monotonic_ns()`; 0 if never
    step: int | None  # of its training, the last one that it named
    is_slow: bool  # something slow may follow
    has_stacks: bool = True  # it writes its stacks on `STACK_SIGNAL`


def advance(step: int | None = None, *, slow: bool = False) -> None:
    """Says that this process advances, for `python -m gossipjax.launch --stall SECONDS`.

    `gx.TrainStep`, asynchronous nodes and checkpoints say it by themselves. A loop without them
    calls this at every step, and between two steps where something takes long. It takes a
    microsecond, on any thread, and does nothing outside of the launcher.

    Args:
      step: number of the step that begins; the launcher names the process that is behind by it.
      slow: whether something slow follows, such as compilation, a download or an evaluation of
        unknown length: until the next call, when it is done, the limit is `--stall-slow`.

    >>> from gossipjax import launch
    >>> for step in range(3):
    ...     launch.advance(step)
    >>> launch.advance(slow=True)  # before something slow, and
    >>> launch.advance()  # after it
    """
    writer = _find_writer()
    if writer is not None:
        writer.write(step, slow)


def enable_stacks() -> None:
    """Lets the launcher take the stacks of this process, which has not advanced yet."""
    _find_writer()


def create_beat(path: Path) -> None:
    """Creates the file of a process that has said nothing."""
    path.write_bytes(_LAYOUT.pack(0, 0, NO_STEP, 0, 0))


def read_beat(path: Path) -> Beat:
    """Reads what a process last said."""
    process_id, nanoseconds, step, *flags = _LAYOUT.unpack(path.read_bytes()[: _LAYOUT.size])
    return Beat(process_id, nanoseconds, None if step == NO_STEP else step, *map(bool, flags))


class _Writer:
    """The file of this process, mapped into its memory."""

    def __init__(self, path: Path):
        with path.open("r+b") as file:
            self._words = mmap.mmap(file.fileno(), _LAYOUT.size)
        self._process_id = os.getpid()
        self._step = NO_STEP
        self._has_stacks = signal.getsignal(STACK_SIGNAL) == signal.SIG_DFL
        if self._has_stacks:  # else the signal is the program's
            # Written to stderr by a handler in C, so that the program may hang in any way.
            faulthandler.register(STACK_SIGNAL, file=2, all_threads=True)
        self._write(0, slow=False)

    def write(self, step: int | None, slow: bool) -> None:
        if step is not None:
            self._step = step
        self._write(time.monotonic_ns(), slow)

    def _write(self, nanoseconds: int, slow: bool) -> None:
        flags = (slow, self._has_stacks)
        _LAYOUT.pack_into(self._words, 0, self._process_id, nanoseconds, self._step, *flags)


@functools.cache
def _find_writer() -> _Writer | None:
    """The file of this process; None outside of the launcher, or where nobody watches.

    A program that the process starts inherits the variable, and must not take the file over.
    """
    path = os.environ.get(PROGRESS)
    if path:
        with contextlib.suppress(OSError):  # the launcher that made it has ended
            process_id = read_beat(Path(path)).process_id
            if process_id in (0, os.getpid()) or not _is_alive(process_id):
                return _Writer(Path(path))
    return None


# A child of the process is not watched, however it was made.
os.register_at_fork(after_in_child=_find_writer.cache_clear)


def _is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
