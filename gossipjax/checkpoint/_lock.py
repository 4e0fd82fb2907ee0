"""Lets one job at a time use a folder, by a file that is locked and names the job."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
import warnings
import weakref
from pathlib import Path, PurePath

NAME = ".lock"
# Folder -> the open lock file of this process. The system would let one process lock a file twice,
# so this also refuses a second `FolderLock` of the same folder.
_files: dict[Path, int] = {}


class FolderLock:
    """A lock by which one job at a time may write into a folder.

    The operating system frees the lock when the process ends, however it ends, also if a forked
    child lives on. The file stays. A bucket has no locks, so there `acquire` does nothing.
    """

    def __init__(self, folder: PurePath):
        self._folder = folder
        # Closes the file, which frees the lock, at the latest when this object is collected.
        self._close: weakref.finalize | None = None

    def acquire(self) -> None:
        """Takes the lock, unless this object has it; raises `OSError` if another job has it.

        A folder that was removed meanwhile is made anew, with a warning.
        """
        if not isinstance(self._folder, Path):
            return
        if self._close is not None and self._close.alive:
            path = self._folder / NAME
            if path.exists() and os.path.samestat(path.stat(), os.fstat(_files[self._folder])):
                return
            warnings.warn(
                f"{self._folder} was removed or replaced while this job saves there: it is made "
                "anew, and what was saved in it is gone.",
                stacklevel=4,
            )
            self.release()
            if not self._folder.exists():  # if a file has its name now, `_take` says so
                self._folder.mkdir(parents=True)
        if problem := self._take(self._folder):
            self.release()
            raise OSError(f"the folder must be of one job at a time, got {self._folder}, {problem}")

    def release(self) -> None:
        """Frees the lock."""
        if self._close is not None:
            self._close()

    def _take(self, folder: Path) -> str:
        """Takes the lock. Returns "", or the reason for which it cannot, as the end of an error."""
        job = f"process {os.getpid()} on {socket.gethostname()}"
        if folder in _files:
            return f"which {job} has open. Close it first; read_only=True only reads."
        try:
            file = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            _files[folder] = file
            self._close = weakref.finalize(self, lambda: os.close(_files.pop(folder)))
            if os.fstat(file).st_nlink > 1:
                # A hard link may lead to a file that this must not overwrite.
                raise OSError(errno.EMLINK, "it has another name")
        except OSError as error:
            return f"where {NAME} cannot be written ({error.strerror}). Remove what has this name."
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            holder = os.pread(file, 250, 0).decode(errors="replace") or "another process"
            return (
                f"which {holder} has open. Wait for its end, or end it; read_only=True only reads. "
                "With shared=False each process needs a folder of its own."
            )
        except OSError as error:
            warnings.warn(
                f"the disk of {folder} has no locks ({error.strerror}), so a second job that "
                "saves there would not be refused: see that there is none.",
                stacklevel=4,
            )
        # Names this job to others that try to take the lock.
        since = time.strftime("since %Y-%m-%d %H:%M:%S UTC", time.gmtime())
        os.ftruncate(file, 0)
        os.pwrite(file, f"{job}, {since}".encode(), 0)
        return ""
