"""What a process is doing: its Python stacks, or what the kernel says of it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from gossipjax.launch.supervisor._progress import STACK_SIGNAL, stacks_path

WAIT_SECONDS = 2.0  # for the stacks of all processes
LOOK_SECONDS = 0.05  # between two looks at their files
MAX_LINES = 100  # of the stacks of a process that are shown
STATES = {
    "R": "running",
    "S": "waiting",
    "D": "waiting for a disk or another device",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
}


class Source(NamedTuple):
    """A process whose stacks are to be taken.

    Attributes:
      process_id: the number that it has said; 0 if none.
      session: that of the processes of its rank.
      path: the file in which it says that it advances.
    """

    process_id: int
    session: int
    path: Path


class Stacks(NamedTuple):
    """The stacks of a process.

    Attributes:
      threads: the lines of each thread, the main one last.
      missing: why there are none, and what the kernel says instead; None if there are.
    """

    threads: list[list[str]]
    missing: str | None = None

    def show(self, only_main: bool) -> list[str]:
        """Lines for the report: of all threads, or of the main thread only."""
        if self.missing is not None:
            return [self.missing]
        lines = [line for thread in self.threads[-1 if only_main else 0 :] for line in thread]
        left_out = len(lines) - MAX_LINES
        return lines if left_out <= 0 else [f"... {left_out} lines", *lines[-MAX_LINES:]]


def read_state(process_id: int) -> str | None:
    """The state of a process as one letter, as in `ps`; None where it is not known (no Linux)."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    return None


def take_stacks(sources: Iterable[Source]) -> list[Stacks]:
    """Lets processes write their stacks, and reads them.

    A handler in C writes them, so it does not matter what the program waits for. A process that is
    stopped by a signal is continued for that: end it afterwards.
    """
    sources = list(sources)
    starts = [_size(source) for source in sources]
    states = [read_state(source.process_id or source.session) for source in sources]
    is_asked = [_ask(source) for source in sources]
    deadline = time.monotonic() + WAIT_SECONDS
    sizes = starts
    while time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        former = sizes
        sizes = [_size(source) for source in sources]
        grown = [size > start for size, start in zip(sizes, starts, strict=True)]
        if sizes == former and all(
            g or not asked for g, asked in zip(grown, is_asked, strict=True)
        ):
            break
    return [
        _read(source, start, state, asked)
        for source, start, state, asked in zip(sources, starts, states, is_asked, strict=True)
    ]


def _size(source: Source) -> int:
    with contextlib.suppress(OSError):
        return stacks_path(source.path).stat().st_size
    return 0


def _ask(source: Source) -> bool:
    """Asks a process for its stacks; returns whether it can write them."""
    if not source.process_id or not stacks_path(source.path).exists():
        return False
    with contextlib.suppress(OSError):
        # Its number might be that of another process: in a container, or after its end.
        if os.getsid(source.process_id) == source.session:
            os.kill(source.process_id, STACK_SIGNAL)
            os.kill(source.process_id, signal.SIGCONT)
            return True
    return False


def _read(source: Source, start: int, state: str | None, is_asked: bool) -> Stacks:
    text = b""
    if is_asked:
        with contextlib.suppress(OSError):
            text = stacks_path(source.path).read_bytes()[start:]
    threads: list[list[str]] = []
    for line in text.decode(errors="replace").splitlines():
        if not threads or not line.startswith(" "):
            threads.append([])
        if line.strip():
            threads[-1].append(line)
    threads = [thread for thread in threads if thread]
    return Stacks(threads) if threads else Stacks([], _describe_missing(source, state, is_asked))


def _describe_missing(source: Source, state: str | None, is_asked: bool) -> str:
    if is_asked:
        reason = "it did not write one"
    elif source.process_id:
        reason = f"it handles {STACK_SIGNAL.name} itself"
    else:
        reason = (
            "it has called neither gossipjax.launch.initialize() nor gossipjax.launch.advance()"
        )
    if state is None:
        return f"no stack: {reason}"
    function = ""
    with contextlib.suppress(OSError):
        wchan = Path(f"/proc/{source.process_id or source.session}/wchan").read_text().strip()
        function = "" if wchan in ("", "0") else f", in the kernel's {wchan}"
    return f"no stack: {reason}; state {state} ({STATES.get(state, 'unknown')}){function}"
