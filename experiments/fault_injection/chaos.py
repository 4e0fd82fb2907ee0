"""Asynchronous nodes as threads of one process, disturbed for as long as asked, by a seed.

    python -m experiments.fault_injection chaos
    python -m experiments.fault_injection chaos --scenario deaths --deaths 1000

Simulated are the kills, `Node.abort`: the node says nothing more and what it holds is lost; its
sockets are real. The nodes train softmax regression on digits. Every scenario must end, with an
account of the weight that closes to 1e-9 and an accuracy near that of the undisturbed job. A node
that was never killed must not have been declared dead: it has one life.

    nan         at node 1 every other update is not finite, and is skipped
    deaths      a node is killed whenever the one before is back
    crowd       64 nodes that know one address; every 6 seconds one joins, or one leaves
    strangers   garbage, and messages of other jobs, arrive all the time
"""

import dataclasses
import json
import random
import shutil
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
import zmq
from rich.progress import Progress

import gossipjax as gx
from experiments import data, results
from experiments.cluster import digits
from experiments.fault_injection.job import make_table
from experiments.options import Check, OptionalPath, PositiveFloat, PositiveInt, Seed, check_fields

MAX_DIFFERENCE = 1e-9  # of the account, relative to what founders brought
MAX_LOSS = 0.03  # of accuracy, below the undisturbed job
END_SECONDS = 120.0
CROWD_SECONDS = 6.0  # between a join and a leave
Scenario = Literal["nan", "deaths", "crowd", "strangers"]


@dataclasses.dataclass(frozen=True)
class ChaosOptions:
    """Disturbs asynchronous nodes that are threads of one process."""

    scenario: tuple[Scenario, ...] = ("nan", "deaths", "crowd", "strangers")
    """What is tried, one after another; an undisturbed job comes first."""
    nodes: Annotated[PositiveInt, Check("at least 3", lambda value: value >= 3)] = 8
    """Number of nodes, but for `crowd`."""
    crowd: PositiveInt = 64
    """Number of nodes of `crowd`."""
    seconds: PositiveFloat = 30.0
    """Seconds of training in each scenario, but for `deaths`."""
    deaths: PositiveInt = 100
    """Kills of `deaths`."""
    patience: PositiveFloat = 2.0
    """Seconds of silence after which a node is declared dead."""
    step_seconds: PositiveFloat = 0.02
    """Pause after each step: the threads share the cores. In `crowd` it is longer by its number."""
    seed: Seed = 0
    """Seed of the faults and of the data."""
    out: OptionalPath = None
    """Folder for the results; a new one under runs/ if not given."""
    overwrite: bool = False
    """Replace the results of another run in --out."""

    def __post_init__(self) -> None:
        check_fields(self)


class Row(NamedTuple):
    """What a scenario came to."""

    scenario: str
    nodes: int
    seconds: float
    steps: int
    faults: int
    lives: int  # of nodes that nobody killed; above their number, one was declared dead
    unhurt: int  # those nodes
    difference: float  # of the account
    living: float  # weight
    accuracy: float
    threads: int  # that did not end


