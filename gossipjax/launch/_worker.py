"""Runs one process of a job on this machine: its session, its output and its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from gossipjax.launch._signals import describe_signal

MAX_WAITING_LINES = 10_000  # of each stream; then the processes wait, as at any full pipe
MAX_LINE_BYTES = 1 << 16  # longer lines are split
LAST_LINES = 20  # lines of a failed process's output that are shown
DRAIN_SECONDS = 2.0  # time to read the output of a process that has exited
LOOK_SECONDS = 0.05  # between two looks whether a process has exited, or output is written

# In the group of each process a shell waits for the end of its input, which is the end of the
# launcher, and then kills the group. It is no child of the program, which may wait for children.
GUARDED = """
exec 3<&0
(trap "" TERM INT HUP; (read -r _ <&3; kill -KILL 0) >/dev/null 2>&1 &)
exec 3<&- "$@" </dev/null
"""


class Output:
    """A stream of the launcher. A thread writes it, so that nothing else waits for the reader.

    If the reader pauses, as `less` does, the lines wait in this object. If nobody reads the stream
    any more, the thread calls `on_closed`.
    """

    def __init__(self, descriptor: int):
        self.on_closed: Callable[[], object] = lambda: None
        self._descriptor = descriptor
        self._lines = queue.Queue[bytes]()
        self._thread = threading.Thread(target=self._write_lines, daemon=True)

    def put(self, line: bytes) -> None:
        if self._thread.ident is None:
            self._thread.start()
        self._lines.put(line)

    def has_room(self) -> bool:
        return self._lines.qsize() < MAX_WAITING_LINES

    def is_written(self) -> bool:
        return self._lines.unfinished_tasks == 0

    def _write_lines(self) -> None:
        while True:
            line = self._lines.get()
            try:
                while line:
                    line = line[os.write(self._descriptor, line) :]
            except OSError:
                self.on_closed()
            self._lines.task_done()


STDOUT = Output(1)
STDERR = Output(2)


def log(text: str) -> None:
    """Writes a message of the launcher to stderr, without waiting for its reader."""
    STDERR.put(f"[launch] {text}\n".encode())


class Worker:
    """A running process of the job.

    The process leads its own session. Signals reach its whole process group. When the process
    exits, the rest of the group is killed, but not children that lead other sessions. `rank` is the
    prefix of its output.
    """

    def __init__(self, rank: int, command: Sequence[str], environment: Mapping[str, str]):
        self.rank = rank
        self._last_lines = deque[bytes](maxlen=LAST_LINES)
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", GUARDED, "sh", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )

    @property
    def process_id(self) -> int:
        """The number of the process, and of its session."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process has not been waited for, so that its number is not another's."""
        return self._process.returncode is None

    def send_signal(self, number: int) -> None:
        """Sends a signal to the process group, if the process has not exited."""
        if self.is_running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process_id, number)

    async def wait(self) -> int:
        """Waits for the end of the process and of its output.

        Returns:
          The exit status, or minus the number of the signal that ended the process.
        """
        pipes = (self._process.stdout, self._process.stderr)
        readers = [
            asyncio.create_task(self._forward(pipe, output))
            for pipe, output in zip(pipes, (STDOUT, STDERR), strict=True)
            if pipe is not None
        ]
        while not self._has_exited():
            await asyncio.sleep(LOOK_SECONDS)
        self.send_signal(signal.SIGKILL)  # to the rest of its group
        code = self._process.wait()
        await asyncio.wait(readers, timeout=DRAIN_SECONDS)
        for reader in readers:
            reader.cancel()
        if self._process.stdin is not None:
            self._process.stdin.close()  # a shell that still waits for its end kills the group
        return code

    def _has_exited(self) -> bool:
        if not hasattr(os, "waitid"):  # on macOS before Python 3.13
            return self._process.poll() is not None
        # The process stays a zombie, so that no other group gets its number.
        options = os.WEXITED | os.WNOWAIT | os.WNOHANG
        return os.waitid(os.P_PID, self.process_id, options) is not None

    async def _forward(self, pipe: IO[bytes], output: Output) -> None:
        """Passes lines on with the rank in front, and keeps the last lines.

        After the process has exited, the rest of its pipe is passed on without waiting for room.
        """
        reader = asyncio.StreamReader()
        connect = asyncio.get_running_loop().connect_read_pipe
        transport, _ = await connect(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        rest = b""
        with contextlib.closing(transport):
            while (data := await reader.read(MAX_LINE_BYTES)) or rest:
                *lines, rest = (rest + data).split(b"\n")
                if rest and (not data or len(rest) >= MAX_LINE_BYTES):
                    lines.append(rest)
                    rest = b""
                for line in lines:
                    self._last_lines.append(line)
                    output.put(b"[%d] %s\n" % (self.rank, line))
                while self.is_running and not output.has_room():
                    await asyncio.sleep(LOOK_SECONDS)

    def describe_failure(self, code: int, consequence: str) -> str:
        """Describes why the process failed, what follows, and the last lines of its output."""
        reason = f"exit status {code}" if code > 0 else describe_signal(-code)
        lines = [line.decode(errors="replace").rstrip() for line in self._last_lines]
        output = ["its last lines:", *(f"    {line}" for line in lines)] if lines else ["no output"]
        return f"rank {self.rank} failed ({reason}), {consequence}; " + "\n".join(output)
