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

import gossipjax as gx
from experiments.program import ProgramError
from experiments.speed.hosts.links import Host, ignore_stop_signals

SCRATCH = "gossipjax-speed-"  # followed by the number of the process
TAIL_LINES = 15  # of a failed host's output
MIN_THREADS = 2  # of a host
POLL_SECONDS = 0.05
PORT_IN_USE = ("address already in use", "failed to add port")  # from JAX's coordinator
ROOT = Path(__file__).resolve().parents[3]


class HostFailedError(ProgramError):
    """A host's process ended early or hangs; the message has its last lines."""


class PortInUseError(HostFailedError):
    """The port that was free a moment ago is in use."""


def find_free_port() -> int:
    """A port of the loopback interface on which nobody listens now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@contextlib.contextmanager
def make_scratch_folder() -> Iterator[Path]:
    """An empty folder that lasts as long as the context; removes those of killed processes."""
    for folder in Path(tempfile.gettempdir()).glob(f"{SCRATCH}*-*"):
        process = folder.name.removeprefix(SCRATCH).partition("-")[0]
        if Path("/proc/self").exists() and not Path(f"/proc/{process}").exists():
            shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{SCRATCH}{os.getpid()}-") as name:
        yield Path(name)


def run_hosts(
    hosts: Sequence[Host],
    command: Sequence[str],
    folder: Path,
    stall_timeout: float,
    report_progress: Callable[[str], None],
) -> None:
    """Runs `command FOLDER RANK` on every host; none of the processes outlives this call.

    Args:
      hosts: one process each.
      command: writes its progress into `FOLDER/RANK.progress`, and ends when its standard input
        closes.
      folder: receives the output, too: `RANK.log`.
      stall_timeout: seconds without progress of any host, after which they are taken to hang.
      report_progress: called with host 0's progress.

    Raises:
      HostFailedError: if a process ends early or hangs.
    """
    processes: list[subprocess.Popen[bytes]] = []
    environment = make_environment(len(hosts))
    try:
        for rank, host in enumerate(hosts):
            with (folder / f"{rank}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        [*host.prefix, *command, str(folder), str(rank)],
                        stdin=subprocess.PIPE,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env=environment,
                        start_new_session=True,  # Ctrl-C goes to the parent only
                    )
                )
        _watch(processes, folder, stall_timeout, report_progress)
    finally:
        with ignore_stop_signals():
            for process in processes:
                _kill(process)


def make_environment(hosts: int) -> dict[str, str]:
    """Environment of a host's process: one CPU device, and its fraction of the machine's cores."""
    threads = max(MIN_THREADS, (os.cpu_count() or MIN_THREADS) // hosts)
    python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {
        **gx.launch.MALLOC_ENVIRONMENT,
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        "NPROC": str(threads),
        "PYTHONPATH": python_path,
    }
    environment.pop("XLA_FLAGS", None)
    return environment


def _kill(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin:
        process.stdin.close()


def _watch(
    processes: Sequence["subprocess.Popen[bytes]"],
    folder: Path,
    stall_timeout: float,
    report_progress: Callable[[str], None],
) -> None:
    """Waits until all processes have ended; raises `HostFailedError` as `run_hosts` does."""
    files = [folder / f"{rank}.progress" for rank in range(len(processes))]
    progress = [""] * len(processes)
    changed_at = time.monotonic()
    while True:
        codes = [process.poll() for process in processes]
        _require_no_failure(codes, folder)
        if all(code == 0 for code in codes):
            return
        latest = [file.read_text() if file.exists() else "" for file in files]
        if latest != progress:
            if latest[0] != progress[0]:
                report_progress(latest[0])
            progress = latest
            changed_at = time.monotonic()
        elif time.monotonic() - changed_at > stall_timeout:
            modified = [file.stat().st_mtime if file.exists() else 0.0 for file in files]
            slowest = modified.index(min(modified))
            tail = _read_tail(slowest, f"silent for {stall_timeout:.0f} s", folder)
            listed = "; ".join(f"host {i}: {p or 'starting'}" for i, p in enumerate(progress))
            raise HostFailedError(f"the hosts hang ({listed}).\n{tail}")
        time.sleep(POLL_SECONDS)


def _require_no_failure(codes: Sequence[int | None], folder: Path) -> None:
    failed = [rank for rank, code in enumerate(codes) if code]
    if failed:
        text = "\n".join(_read_tail(rank, f"ended with {codes[rank]}", folder) for rank in failed)
        logs = [(folder / f"{rank}.log").read_text(errors="replace").lower() for rank in failed]
        port_in_use = any(sign in log for sign in PORT_IN_USE for log in logs)
        raise (PortInUseError if port_in_use else HostFailedError)(text)


def _read_tail(rank: int, reason: str, folder: Path) -> str:
    """The last lines of a host's output, below the reason why they are shown."""
    lines = (folder / f"{rank}.log").read_text(errors="replace").splitlines()
    tail = [line for line in lines if not line.startswith("[Gloo] Rank")][-TAIL_LINES:]
    return "\n".join([f"host {rank} {reason}; its last lines:", *(f"    {line}" for line in tail)])
