"""Ends a program with one line on stderr and an exit status that says what kind of error it is."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import jax

import gossipjax as gx

EXIT_FAILURE = 1  # might succeed if started again
EXIT_USAGE = 2  # would fail again: the launcher does not restart a job that ends with it
EXIT_INTERRUPTED = 130  # 128 + SIGINT
EXIT_PREEMPTED = 143  # 128 + SIGTERM

MAX_REASON = 200  # characters of an allocator's error that are shown


class FatalError(ValueError):
    """A failure that would happen again after a restart: no traceback, exit status 2."""


class ProgramError(RuntimeError):
    """A failure that a program detects and explains: no traceback, exit status 1."""


@contextlib.contextmanager
def exit_on_error(get_out: Callable[[], Path | None] = lambda: None) -> Iterator[None]:
    """Ends the program with one line on stderr, and no traceback, if its body fails.

    The exit status is 2 if the program would fail again: for a `ValueError` (wrong options or data)
    before there is a folder of results, and later for a `FatalError` (a loss that is not finite) or
    if memory is exhausted. The status is 1 for an `OSError` or a `ProgramError`, 130 for Ctrl-C,
    and 143 for `gossipjax.checkpoint.Preempted`. Other exceptions pass with their traceback,
    because they are bugs of the program or of a task. A process of several that fails does not wait
    for the others (`gx.launch.exit_process`).

    `get_out` returns the folder of the results, or None if there is none yet. After Ctrl-C the
    program says that the folder contains the results so far.

    >>> with exit_on_error():
    ...     raise OSError("no space left on device")
    Traceback (most recent call last):
    SystemExit: 1
    """
    try:
        yield
    except ValueError as error:
        if get_out() is not None and not isinstance(error, FatalError):
            raise
        _exit(f"error: {error}", EXIT_USAGE)
    except (OSError, ProgramError) as error:
        _exit(f"error: {error}", EXIT_FAILURE)
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        reason = " ".join(str(error)[:MAX_REASON].split()) or "MemoryError"
        message = f"the arrays of the program must fit into memory, got {reason}"
        _exit(f"error: {message}: take fewer nodes or examples.", EXIT_USAGE)
    except KeyboardInterrupt:
        out = get_out()
        message = f"interrupted; {out} holds what was measured" if out else None
        _exit(message, EXIT_INTERRUPTED)
    except SystemExit as error:
        if not _is_preempted(error):
            raise
        _exit(str(error), EXIT_PREEMPTED)


def _exit(message: str | None, status: int) -> NoReturn:
    if message:
        print(message, file=sys.stderr)
    gx.launch.exit_process(status)


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or str(error).startswith("RESOURCE_EXHAUSTED")


def _is_preempted(error: SystemExit) -> bool:
    # If the module was never imported (without orbax, say), nobody can have raised the exception.
    checkpoint = sys.modules.get("gossipjax.checkpoint")
    return checkpoint is not None and isinstance(error, checkpoint.Preempted)