class Runner:
    """A node in a thread: it trains until it is told to end, leave or die."""

    def __init__(self, job: "Job", place: int, address: str | None, is_founder: bool):
        self.place = place
        self.journal = job.folder / f"{place}.jsonl"
        self.node = gx.asynchronous.join(
            address,
            optax.sgd(0.01, momentum=0.9),
            digits.init(),
            algorithm=gx.asynchronous.sgp(seed=job.options.seed),
            place=place,
            job=job.name,
            is_founder=is_founder,
            patience=job.options.patience,
            journal=self.journal,
            nonfinite="skip",
        )
        self.accuracy: float | None = None
        self.error: BaseException | None = None
        self._job = job
        self._is_told: Literal["train", "average", "leave"] = "train"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        job = self._job
        try:
            while self._is_told == "train":
                step = self.node.statistics.steps
                batch = digits.draw_batch(job.digits, step, self.place)
                self.node.step(job.gradients_of(self.place, step), batch)
                time.sleep(job.pause_seconds)
            if self._is_told == "average":
                model = self.node.average(timeout=END_SECONDS)
                self.accuracy = digits.measure_accuracy(model, job.digits)
            self.node.leave()
        except BaseException as error:
            self.error = error

    @property
    def is_there(self) -> bool:
        """Whether it has made a step."""
        return self.node.statistics.steps > 0 and self.error is None

    def tell(self, what: Literal["average", "leave"]) -> None:
        """Has it end after its step."""
        self._is_told = what

    def kill(self) -> None:
        """Ends it at once."""
        self._is_told = "leave"
        self.node.abort()

    def join(self, seconds: float) -> bool:
        """Waits for its end; whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()


def to_nan(params: Any, batch: Any) -> tuple[Any, Any]:
    """Gradients that are not finite."""
    grads, aux = digits.gradients(params, batch)
    return {name: grad * jnp.nan for name, grad in grads.items()}, aux


class Job:
    """The nodes of a scenario."""

    def __init__(self, options: ChaosOptions, scenario: str, out: Path):
        self.options = options
        self.name = scenario
        self.folder = out / scenario
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.digits = data.load("mnist5k")
        self.rng = random.Random(f"{options.seed} {scenario}")
        self.faults = 0
        self.hurt: set[int] = set()
        size = options.crowd if scenario == "crowd" else options.nodes
        self.pause_seconds = options.step_seconds * size / options.nodes
        self.runners = [Runner(self, 0, None, True)]
        for place in range(1, size):
            self.runners.append(Runner(self, place, self.runners[0].node.address, True))
        self._began = time.monotonic()

    def gradients_of(self, place: int, step: int) -> Callable[..., Any]:
        """The gradients of a node at a step."""
        is_sick = self.name == "nan" and place == 1 and step % 2 == 1
        self.faults += is_sick
        return to_nan if is_sick else digits.gradients

    @property
    def seconds(self) -> float:
        """Since its start."""
        return time.monotonic() - self._began

    def pause(self, seconds: float) -> None:
        """Lets it train."""
        time.sleep(seconds)

    def kill_and_replace(self, runner: Runner) -> None:
        """Kills a node, and starts another life at its place, which joins by any other."""
        others = [other for other in self.runners if other is not runner]
        runner.kill()
        self.hurt.add(runner.place)
        self.faults += 1
        address = self.rng.choice(others).node.address
        self.runners[self.runners.index(runner)] = Runner(self, runner.place, address, False)

    def finish(self) -> Row:
        """Has all nodes end; returns what the job came to."""
        steps = max(runner.node.total_steps for runner in self.runners)
        seconds = self.seconds
        for runner in self.runners:
            runner.tell("average")
        deadline = time.monotonic() + 2 * END_SECONDS
        hanging = sum(not r.join(max(0.1, deadline - time.monotonic())) for r in self.runners)
        errors = [f"{r.place}: {r.error}" for r in self.runners if r.error is not None]
        if errors:
            warnings.warn(f"{self.name}: {len(errors)} errors, {errors[0]}", stacklevel=1)
        account = gx.asynchronous.account(sorted(self.folder.glob("*.jsonl")))
        unhurt = [r.place for r in self.runners if r.place not in self.hurt]
        accuracies = [r.accuracy for r in self.runners if r.accuracy is not None]
        return Row(
            self.name,
            len(self.runners),
            seconds,
            steps,
            self.faults,
            sum(count_lives(self.folder / f"{place}.jsonl") for place in unhurt),
            len(unhurt),
            account.difference / float(account.founded),
            float(sum(account.living.values())),
            min(accuracies, default=float("nan")),
            hanging + len(errors),
        )


def count_lives(path: Path) -> int:
    """The lives in a journal."""
    with path.open() as lines:
        return sum(json.loads(line)["event"] == "life" for line in lines)


def run_undisturbed(job: Job) -> None:
    """Nothing happens."""
    job.pause(job.options.seconds)


def run_deaths(job: Job) -> None:
    """Kills nodes, each as soon as all are there."""
    for _ in range(job.options.deaths):
        while not all(runner.is_there for runner in job.runners):
            job.pause(0.02)
        job.kill_and_replace(job.rng.choice(job.runners))


def run_crowd(job: Job) -> None:
    """Nodes join and leave."""
    address = job.runners[0].node.address
    next_place = len(job.runners)
    while job.seconds < job.options.seconds:
        job.pause(CROWD_SECONDS)
        leaver = job.rng.choice(job.runners[1:])
        leaver.tell("leave")
        job.runners.remove(leaver)
        job.pause(CROWD_SECONDS)
        job.runners.append(Runner(job, next_place, address, False))
        job.hurt.add(next_place)
        next_place += 1
        job.faults += 2


def run_strangers(job: Job) -> None:
    """Sends garbage to all nodes."""
    context = zmq.Context()
    sockets = []
    for runner in job.runners:
        sockets.append(context.socket(zmq.PUSH))
        sockets[-1].connect(f"tcp://{runner.node.address}")
    header = {"version": 2, "job": "another", "sender": [1, "life", "127.0.0.1:9"]}
    kinds = (b"P[]", b"A", b"M{", b"", b"{}", b"\xff" * 99, json.dumps(header).encode())
    while job.seconds < job.options.seconds:
        frames = [job.rng.choice(kinds), job.rng.randbytes(job.rng.randrange(9))]
        job.rng.choice(sockets).send_multipart(frames)
        job.faults += 1
        job.pause(0.002)
    context.destroy(linger=0)


SCENARIOS: dict[str, Callable[[Job], None]] = {
    "undisturbed": run_undisturbed,
    "nan": run_undisturbed,
    "deaths": run_deaths,
    "crowd": run_crowd,
    "strangers": run_strangers,
}


def measure(options: ChaosOptions, out: Path, bar: Progress) -> list[str]:
    """Runs the scenarios, prints their table, and returns what was violated."""
    rows = []
    for scenario in ("undisturbed", *options.scenario):
        task = bar.add_task(scenario, total=None, status="")
        job = Job(options, scenario, out)
        SCENARIOS[scenario](job)
        rows.append(job.finish())
        bar.update(task, total=1, completed=1)
    headers = ("scenario", "nodes", "seconds", "steps", "faults", "lives of\nunhurt nodes")
    headers += ("account's\ndifference", "living\nweight", "accuracy %")
    cells = [
        (
            row.scenario,
            f"{row.nodes}",
            f"{row.seconds:.0f}",
            f"{row.steps:,}",
            f"{row.faults:,}",
            f"{row.lives} of {row.unhurt}",
            f"{row.difference:.1e}",
            f"{row.living:.3g}",
            f"{100 * row.accuracy:.1f}",
        )
        for row in rows
    ]
    bar.console.print(make_table(("#", *headers), cells, left=("scenario",)))
    results.write_summary(out, dataclasses.asdict(options), {}, [row._asdict() for row in rows])
    return [violation for row in rows for violation in check(row, rows[0])]


def check(row: Row, undisturbed: Row) -> list[str]:
    """What a scenario has violated."""
    required = [
        (row.threads == 0, "all nodes end", row.threads),
        (abs(row.difference) <= MAX_DIFFERENCE, "the account closes", row.difference),
        (row.lives <= row.unhurt, "nobody that lives is declared dead", row.lives),
        (
            bool(np.isfinite(row.accuracy)) and row.accuracy >= undisturbed.accuracy - MAX_LOSS,
            f"an accuracy of {undisturbed.accuracy - MAX_LOSS:.3f}",
            row.accuracy,
        ),
    ]
    return [f"{row.scenario}: {what}, got {got}" for holds, what, got in required if not holds]
