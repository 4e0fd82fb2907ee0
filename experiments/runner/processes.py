"""The processes of calls: all of them end with the program that started them."""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import gossipjax as gx

GRACE_SECONDS = 20.0  # in which a process may end its own ones, and remove what it has made


class Processes:
    """Runs commands from several threads; at the end of its context none of them runs any more.

    Each has a process group: Ctrl-C reaches this program alone, and what a process leaves behind is
    found by it.
    """

    def __init__(self) -> None:
        self._running: list[subprocess.Popen[bytes]] = []
        self._is_open = True
        self._lock = threading.Lock()  # nothing is started while all are ended

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._is_open = False
            running = list(self._running)  # threads remove from it what ends
        with ignore_stop_signals():
            self._end(running)

    def run(
        self, command: Sequence[str], log: Path, environment: dict[str, str], max_seconds: float
    ) -> int:
        """Runs a command; returns its exit status, that of SIGKILL if it took too long.

        Args:
          command: program and arguments.
          log: receives all that it prints.
          environment: all its variables.
          max_seconds: after which it is ended.

        Raises:
          RuntimeError: if the context has ended.
        """
        with log.open("wb") as output, self._lock:
            if not self._is_open:
                raise RuntimeError("the runs have been ended.")
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
            self._running.append(process)
        try:
            return process.wait(max_seconds)
        except subprocess.TimeoutExpired:
            self._end([process])
            with log.open("a") as output:
                output.write(f"\nit must end within {max_seconds:g} s, got no end: it was stopped")
            return -signal.SIGKILL
        finally:
            _kill_group(process)
            with self._lock:
                self._running.remove(process)

    def _end(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        still = [process for process in processes if process.poll() is None]
        for process in still:
            process.terminate()
        end = time.monotonic() + GRACE_SECONDS
        for process in still:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
            _kill_group(process)
            process.wait()


def ignore_stop_signals() -> contextlib.AbstractContextManager[None]:
    """Ignores Ctrl-C and SIGTERM while processes are ended; only a main thread receives them."""
    if threading.current_thread() is not threading.main_thread():
        return contextlib.nullcontext()
    return gx.launch.signal_handlers((signal.SIGINT, signal.SIGTERM), signal.SIG_IGN)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
