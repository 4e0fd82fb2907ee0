"""One process of a job on this machine: environment, session, output and exit."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, NamedTuple

from gossipjax.launch.supervisor._output import STDERR, STDOUT, Output
from gossipjax.launch.supervisor._reaper import Reaper, signal_group
from gossipjax.launch.supervisor._signals import describe_signal

MAX_LINE_BYTES = 1 << 16  # longer lines are split
LAST_LINES = 20  # of a failed process's output
DRAIN_SECONDS = 2.0  # to read the output of a process that has exited
ROOM_SECONDS = 0.1  # between two looks whether a process that waits for room has exited
BAD_USAGE = 2  # exit status of a program that was called wrongly, or would fail again
CANNOT_EXECUTE = (126, 127)  # exit statuses of a shell, and of a program that lacks a library
# The last line on stderr of Python, which may be colored, where the program cannot be imported.
IMPORT_FAILED = re.compile(
    rb"(\x1b\[[\d;]*m)*(ModuleNotFound|Import|Syntax|Indentation|Tab)Error\b|.*: No module named "
)
SIGKILL_STATUS = 128 + signal.SIGKILL  # also that of a shell script whose command was killed

# For glibc: keep the memory that XLA frees, instead of fetching it from the kernel again, page by
# page, for the buffers of the next step. A step with 20 MB of parameters on CPU: 45 ms instead of
# 64. More than 1 GiB at the end of the heap goes back; no limit would make no step faster.
MALLOC_ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}

# The shell reports its process id to the reaper before it becomes the command, so that no process
# starts unknown to the reaper.
REPORT_AND_EXEC = 'echo $$ >&0 && exec "$@" </dev/null'


class Exited(NamedTuple):
    """A process has exited.

    Attributes:
      rank: number of the process.
      code: its exit status, or minus the number of the signal that ended it.
      was_killed: whether the launcher had killed it.
    """

    rank: int
    code: int
    was_killed: bool = False

    @property
    def status(self) -> int:
        """Exit status as a shell reports it: 128 + the number of the signal."""
        return self.code if self.code >= 0 else 128 - self.code

    @property
    def is_lost(self) -> bool:
        """Whether SIGKILL ended the process, and not that of the launcher."""
        return self.status == SIGKILL_STATUS and not self.was_killed


class OutputClosed(NamedTuple):
    """Nobody reads the launcher's output any more."""


