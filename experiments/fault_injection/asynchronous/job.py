"""The job whose processes are killed and stopped, and the steps that its nodes have begun."""

import bisect
import json
import time
from collections.abc import Sequence
from pathlib import Path

import gossipjax as gx
from experiments import results
from experiments.fault_injection.asynchronous.options import Options
from experiments.fault_injection.launched_job import LaunchedJob
from experiments.results import Record

POLL_SECONDS = 0.1
SLOW_IMAGE = "experiments.fault_injection.asynchronous.slow_image"
MIN_STEPS = 20  # of a node, after which it is there


class AsynchronousJob(LaunchedJob):
    """The image program as nodes that wait for nobody.

    Args:
      options: of the program.
      out: the folder of the results.
      seeds: of the runs, one after another.
      max_restarts: of all its nodes.
    """

    PLACE = "GOSSIPJAX_NODE"

    def __init__(self, options: Options, out: Path, seeds: Sequence[int], max_restarts: int):
        program = [SLOW_IMAGE, "--algorithm", options.algorithm]
        program += ["--nodes", f"{options.processes}", "--epochs", f"{options.epochs}"]
        program += ["--step-seconds", f"{options.step_seconds}"]
        program += ["--out", f"{out}", "--seed", *map(str, seeds)]
        launcher = ["--asynchronous", "--max-restarts", f"{max_restarts}", "--restart-delay", "0"]
        super().__init__(launcher, program, options.processes, out / "metrics.jsonl")
        self.out = out
        self._offsets: dict[Path, int] = {}  # of what was read
        self._steps: dict[int, list[float]] = {}

    def read_steps(self) -> dict[int, list[float]]:
        """Returns place -> the times at which it has begun steps, in all runs so far."""
        for path in sorted(self.out.glob("nodes/*/journals/*/*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                lines = file.read().split(b"\n")
            self._offsets[path] = self._offsets.get(path, 0) + sum(len(x) + 1 for x in lines[:-1])
            times = self._steps.setdefault(int(path.stem), [])
            for line in map(json.loads, lines[:-1]):
                if line["event"] == "begin":
                    times.append(line["time"])
        return self._steps

    def count_steps(self, place: int, since: float) -> int:
        """Returns how many steps a node has begun since a time."""
        times = self.read_steps().get(place, [])
        return len(times) - bisect.bisect_right(times, since)

    def wait_for_steps(self, place: int, since: float) -> bool:
        """Waits until a node has made some steps since a time; False if the job ends first."""

        def has_made_steps() -> bool:
            time.sleep(POLL_SECONDS)
            return self.count_steps(place, since) >= MIN_STEPS

        return self.wait_for(has_made_steps, f"steps of node {place}")

    def wait_for_seconds(self, seconds: float) -> bool:
        """Waits; False if the job ends first."""
        due = time.monotonic() + seconds
        return self.wait_for(lambda: time.monotonic() > due, "a fault")

    def read_runs(self) -> list[Record]:
        """Returns the entries of the runs in `summary.json`."""
        return results.read_summary(self.out)["runs"]

    def add_up(self) -> gx.asynchronous.Account:
        """Returns the account of the weight of a job with one run."""
        return gx.asynchronous.account(sorted(self.out.glob("nodes/*/journals/*/*.jsonl")))


def find_next(times: list[float], since: float) -> float | None:
    """Returns the first of some rising times after one; None if there is none."""
    first = bisect.bisect_right(times, since)
    return times[first] if first < len(times) else None
