"""One job whose processes are killed again and again, beside the same job left alone.

    python -m experiments.interruptions --kills 20 --processes 4

Trains SGP by `experiments.image` under `python -m gossipjax.launch`, a node per process, and sends
SIGKILL to random processes at random moments: in training, while a checkpoint is being written, and
while the processes start. After each the launcher starts all again. The job has to end, to go on
each time from the newest complete checkpoint, and to end as the same job that nobody killed, to the
bit. It writes `summary.json` into `--out`, prints the table, and exits with 1 if something was
violated. Linux only: it finds the processes in /proc.
"""

import contextlib
import dataclasses
import json
import os
import queue
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import orbax.checkpoint as ocp
import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from experiments import results, saving

ROOT = Path(__file__).resolve().parent.parent
LAST_LINES = 30  # of a failed job's output
PATIENCE = 300.0  # seconds without a word or a step, after which a job is taken to hang
JITTER = 0.2  # seconds at most, from the step that a kill is due at to the kill
LOG_EVERY = 5  # steps
EXAMPLES = 4000  # of the training set
WITHIN_SAVING = 0.02  # seconds at most, from the beginning of a checkpoint to the kill

Moment = Literal["training", "saving", "starting"]
GOES_ON = re.compile(r"\[0\] sgp goes on after step (\d+)")
RESTART = re.compile(r"\[launch\] restart (\d+) of")


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the experiment."""

    kills: int = 20
    """How often a process is killed: of six times, two while a checkpoint is written, one while the
    processes start, three in training."""
    processes: int = 4
    """Processes of the job, a node each."""
    epochs: int = 16
    """Passes over the training set: 4,000 digits, 32 per node and step."""
    checkpoint_every: int = 10
    """Steps between checkpoints, a multiple of 5."""
    runs: int = 3
    """Runs with other seeds that nobody kills, beside the one with the same seed."""
    seed: int = 0
    """Of the random moments and processes; the run itself has seed 0."""
    out: Path | None = None
    """Folder for the results; a new one under runs/ if not given."""
    overwrite: bool = False
    """Replace another run's results in --out."""

    def __post_init__(self) -> None:
        for name in ("kills", "processes", "epochs", "checkpoint_every", "runs"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"--{name.replace('_', '-')} is at least 1, not {value}.")
        if self.checkpoint_every % LOG_EVERY:
            raise ValueError(
                f"--checkpoint-every is a multiple of {LOG_EVERY}, not {self.checkpoint_every}."
            )
        if self.steps < 8 * self.checkpoint_every:
            raise ValueError(
                f"{self.steps} steps are too few for kills between checkpoints of every "
                f"{self.checkpoint_every}: give more --epochs."
            )

    @property
    def steps(self) -> int:
        """Steps of the run."""
        return max(1, round(self.epochs * EXAMPLES / (32 * self.processes)))


@dataclasses.dataclass
class Kill:
    """One kill, and what became of the job.

    Attributes:
      seconds: since the job's start.
      moment: what it was aimed at.
      writing: whether a checkpoint was being written right after it.
      logged: the last step in `metrics.jsonl`; before the processes had gone on, that of the newest
        complete checkpoint.
      complete: the newest complete checkpoint when all processes had ended; 0 if none.
      went_on: the step after which the job went on.
    """

    seconds: float
    rank: int
    moment: Moment
    writing: bool
    logged: int
    complete: int = 0
    went_on: int | None = None


class JobError(RuntimeError):
    """The job ended when it should not have, or hangs; the message has its last lines."""