def build_environment(
    rank: int, port: int, num_processes: int, local_devices: int, keep_memory: bool
) -> dict[str, str]:
    """Environment of a process: that of the launcher, with defaults and with fixed values.

    Args:
      rank: number of the process.
      port: of process 0, on the loopback address.
      num_processes: of this start of the job.
      local_devices: devices of each process.
      keep_memory: whether the process keeps the memory that it frees, `MALLOC_ENVIRONMENT`.
    """
    first_device = rank * local_devices
    device_ids = range(first_device, first_device + local_devices)
    # NPROC is the size of XLA's thread pool on CPU. With no more threads than devices, the devices
    # that wait in a collective would leave no thread for the computations of the others.
    defaults = {
        "NPROC": str(max(2 * local_devices, (os.cpu_count() or 1) // num_processes)),
        "JAX_LOCAL_DEVICE_IDS": ",".join(map(str, device_ids)),
        "PYTHONUNBUFFERED": "1",
        **(MALLOC_ENVIRONMENT if keep_memory else {}),
    }
    required = {
        "GOSSIPJAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "GOSSIPJAX_NUM_PROCESSES": str(num_processes),
        "GOSSIPJAX_PROCESS_ID": str(rank),
        "JAX_NUM_CPU_DEVICES": str(local_devices),
    }
    return {**defaults, **os.environ, **required}


class Worker:
    """A running process of the job.

    It leads its own session: signals reach its whole process group, and what is left of the group
    is killed when the process exits.

    Args:
      rank: number of the process, the prefix of its output.
      command: program and arguments.
      environment: of the process.
      report: called from other threads: with `OutputClosed` when nobody reads its lines, and with
        `Exited` at the end.
      reaper: gets the start and the exit of the process.

    Raises:
      OSError: if the process cannot be started.
    """

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        report: Callable[[Exited | OutputClosed], None],
        reaper: Reaper,
    ):
        self.rank = rank
        self._report = report
        self._reaper = reaper
        self._last_lines = deque[bytes](maxlen=LAST_LINES)
        self._last_on_stderr = b""
        self._lock = threading.Lock()  # of the two below, and of every signal to the group
        self._is_running = True
        self._was_killed = False
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", REPORT_AND_EXEC, "sh", *command],
            stdin=reaper.input(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        reaper.add(self._process.pid)
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def send_signal(self, number: int) -> None:
        """Send a signal to the process group, if the process has not exited."""
        with self._lock:
            if self._is_running:
                signal_group(self._process.pid, number)
                self._was_killed |= number == signal.SIGKILL

    @property
    def process_id(self) -> int:
        """The number of the process, and of its session."""
        return self._process.pid

    def join(self) -> None:
        """Wait until the process has exited and its output is read."""
        self._thread.join()

    def describe_failure(self, exited: Exited, consequence: str = "stopping the others") -> str:
        """Return the reason of the failure, its consequence and the last lines of the output."""
        code = exited.code
        reason = f"exit status {code}" if code > 0 else describe_signal(-code)
        lines = [line.decode(errors="replace").rstrip() for line in list(self._last_lines)]
        output = ["its last lines:", *(f"    {line}" for line in lines)] if lines else ["no output"]
        return f"rank {self.rank} failed ({reason}), {consequence}; " + "\n".join(output)

    def cannot_start(self, exited: Exited) -> bool:
        """Whether the program cannot be executed, or Python cannot import it."""
        import_failed = exited.code == 1 and IMPORT_FAILED.match(self._last_on_stderr)
        return bool(import_failed) or exited.code in CANNOT_EXECUTE

    def _wait(self) -> None:
        readers = [
            threading.Thread(target=self._forward, args=(stream, output), daemon=True)
            for stream, output in (
                (self._process.stdout, STDOUT),
                (self._process.stderr, STDERR),
            )
        ]
        for reader in readers:
            reader.start()
        code = self._wait_for_exit()
        for reader in readers:
            reader.join(DRAIN_SECONDS)
        self._report(Exited(self.rank, code, self._was_killed))

    def _wait_for_exit(self) -> int:
        """Wait for the exit of the process, kill the rest of its group, and return its code.

        Once an exit status is collected, the kernel may give the number of the process, and of its
        group, to another one. So this comes last.
        """
        process_id = self._process.pid
        if hasattr(os, "waitid"):  # not on macOS before Python 3.13
            os.waitid(os.P_PID, process_id, os.WEXITED | os.WNOWAIT)
        else:
            self._process.wait()
        with self._lock:
            self._is_running = False
            signal_group(process_id, signal.SIGKILL)
            self._reaper.discard(process_id)
            return self._process.wait()

    def _forward(self, stream: IO[bytes], output: Output) -> None:
        """Pass lines on, each with the rank in front, and keep the last ones.

        What a process that has exited has left in its pipe is passed on without waiting for room.
        """
        with stream:
            for line in _read_lines(stream):
                self._last_lines.append(line)
                if output is STDERR:
                    self._last_on_stderr = line
                while self._is_running and not output.wait_for_room(ROOM_SECONDS):
                    pass
                output.put(b"[%d] " % self.rank + line, self._report_closed)

    def _report_closed(self) -> None:
        self._report(OutputClosed())


def _read_lines(stream: IO[bytes]) -> Iterator[bytes]:
    """Lines of at most `MAX_LINE_BYTES`, each with a line break at its end."""
    for line in iter(lambda: stream.readline(MAX_LINE_BYTES), b""):
        yield line if line.endswith(b"\n") else line + b"\n"
