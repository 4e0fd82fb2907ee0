"""Lets one job at a time use a folder, by a file that is locked and names the job."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import threading
import time
import weakref
from pathlib import Path

from gossipjax.processes import gather_texts, is_main_process

NAME = ".lock"
BEAT_SECONDS = 2.0  # the job that has the lock touches the file this often
SILENT_BEATS = 5  # after so many beats without a touch, a job on another host has ended
MAX_TEXT = 250  # bytes of the text in the file

_locked: set[int] = set()  # the open files of locks


def _close_all() -> None:
    """Closes the files of locks after a fork, so that the child does not keep the locks."""
    for file in _locked:
        os.close(file)
    _locked.clear()


os.register_at_fork(after_in_child=_close_all)


class FolderLock:
    """The lock of a folder. Process 0 takes it for the whole job, if all processes share it.

    The operating system frees the lock when the process ends, however it ends. But some disks do
    not show the locks of other hosts, or support no locks. So the job that has the lock touches the
    file every `BEAT_SECONDS`. If the lock looks free, but the file names a job on another host, a
    new job waits, and takes the lock only if nobody touches the file meanwhile.
    """

    def __init__(self, folder: Path, shared: bool = True):
        self._folder = folder
        self._is_shared = shared
        self._is_held = False
        self._free: weakref.finalize | None = None  # also if the program never releases it

    def acquire(self) -> None:
        """Takes the lock, unless this job has it already. All processes must call this."""
        if self._is_held:
            return
        problem = ""
        if is_main_process() or not self._is_shared:
            try:
                problem = self._take() or ""
            except OSError as error:
                problem = (
                    f"where {NAME} cannot be written ({error.strerror}). Remove it if it is a link "
                    "or a folder: it must be a file of this folder."
                )
        problem = next(filter(None, gather_texts(problem)), "")
        if problem:
            self.release()
            if not self._is_shared:
                problem += " With shared=False each process needs a folder of its own."
            raise OSError(f"the folder must be of one job at a time, got {self._folder}, {problem}")
        self._is_held = True

    def release(self) -> None:
        """Frees the lock. A process may call this alone."""
        if self._free is not None:
            self._free()
        self._is_held = False

    def _take(self) -> str | None:
        """Takes the lock for this process, or returns who has it."""
        path = self._folder / NAME
        identity = f"process {os.getpid()} on {socket.gethostname()}, "
        while True:
            # If the path is a link, its target would be overwritten.
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            holder = _find_holder(file)
            if holder is None and _is_at(path, file):
                if os.fstat(file).st_nlink == 1:
                    break
                path.unlink()  # its other name, in a backup for example, keeps its content
            os.close(file)
            if holder is not None:
                is_own = holder.startswith(identity)
                way_out = "Close it first" if is_own else "Wait for its end, or end it"
                return f"which {holder} has open. {way_out}; read_only=True only reads."
        _locked.add(file)
        ended = threading.Event()
        self._free = weakref.finalize(self, _free, path, file, os.getpid(), ended)
        since = time.strftime("since %Y-%m-%d %H:%M:%S UTC", time.gmtime())
        job = os.environ.get("GOSSIPJAX_JOB")
        os.ftruncate(file, 0)
        os.pwrite(file, f"{identity}{since}{f', of job {job}' if job else ''}".encode(), 0)
        threading.Thread(target=_touch, args=(path, ended), daemon=True).start()
        return None


def _find_holder(file: int) -> str | None:
    """Locks an open file, or returns who has the lock."""
    is_certain = True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read(file) or "another process"
    except OSError:  # the disk has no locks
        is_certain = False
    holder = _read(file)
    if not holder or (is_certain and f" on {socket.gethostname()}, " in holder):
        return None
    former = os.fstat(file).st_mtime_ns
    for _ in range(SILENT_BEATS):
        time.sleep(BEAT_SECONDS)
        if os.fstat(file).st_mtime_ns != former:
            return holder
    return None


def _read(file: int) -> str:
    return os.pread(file, MAX_TEXT, 0).decode(errors="replace")


def _is_at(path: Path, file: int) -> bool:
    """Whether an open file is still at that path; a job that ends removes its file."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file), path.lstat())
    return False


def _touch(path: Path, ended: threading.Event) -> None:
    while not ended.wait(BEAT_SECONDS):
        with contextlib.suppress(OSError):
            os.utime(path, follow_symlinks=False)


def _free(path: Path, file: int, process_id: int, ended: threading.Event) -> None:
    if os.getpid() != process_id:  # a child after a fork, which has no lock
        return
    ended.set()
    with contextlib.suppress(OSError):
        if _is_at(path, file):
            path.unlink()
    _locked.discard(file)
    os.close(file)