class Job:
    """The image program under the launcher, as a context: it is gone afterwards.

    Attributes:
      restarts: how many the launcher has told of.
      gone_on: the step after which the processes last went on, None since a restart.
      heard: when that was said.
    """

    def __init__(self, options: Options, out: Path, seeds: Sequence[int], restarts: int):
        program = ["experiments.image", "--algorithm", "sgp", "--nodes", f"{options.processes}"]
        program += ["--epochs", f"{options.epochs}", "--log-every", f"{LOG_EVERY}"]
        program += ["--checkpoint-every", f"{options.checkpoint_every}", "--out", f"{out}"]
        program += ["--seed", *map(str, seeds), *["--overwrite"] * options.overwrite]
        launcher = ["gossipjax.launch", "--processes", f"{options.processes}", "--grace", "2"]
        launcher += ["--max-restarts", f"{restarts}", "--", sys.executable, "-m"]
        self._command = [sys.executable, "-m", *launcher, *program]
        self.metrics = out / "metrics.jsonl"
        self.checkpoints = saving.folder_of(out, f"sgp, one_peer_exponential, seed {seeds[0]}")
        self.restarts, self.gone_on, self.heard = 0, None, 0.0
        self.on_gone_on: Callable[[int], None] = lambda step: None
        self._last = deque[str](maxlen=LAST_LINES)
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def __enter__(self) -> "Job":
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self._launcher = subprocess.Popen(
            self._command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
            start_new_session=True,  # Ctrl-C is for us alone
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.began = self._moved = time.monotonic()
        self._size = 0
        return self

    def __exit__(self, *error: object) -> None:
        self._launcher.terminate()
        try:
            self._launcher.wait(10)
        except subprocess.TimeoutExpired:
            self._launcher.kill()
            self._launcher.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self._launcher.stdout is not None
        with self._launcher.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put(None)

    def wait_for(self, true: Callable[[], bool], what: str) -> None:
        """Waits, and listens to the job.

        Raises:
          JobError: if it ends first, or hangs.
        """
        while not true():
            ended = not self._listen()
            if true():
                return
            if ended or time.monotonic() - self._moved > PATIENCE:
                raise JobError(self._told(f"{'ended' if ended else 'hangs'} before {what}"))
            time.sleep(0.002)

    def wait(self) -> None:
        """Waits for its end.

        Raises:
          JobError: if it fails, or hangs.
        """
        self.wait_for(lambda: self._launcher.poll() is not None, "its end")
        while self._listen():
            time.sleep(0.002)
        if self._launcher.returncode:
            raise JobError(self._told(f"ended with status {self._launcher.returncode}"))

    def _told(self, how: str) -> str:
        lines = "\n".join(f"    {line}" for line in self._last)
        return f"after {self.restarts} restarts the job {how}; its last lines:\n{lines}"

    def _listen(self) -> bool:
        """Takes in what was said; False once nothing more will be."""
        size = self.metrics.stat().st_size if self.metrics.exists() else 0
        if size != self._size:
            self._size, self._moved = size, time.monotonic()
        with contextlib.suppress(queue.Empty):
            while (line := self._lines.get_nowait()) is not None:
                self._moved = time.monotonic()
                self._last.append(line.rstrip())
                if found := RESTART.match(line):
                    self.restarts, self.gone_on = int(found[1]), None
                elif found := GOES_ON.match(line):
                    self.gone_on, self.heard = int(found[1]), time.monotonic()
                    self.on_gone_on(self.gone_on)
            self._lines.put(None)
            return False
        return True

    def step(self) -> int:
        """The last step that `metrics.jsonl` has; 0 if none."""
        lines = self.metrics.read_text().splitlines() if self.metrics.exists() else []
        for line in reversed(lines):
            with contextlib.suppress(json.JSONDecodeError):
                return json.loads(line)["step"]
        return 0

    def complete(self) -> int:
        """The step of the newest complete checkpoint; 0 if there is none."""
        return max((int(path.name) for path in self.checkpoints.glob("*[0-9]")), default=0)

    def is_saving(self) -> bool:
        """Whether a checkpoint is being written."""
        return any(self.checkpoints.glob(f"*{ocp.utils.TMP_DIR_SUFFIX}*"))

    def ranks(self) -> dict[int, int]:
        """The processes that run: see the function of this name."""
        return ranks(self._launcher.pid)


def ranks(launcher: int) -> dict[int, int]:
    """`{rank: process}` of the processes that this launcher has started and that run."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if int(parent) == launcher and state != "Z":
                variables = (folder / "environ").read_bytes().split(b"\0")
                rank = [v for v in variables if v.startswith(b"GOSSIPJAX_PROCESS=")]
                if rank:
                    found[int(rank[0].partition(b"=")[2])] = int(folder.name)
    return found


def plan(options: Options, rng: random.Random) -> list[tuple[int, Moment]]:
    """The steps from which on the kills are due, one in each part of the run, and their kinds."""
    kinds: list[Moment] = ["saving", "training", "training", "saving", "starting", "training"]
    moments: list[Moment] = [kinds[i % len(kinds)] for i in range(options.kills)]
    rest = moments[1:]
    rng.shuffle(rest)
    first, last = 2 * options.checkpoint_every, options.steps - 3 * options.checkpoint_every
    part = (last - first) / options.kills
    due = [first + round((i + rng.random()) * part) for i in range(options.kills)]
    order: list[Moment] = [*moments[:1], *rest]
    return list(zip(due, order, strict=True))


def kill_again_and_again(
    options: Options,
    job: Job,
    rng: random.Random,
    kills: list[Kill],
    tell: Callable[[Kill], None],
) -> None:
    """Kills, as planned, and follows the job to its end; adds to `kills` what it has seen."""

    def on_gone_on(step: int) -> None:
        for kill in kills:
            if kill.went_on is None:
                kill.went_on = step

    def trains(step: int) -> bool:
        """Whether that step is done; lines that the job will take back do not count."""
        is_on = job.restarts == 0 or (
            job.gone_on is not None and time.monotonic() - job.heard > 0.5
        )
        return is_on and job.step() >= step

    job.on_gone_on = on_gone_on
    startup = 0.0
    for number, (due, moment) in enumerate(plan(options, rng), start=1):
        if moment == "starting":
            job.wait_for(lambda: len(job.ranks()) == options.processes, "its processes' start")
            until = time.monotonic() + rng.uniform(0, startup)
            job.wait_for(lambda until=until: time.monotonic() > until, "a kill")
        else:
            job.wait_for(lambda due=due: trains(due), f"step {due}")
            startup = startup or time.monotonic() - job.began
            if moment == "saving":
                job.wait_for(job.is_saving, "a checkpoint")
            time.sleep(rng.uniform(0, WITHIN_SAVING if moment == "saving" else JITTER))
        rank, process = rng.choice(sorted(job.ranks().items()))
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        writing = job.is_saving()
        is_on = job.restarts == 0 or job.gone_on is not None
        logged = job.step() if is_on else job.complete()
        kill = Kill(time.monotonic() - job.began, rank, moment, writing, logged)
        kills.append(kill)
        job.wait_for(lambda number=number: job.restarts >= number, f"restart {number}")
        kill.complete = job.complete()
        tell(kill)
    job.wait()


def violations(
    options: Options, kills: list[Kill], killed: dict[str, Any], alone: list[dict[str, Any]]
) -> list[str]:
    """What was promised and not kept."""
    found = []
    for number, kill in enumerate(kills, start=1):
        if kill.went_on != kill.complete:
            found.append(
                f"kill {number}: the newest complete checkpoint was of step {kill.complete}, and "
                f"the job went on after {kill.went_on}"
            )
        # A checkpoint is complete before the next one is begun.
        if kill.logged - kill.complete > 2 * options.checkpoint_every:
            found.append(f"kill {number}: lost {kill.logged - kill.complete} steps")
    clock = {"seconds_per_step", "examples_per_second", "share_outside_the_step"}
    found += [
        f"{name}: {killed[name]}, and {value} without kills"
        for name, value in alone[0].items()
        if name not in clock and killed[name] != value
    ]
    accuracies = [run["test_accuracy_average_model"] for run in alone]
    if not min(accuracies) <= killed["test_accuracy_average_model"] <= max(accuracies):
        found.append("the final accuracy is outside of the spread of the uninterrupted runs")
    return found


def table(kills: list[Kill]) -> Table:
    """A row per kill."""
    result = Table(box=SIMPLE_HEAD)
    for header in ("kill", "seconds", "rank"):
        result.add_column(header, justify="right")
    result.add_column("aimed at", no_wrap=True)
    result.add_column("while\nwriting")
    for header in ("step\nlogged", "newest\nsaved", "went on\nafter", "steps\nlost"):
        result.add_column(header, justify="right")
    for number, kill in enumerate(kills, start=1):
        went_on = "-" if kill.went_on is None else f"{kill.went_on}"
        lost = "-" if kill.went_on is None else f"{kill.logged - kill.went_on}"
        result.add_row(
            *(f"{number}", f"{kill.seconds:.1f}", f"{kill.rank}", kill.moment),
            *("yes" if kill.writing else "", f"{kill.logged}", f"{kill.complete}", went_on, lost),
        )
    return result


@contextlib.contextmanager
def compilation_cache() -> Iterator[None]:
    """Programs that were compiled once are read by all processes of all starts."""
    names = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
    before = {name: os.environ.get(name) for name in names}
    with tempfile.TemporaryDirectory(prefix="gossipjax-cache-", ignore_cleanup_errors=True) as name:
        os.environ.update(zip(names, (name, "0"), strict=True))
        try:
            yield
        finally:
            for key, value in before.items():
                os.environ.pop(key) if value is None else os.environ.update({key: value})


def measure(options: Options, out: Path, console: Console) -> list[str]:
    """Both jobs; writes `summary.json` and prints the table. Returns the violations.

    Raises:
      JobError: if a job fails or hangs.
    """
    kills: list[Kill] = []
    with results.progress_bar(console) as bar, compilation_cache():
        task = bar.add_task("uninterrupted", total=None, status=f"{1 + options.runs} runs")
        with Job(options, out / "uninterrupted", range(1 + options.runs), 0) as job:
            job.wait()
        bar.update(task, total=1, completed=1)
        task = bar.add_task("kills", total=options.kills, status="")

        def tell(kill: Kill) -> None:
            bar.update(task, advance=1, status=f"after step {kill.logged}, {kill.moment}")

        try:
            with Job(options, out / "killed", [0], options.kills) as job:
                kill_again_and_again(options, job, random.Random(options.seed), kills, tell)
        finally:
            console.print(table(kills))
    alone = json.loads((out / "uninterrupted" / "summary.json").read_text())["runs"]
    (killed,) = json.loads((out / "killed" / "summary.json").read_text())["runs"]
    found = violations(options, kills, killed, alone)
    run = {"kills": [*map(dataclasses.asdict, kills)], "killed": killed, "uninterrupted": alone}
    results.write_summary(out, dataclasses.asdict(options), {}, [{**run, "violations": found}])
    accuracies = [100 * run["test_accuracy_average_model"] for run in alone]
    console.print(
        f"{options.kills} kills of {options.processes} processes, "
        f"{sum(kill.writing for kill in kills)} while a checkpoint was written; "
        f"{options.steps} steps, a checkpoint every {options.checkpoint_every}. "
        f"Final accuracy {100 * killed['test_accuracy_average_model']:.2f} %; without kills "
        f"{accuracies[0]:.2f} %, with other seeds {min(accuracies[1:]):.2f} to "
        f"{max(accuracies[1:]):.2f} %.",
        soft_wrap=True,
    )
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, kills, and reports."""
    try:
        options = tyro.cli(
            tyro.conf.FlagCreatePairsOff[Options],
            prog="python -m experiments.interruptions",
            description="Kills processes of a training job at random moments.",
            args=arguments,
        )
        out = results.claim_folder("interruptions", options.out, options.overwrite)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        found = measure(options, out, Console())
    except JobError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    if found:
        sys.exit("\n".join(["violated:", *found]))
    print("nothing was violated")


if __name__ == "__main__":
    main()
