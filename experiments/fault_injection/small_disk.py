"""A disk with little room, and with more later: a tmpfs. Linux, as root."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from experiments.program import FatalError
from experiments.speed.wire.links import ignore_stop_signals, run_command

LATER = "1g"  # its size when it has room; what is empty takes no memory


def require_root() -> None:
    """Raises `FatalError` where no disk can be mounted."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        raise FatalError(
            "--scenario disk mounts a small disk, which needs root and the program mount: run it "
            "as root, or leave disk out."
        )


@contextlib.contextmanager
def mount_small_disk(folder: Path, kilobytes: int) -> Iterator[None]:
    """Mounts a disk of this size at a folder; its files stay there when it is gone.

    Raises:
      OSError: if the kernel refuses.
    """
    folder.mkdir(parents=True)
    run_command("mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", f"{folder}")
    kept = folder.with_name(f"{folder.name}.kept")
    try:
        yield
    finally:
        with ignore_stop_signals():
            shutil.copytree(folder, kept)
            run_command("umount", "-l", f"{folder}")  # also while a node that hangs writes there
            folder.rmdir()
            kept.rename(folder)


def make_room(folder: Path) -> None:
    """Makes the disk at a folder large."""
    run_command("mount", "-o", f"remount,size={LATER}", f"{folder}")
