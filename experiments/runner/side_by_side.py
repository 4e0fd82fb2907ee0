"""Runs the calls of a list, several side by side; those that are finished are not run again."""

import dataclasses
import os
import queue
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Protocol

from experiments.program import FatalError
from experiments.runner.devices import Devices
from experiments.runner.folders import (
    LOG,
    empty_folder,
    judge,
    make_command,
    read_result,
    read_state,
    write_state,
)
from experiments.runner.origin import find_commit, find_machine
from experiments.runner.processes import Processes
from experiments.runner.run import Result, Run

MAX_SECONDS = 4 * 3600.0


class Reporter(Protocol):
    """Who is told of runs."""

    def begin(self, run: Run) -> None:
        """A run begins; called from the thread that waits for it."""
        ...

    def end(self, run: Run, result: Result) -> None:
        """A run has ended, now or before; an error ends all runs."""
        ...


def run_all(
    runs: Sequence[Run],
    folder: Path,
    devices: Devices,
    reporter: Reporter,
    replaces: bool = False,
    max_seconds: float = MAX_SECONDS,
) -> dict[str, Result]:
    """Runs all calls that have not ended before; returns how each ended, by name.

    Args:
      runs: in the order in which they are begun; those that are alone come after all others, one
        at a time.
      folder: with a folder for each of them.
      devices: how many at a time.
      reporter: is told of each that begins and ends.
      replaces: whether a run of the same name with other arguments is run anew.
      max_seconds: after which a run has failed.

    Raises:
      FatalError: if the folder has a run of the same name with other arguments, unless `replaces`.
      KeyboardInterrupt: after all runs have been ended.
    """
    results: dict[str, Result] = {}
    for run in runs:
        result = find_result(run, folder / run.name, replaces)
        if result is not None:
            results[run.name] = result
            reporter.end(run, result)
    rest = [run for run in runs if run.name not in results]
    alone = Devices(devices.environments[:1])
    for part, share in (
        ([run for run in rest if not run.is_alone], devices),
        ([run for run in rest if run.is_alone], alone),
    ):
        batch = _Batch(folder, share, reporter, max_seconds)
        results |= batch.run(part)
    return {run.name: results[run.name] for run in runs}


def find_result(run: Run, folder: Path, replaces: bool = True) -> Result | None:
    """How a run ended in an earlier call; None if it must be run.

    Args:
      run: what is called.
      folder: where its results would be.
      replaces: whether results of other arguments count as none.

    Raises:
      FatalError: if there are such, unless `replaces`.
    """
    state = read_state(folder)
    if state is None:
        return None
    if state["command"] == make_command(run):
        return read_result(state, folder)
    if not replaces:
        raise FatalError(
            f"--out must be the folder of the same runs, got {folder.parent.parent}, whose run "
            f"{run.name} has the options {' '.join(state['command'][1:])}: choose another --out, "
            "or pass --overwrite to replace it."
        )
    return None


class _Batch:
    """Runs that may all be beside each other."""

    def __init__(self, folder: Path, devices: Devices, reporter: Reporter, max_seconds: float):
        self._folder = folder
        self._reporter = reporter
        self._max_seconds = max_seconds
        self._environments = queue.SimpleQueue[dict[str, str]]()
        for environment in devices.environments:
            self._environments.put(environment)
        self._jobs = devices.jobs
        self._processes = Processes()
        self._results: dict[str, Result] = {}

    def run(self, runs: Sequence[Run]) -> dict[str, Result]:
        """Runs all; returns how each ended."""
        futures: dict[Future[Result], Run] = {}
        try:
            # The processes are ended first: the pool waits for its threads, and these for them.
            with ThreadPoolExecutor(self._jobs) as pool, self._processes:
                try:
                    futures |= {pool.submit(self._run, run): run for run in runs}
                    for future in as_completed(futures):
                        self._add(futures[future], future.result())
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise
        finally:
            for future, run in futures.items():  # what ended while the others were being stopped
                is_new = run.name not in self._results and not future.cancelled()
                if is_new and future.exception() is None and future.result().status != "failed":
                    self._add(run, future.result())
        return self._results

    def _add(self, run: Run, result: Result) -> None:
        self._results[run.name] = result
        self._reporter.end(run, result)

    def _run(self, run: Run) -> Result:
        """Runs a call with the next free devices, and writes into its folder how it ended."""
        environment = self._environments.get()
        try:
            self._reporter.begin(run)
            folder = self._folder / run.name
            empty_folder(folder)
            began = time.monotonic()
            status = self._processes.run(
                [sys.executable, "-m", run.module, *run.arguments, "--out", f"{folder}"],
                folder / LOG,
                make_environment(environment),
                self._max_seconds,
            )
            result = dataclasses.replace(
                judge(folder, status, time.monotonic() - began),
                code=find_commit(),
                machine=find_machine(),
            )
            write_state(run, result, folder)
            return result
        finally:
            self._environments.put(environment)


def make_environment(own: dict[str, str]) -> dict[str, str]:
    """Returns the variables of a process; `python` of a command in it is the one that runs here."""
    path = os.pathsep.join([f"{Path(sys.executable).parent}", os.environ.get("PATH", os.defpath)])
    return os.environ | own | {"PATH": path}
