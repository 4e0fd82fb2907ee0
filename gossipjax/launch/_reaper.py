"""Kills the processes that a killed launcher leaves behind.

A launcher that gets SIGKILL cannot stop its processes. So the launcher starts this file as a
script, which reads the process ids of the job from its input. The input ends when the launcher
ends, for whatever reason. Then the script kills the processes that have not exited. The script
imports nothing but the standard library, so it starts at once (`python -I -S`) and needs little
memory.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from typing import IO

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Reaper:
    """Runs the script while the context is open.

    The input of the script is a pipe. A line is the id of a process that leads a session, or minus
    the id when the process has exited.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        command = [sys.executable, "-I", "-S", __file__]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True
        )
        assert self._process.stdin is not None
        # A new process writes its id there before it does anything else.
        self.pipe: IO[bytes] = self._process.stdin

    def __enter__(self) -> Reaper:
        return self

    def __exit__(self, *_: object) -> None:
        self.pipe.close()
        self._process.wait()

    def discard(self, group: int) -> None:
        """Report that a process has exited."""
        with self._lock, contextlib.suppress(OSError):
            self.pipe.write(b"-%d\n" % group)


def signal_group(group: int, number: int) -> None:
    """Send a signal to a process group, if it still exists."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _reap(lines: Iterable[str]) -> None:
    for number in STOP_SIGNALS:  # terminals and schedulers may send them to all processes
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for process_id in map(int, lines):
        if process_id > 0:
            groups.add(process_id)
        else:
            groups.discard(-process_id)
    for group in groups:
        signal_group(group, signal.SIGKILL)


if __name__ == "__main__":
    _reap(sys.stdin)
