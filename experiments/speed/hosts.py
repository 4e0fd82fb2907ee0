"""The processes of a measurement: one per host, all started together, none left behind."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from experiments.speed_links import Place, uninterrupted
from gossipjax.supervisor import KEEP_MEMORY

SCRATCH = "gossipjax-speed-"  # and the number of the process
LAST_LINES = 15  # of a failed host's output
IN_USE = ("address already in use", "failed to add port")  # what JAX's coordinator says then
ROOT = Path(__file__).resolve().parent.parent


class HostFailedError(RuntimeError):
    """A host's process ended early or hangs; the message has its last lines."""


class PortInUseError(HostFailedError):
    """The port that was free a moment ago is in use."""


def free_port() -> int:
    """A port of the loopback interface that nobody listens on just now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """An empty folder for the time of the context; takes away those that killed ones have left."""
    for left in Path(tempfile.gettempdir()).glob(f"{SCRATCH}*-*"):
        process = left.name.removeprefix(SCRATCH).partition("-")[0]
        if Path("/proc/self").exists() and not Path(f"/proc/{process}").exists():
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{SCRATCH}{os.getpid()}-") as name:
        yield Path(name)


def run_hosts(
    places: Sequence[Place],
    command: Sequence[str],
    folder: Path,
    patience: float,
    tell: Callable[[str], None],
) -> None:
    """Runs `command FOLDER RANK` on every host until all have ended; none outlives this call.

    Args:
      places: a host each.
      command: writes what it is doing into `FOLDER/RANK.progress`, and ends when its standard input
        closes.
      folder: where output goes, too: `RANK.log`.
      patience: seconds without a new word from any host after which they are taken to hang.
      tell: is called with host 0's progress.

    Raises:
      HostFailedError: if one ends early, or hangs.
    """
    processes: list[subprocess.Popen[bytes]] = []
    threads = str(max(2, (os.cpu_count() or 2) // len(places)))
    alone = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "NPROC": threads}
    python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**KEEP_MEMORY, **os.environ, **alone, "PYTHONPATH": python_path}
    environment.pop("XLA_FLAGS", None)
    try:
        for rank, place in enumerate(places):
            with (folder / f"{rank}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        [*place.prefix, *command, str(folder), str(rank)],
                        stdin=subprocess.PIPE,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env=environment,
                        start_new_session=True,  # Ctrl-C is for us alone
                    )
                )
        _watch(processes, folder, patience, tell)
    finally:
        with uninterrupted():
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                if process.stdin:
                    process.stdin.close()


def _watch(
    processes: Sequence["subprocess.Popen[bytes]"],
    folder: Path,
    patience: float,
    tell: Callable[[str], None],
) -> None:
    words, heard = [""] * len(processes), time.monotonic()
    files = [folder / f"{rank}.progress" for rank in range(len(processes))]
    while True:
        codes = [process.poll() for process in processes]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            text = "\n".join(_last_lines(i, f"ended with {codes[i]}", folder) for i in failed)
            in_use = any(sign in text.lower() for sign in IN_USE)
            raise (PortInUseError if in_use else HostFailedError)(text)
        if all(code == 0 for code in codes):
            return
        now = [file.read_text() if file.exists() else "" for file in files]
        if now != words:
            if now[0] != words[0]:
                tell(now[0])
            words, heard = now, time.monotonic()
        elif time.monotonic() - heard > patience:
            where = "; ".join(f"host {i}: {word or 'starting'}" for i, word in enumerate(words))
            slow = min(range(len(words)), key=lambda i: files[i].stat().st_mtime if words[i] else 0)
            text = _last_lines(slow, f"silent for {patience:.0f} s", folder)
            raise HostFailedError(f"the hosts hang ({where}).\n{text}")
        time.sleep(0.05)


def _last_lines(rank: int, how: str, folder: Path) -> str:
    lines = (folder / f"{rank}.log").read_text(errors="replace").splitlines()
    kept = [line for line in lines if not line.startswith("[Gloo] Rank")][-LAST_LINES:]
    return "\n".join([f"host {rank} {how}; its last lines:", *(f"    {line}" for line in kept)])
