"""Lets one job at a time use a folder, by a file that is locked and names the job."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
import warnings
import weakref
from pathlib import Path

from gossipjax.processes import gather_texts, is_main_process

NAME = ".lock"
MAX_TEXT = 250  # bytes of the text in the file

# Locks of this process, by folder. The operating system does not refuse a process its own lock,
# and frees it when any file of this path is closed.
_locks: weakref.WeakValueDictionary[Path, FolderLock] = weakref.WeakValueDictionary()


class FolderLock:
    """The lock of a folder. Process 0 takes it for the whole job, if all processes share it.

    The operating system frees the lock when the process ends, however it ends, also if a forked
    child lives on. The file stays.
    """

    def __init__(self, folder: Path, shared: bool = True):
        self._folder = folder
        self._is_shared = shared
        self._is_held = False
        self._close: weakref.finalize | None = None  # also if the program never releases it

    def acquire(self) -> None:
        """Takes the lock, unless this job has it already. All processes must call this."""
        if self._is_held:
            return
        problem = self._take() if is_main_process() or not self._is_shared else ""
        problem = next(filter(None, gather_texts(problem)), "")
        if problem:
            self.release()
            if not self._is_shared:
                problem += " With shared=False each process needs a folder of its own."
            raise OSError(f"the folder must be of one job at a time, got {self._folder}, {problem}")
        self._is_held = True

    def release(self) -> None:
        """Frees the lock. A process may call this alone."""
        if self._close is not None:
            self._close()
            _locks.pop(self._folder, None)
        self._close = None
        self._is_held = False

    def _take(self) -> str:
        """Takes the lock for this process, or returns why it cannot."""
        identity = f"process {os.getpid()} on {socket.gethostname()}"
        if self._folder in _locks:
            return f"which {identity} has open. Close it first; read_only=True only reads."
        try:
            file = os.open(self._folder / NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            self._close = weakref.finalize(self, os.close, file)
            if os.fstat(file).st_nlink != 1:
                raise OSError(errno.EMLINK, "it has another name")
        except OSError as error:
            return (
                f"where {NAME} cannot be written ({error.strerror}). Remove it if it is a link or "
                "a folder: it must be a file of this folder."
            )
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            holder = os.pread(file, MAX_TEXT, 0).decode(errors="replace") or "another process"
            way_out = "Wait for its end, or end it; read_only=True only reads."
            return f"which {holder} has open. {way_out}"
        except OSError as error:
            warnings.warn(
                f"the disk of {self._folder} has no locks ({error.strerror}), so a second job that "
                "saves there would not be refused: see that there is none.",
                stacklevel=4,
            )
        since = time.strftime("since %Y-%m-%d %H:%M:%S UTC", time.gmtime())
        job = os.environ.get("GOSSIPJAX_JOB")
        os.ftruncate(file, 0)
        os.pwrite(file, f"{identity}, {since}{f', of job {job}' if job else ''}".encode(), 0)
        _locks[self._folder] = self
        return ""
