"""Runs one process of a job on this machine: its session, its output and its end."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import IO

MAX_LINE_BYTES = 1 << 16  # longer lines are split
LAST_LINES = 20  # lines of a failed process's output that are shown
# How often `poll` looks whether all output of a process that has exited has come. It counts looks,
# as clocks jump when a machine wakes up.
DRAIN_LOOKS = 40
WRITING = threading.Lock()  # held while a line of output is written, so that lines stay whole
CLOSED = set[int]()  # of the descriptors 1 and 2 of the launcher, those that nobody reads any more

# In the group of each process a shell waits for the end of its input, which is the end of the
# launcher, and then kills the group. It is no child of the program, which may wait for children.
GUARDED = """
exec 3<&0
(trap "" TERM INT HUP; (read -r _ <&3; kill -KILL 0) >/dev/null 2>&1 &)
exec 3<&- "$@" </dev/null
"""


def log(text: str) -> None:
    """Writes a message of the launcher to stderr."""
    write(2, f"[launch] {text}\n".encode())


def write(descriptor: int, data: bytes) -> None:
    """Writes all data to stdout (1) or stderr (2); notes in `CLOSED` if nobody reads them."""
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except OSError:
        CLOSED.add(descriptor)


class Worker:
    """A running process of the job.

    The process leads its own session. Signals reach its whole process group. When the process
    exits, the rest of the group is killed, but not children that lead other sessions. `rank` is the
    prefix of its output.
    """

    def __init__(self, rank: int, command: Sequence[str], environment: Mapping[str, str]):
        self.rank = rank
        self._last_lines = deque[bytes](maxlen=LAST_LINES)
        # Nothing is written: the pipe closes when this program ends, which the shell notices.
        read_end, self._lifeline = os.pipe()
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", GUARDED, "sh", *command],
            stdin=read_end,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        os.close(read_end)
        self.process_id = self._process.pid  # also the id of its session and group
        pipes = (self._process.stdout, 1), (self._process.stderr, 2)
        self._readers = [threading.Thread(target=self._forward, args=p, daemon=True) for p in pipes]
        for reader in self._readers:
            reader.start()
        self._drain_looks_left = DRAIN_LOOKS  # how many are left, after the end of the process
        self._guard_poll = select.poll()
        self._guard_poll.register(self._lifeline, 0)  # reports if the shell that reads it has ended

    def send_signal(self, number: int) -> None:
        """Sends a signal to the process group, if the process has not exited."""
        if self._process.returncode is None:  # else another process may have its id by now
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process_id, number)

    def poll(self) -> int | None:
        """Returns None until the process and its output end, then the exit status or -signal."""
        if self._process.returncode is None:
            if not self._has_exited() and not self._guard_poll.poll(0):
                return None
            # Kills the rest of its group. If the shell that guards the group has ended, the process
            # itself, too.
            self.send_signal(signal.SIGKILL)
            self._process.wait()
        self._drain_looks_left -= 1
        # A reader may wait for long, and hold the lock, because the launcher's own output is full.
        may_drain = self._drain_looks_left > 0 or WRITING.locked()
        if may_drain and any(reader.is_alive() for reader in self._readers):
            return None
        os.close(self._lifeline)  # the shell that guards the group sees it, and kills what is left
        return self._process.returncode

    def _has_exited(self) -> bool:
        """Says whether the process has exited; where possible, without reaping it."""
        if not hasattr(os, "waitid"):  # on macOS before Python 3.13
            return self._process.poll() is not None
        # The process stays a zombie, so that no other group gets its id before the group is killed.
        options = os.WEXITED | os.WNOWAIT | os.WNOHANG
        return os.waitid(os.P_PID, self.process_id, options) is not None

    def _forward(self, pipe: IO[bytes], descriptor: int) -> None:
        """Passes lines of output on with the rank in front; keeps the last ones for an error."""
        with pipe:
            while line := pipe.readline(MAX_LINE_BYTES):
                self._last_lines.append(line)
                with WRITING:
                    write(descriptor, b"[%d] %s\n" % (self.rank, line.removesuffix(b"\n")))

    def describe_failure(self, code: int, consequence: str) -> str:
        """Says how the process failed, what follows from that, and what it printed last."""
        name = next((each.name for each in signal.Signals if each == -code), "unnamed")
        reason = f"exit status {code}" if code > 0 else f"{name}, signal {-code}"
        lines = [line.decode(errors="replace").rstrip() for line in list(self._last_lines)]
        output = ["its last lines:", *(f"    {line}" for line in lines)] if lines else ["no output"]
        return f"rank {self.rank} failed ({reason}), {consequence}; " + "\n".join(output)
