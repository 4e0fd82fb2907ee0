"""Shared by the tests of this folder: jobs of small programs under `python -m gossipjax.launch`."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
TIMEOUT = 300  # seconds; what takes a few at most has hung then

# The beginning of the small programs: their rank, and files that show which processes run.
PROLOGUE = """
import os, signal, sys, time
from pathlib import Path
rank = int(os.environ.get("GOSSIPJAX_NODE") or os.environ["GOSSIPJAX_PROCESS_ID"])
restart = int(os.environ["GOSSIPJAX_RESTART"])
def announce(name):
    new = Path(os.environ["FOLDER"], f"{name}.{os.getpid()}.new")
    new.write_text(str(os.getpid()))
    new.rename(Path(os.environ["FOLDER"], f"{name}.pid"))  # never seen half written
def wait_for(*names):
    while not all(Path(os.environ["FOLDER"], f"{name}.pid").exists() for name in names):
        time.sleep(0.01)
"""


def launch_command(code: str, *options: object) -> list[str]:
    launcher = [sys.executable, "-m", "gossipjax.launch", *map(str, options)]
    return [*launcher, "--", sys.executable, "-c", code]


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("NPROC", "XLA_FLAGS")}
    quick = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    return {**kept, **quick, "PYTHONPATH": str(ROOT), **more}


def run_job(code: str, *options: object, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        launch_command(code, *options),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        env=environment(**more),
    )


@contextlib.contextmanager
def started_job(code: str, *options: object, **more: str) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        launch_command(code, *options),
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as launcher:
        try:
            yield launcher
        finally:
            launcher.kill()


@contextlib.contextmanager
def started_processes(
    code: str, variables: Iterable[dict[str, str]], *prefixes: list[str]
) -> Iterator["list[subprocess.Popen[str]]"]:
    """Starts a program for each set of variables, without a launcher."""
    processes = [
        subprocess.Popen(
            [*(prefixes[number] if prefixes else ()), sys.executable, "-c", code],
            env=environment(**given),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, given in enumerate(variables)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def two_machines(address: str, **more: str) -> list[dict[str, str]]:
    """The variables of a job of two processes that no engine starts."""
    job = {"GOSSIPJAX_COORDINATOR_ADDRESS": address, "GOSSIPJAX_NUM_PROCESSES": "2", **more}
    return [{**job, "GOSSIPJAX_PROCESS_ID": f"{number}"} for number in range(2)]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def process_state(process: int) -> str | None:
    """State of a process, as a letter: Z is a zombie. None once its id is free."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    return None


def is_alive(process: int) -> bool:
    """Whether a process runs. Zombies, which wait to be collected, do not."""
    return process_state(process) not in (None, "Z")


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def read_pids(folder: Path) -> list[int]:
    """Ids of the processes that have announced themselves in `folder`."""
    return [int(path.read_text()) for path in folder.glob("*.pid") if path.read_text()]
