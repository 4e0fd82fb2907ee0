"""Asynchronous nodes as threads of a process, disturbed for as long as asked, by a seed.

    python -m experiments.fault_injection chaos
    python -m experiments.fault_injection chaos --scenario deaths --deaths 1000

Simulated are the kills, `Node.abort`: the node says nothing more and what it holds is lost; its
sockets are real. The nodes train softmax regression on digits. Every scenario must end, with an
account of the weight that closes to 1e-9 and an accuracy near that of the undisturbed job. No node
may be declared dead that lives: each that is started has one life.

    nan         at node 1 every other update is not finite, and is skipped
    deaths      a node is killed whenever the one before is back
    clock       the same, and the clock goes back an hour at each death
    disk        the journals of odd places are on a disk that is full for most of the time
    crowd       64 nodes in 8 processes that know one address; every 6 s one joins, or one leaves
    strangers   garbage, and messages of other jobs, arrive all the time

The clock is simulated: it is `time.time` of this process, so that of all nodes, and is right again
at the end. `disk` needs root. Its journals lack lines, and must say so; what the nodes hold at the
end is added up instead.
"""

import contextlib
import dataclasses
import json
import random
import shutil
import threading
import time
import warnings
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import jax.numpy as jnp
import optax
import zmq
from rich.progress import Progress
from rich.table import Table

import gossipjax as gx
from experiments import data, results
from experiments.cluster import digits
from experiments.fault_injection.job import make_table
from experiments.fault_injection.small_disk import make_room, mount_small_disk, require_root
from experiments.options import Check, OptionalPath, PositiveFloat, PositiveInt, Seed, check_fields

MAX_DIFFERENCE = 1e-9  # of the account, relative to what founders brought
MAX_LOSS = 0.03  # of accuracy, below the undisturbed job
END_SECONDS = 120.0
OPTIMIZER = optax.sgd(0.01, momentum=0.9)  # one for all: the nodes share its compiled program
HOSTS = 8  # processes of `crowd`
CROWD_SECONDS = 6.0  # between a join and a leave
CLOCK_SECONDS = 3600.0  # by which the clock goes back
DISK_KILOBYTES = 4  # for each node
Scenario = Literal["nan", "deaths", "clock", "disk", "crowd", "strangers"]


@dataclasses.dataclass(frozen=True)
class ChaosOptions:
    """Disturbs asynchronous nodes that are threads of one process."""

    scenario: tuple[Scenario, ...] = ("nan", "deaths", "clock", "crowd", "strangers")
    """What is tried, one after another; an undisturbed job comes first. `disk` needs root."""
    nodes: Annotated[PositiveInt, Check("at least 3", lambda value: value >= 3)] = 8
    """Number of nodes, but for `crowd`."""
    crowd: Annotated[PositiveInt, Check("at least 3", lambda value: value >= 3)] = 64
    """Number of nodes of `crowd`."""
    seconds: PositiveFloat = 30.0
    """Seconds of training in each scenario; all kills may take longer."""
    deaths: PositiveInt = 100
    """Kills of `deaths`, and of `clock`."""
    patience: PositiveFloat = 2.0
    """Seconds of silence after which a node is declared dead. They and the pauses are longer by its
    number in `crowd`, whose nodes share the same cores."""
    step_seconds: PositiveFloat = 0.02
    """Pause after each step."""
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
    starts: int  # of nodes, those that joined later included
    lives: int  # of all nodes; above their starts, one was declared dead that lived
    difference: float  # of the account
    living: float  # weight
    accuracy: float  # the lowest of a node; 0 if none has ended
    threads: int  # that did not end


class State(NamedTuple):
    """What a node has come to."""

    steps: int
    total_steps: int  # of all nodes, as far as it knows
    skipped: int  # steps whose update was not finite
    accuracy: float | None  # once it has ended
    weight: float  # that it held at the end
    error: str | None


class Runner:
    """A node in a thread: it trains until it is told to end, leave or die."""

    def __init__(
        self,
        options: ChaosOptions,
        scenario: str,
        place: int,
        address: str | None,
        is_founder: bool,
        journal: Path,
    ):
        slower = options.crowd / options.nodes if scenario == "crowd" else 1.0
        self._place = place
        self._pause_seconds = options.step_seconds * slower
        self._digits = data.load("mnist5k")
        self._is_sick = scenario == "nan" and place == 1
        self._node = gx.asynchronous.join(
            address,
            OPTIMIZER,
            digits.init(),
            algorithm=gx.asynchronous.sgp(seed=options.seed),
            place=place,
            job=scenario,
            is_founder=is_founder,
            patience=options.patience * slower,
            journal=journal,
            nonfinite="skip",
        )
        self._accuracy: float | None = None
        self._weight = 0.0
        self._error: str | None = None
        self._is_told: Literal["train", "average", "leave"] = "train"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        node = self._node
        try:
            while self._is_told == "train":
                step = node.statistics.steps
                batch = digits.draw_batch(self._digits, step, self._place)
                node.step(to_nan if self._is_sick and step % 2 else digits.gradients, batch)
                time.sleep(self._pause_seconds)
            if self._is_told == "average":
                model = node.average(timeout=END_SECONDS)
                self._accuracy = digits.measure_accuracy(model, self._digits)
                self._weight = node.statistics.weight
            node.leave()
        except BaseException as error:
            self._error = f"place {self._place}: {error}"
            node.abort()

    def find_address(self) -> str:
        """Where it listens."""
        return self._node.address

    def read(self) -> State:
        """What it has come to."""
        statistics = self._node.statistics
        counts = statistics.steps, self._node.total_steps, statistics.skipped
        return State(*counts, self._accuracy, self._weight, self._error)

    def tell(self, what: Literal["average", "leave"]) -> None:
        """Has it end after its step."""
        self._is_told = what

    def kill(self) -> None:
        """Ends it at once."""
        self._is_told = "leave"
        self._node.abort()

    def join(self, seconds: float) -> bool:
        """Waits for its end; whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()


def to_nan(params: Any, batch: Any) -> tuple[Any, Any]:
    """Gradients that are not finite."""
    grads, aux = digits.gradients(params, batch)
    return {name: grad * jnp.nan for name, grad in grads.items()}, aux


class Host(BaseManager):
    """A process that has nodes: 64 in one process would wait for its one interpreter."""

    Runner: Callable[..., Runner]


Host.register("Runner", Runner)


class Job:
    """The nodes of a scenario, and their journals in a folder."""

    def __init__(self, options: ChaosOptions, scenario: str, folder: Path):
        self.options = options
        self.name = scenario
        self.folder = folder
        self.rng = random.Random(f"{options.seed} {scenario}")
        self.faults = 0
        self.starts = 0
        self.hosts = [Host(ctx=get_context("spawn")) for _ in range(HOSTS * (scenario == "crowd"))]
        for host in self.hosts:
            host.start()
        size = options.crowd if scenario == "crowd" else options.nodes
        self.runners = [self.start(0, None, True)]
        address = self.runners[0].find_address()
        self.runners += [self.start(place, address, True) for place in range(1, size)]
        self._began = time.monotonic()

    def start(self, place: int, address: str | None, is_founder: bool) -> Runner:
        """Starts a node."""
        self.starts += 1
        make = self.hosts[place % HOSTS].Runner if self.hosts else Runner
        return make(self.options, self.name, place, address, is_founder, self.find_journal(place))

    def find_journal(self, place: int) -> Path:
        """Where the journal of a place is."""
        is_on_disk = self.name == "disk" and place % 2 == 1
        return (self.folder / "disk" if is_on_disk else self.folder) / f"{place}.jsonl"

    @property
    def seconds(self) -> float:
        """Since its start."""
        return time.monotonic() - self._began

    def wait_for_all(self) -> None:
        """Waits until all nodes make steps, as long as a node may take to join."""
        deadline = time.monotonic() + END_SECONDS
        while time.monotonic() < deadline:
            states = [runner.read() for runner in self.runners]
            if all(state.steps > 0 and state.error is None for state in states):
                return
            time.sleep(0.02)

    def kill_and_replace(self, place: int) -> None:
        """Kills a node, and starts another life at its place, which joins by any other."""
        runner = self.runners[place]
        others = [other for other in self.runners if other is not runner]
        runner.kill()
        self.faults += 1
        address = self.rng.choice(others).find_address()
        self.runners[place] = self.start(place, address, False)

    def finish(self) -> Row:
        """Has all nodes end; returns what the job came to."""
        steps = max(runner.read().total_steps for runner in self.runners)
        seconds = self.seconds
        for runner in self.runners:
            runner.tell("average")
        deadline = time.monotonic() + 2 * END_SECONDS
        hanging = sum(not r.join(max(0.1, deadline - time.monotonic())) for r in self.runners)
        states = [runner.read() for runner in self.runners]
        for host in self.hosts:
            host.shutdown()
        if self.name == "nan":
            self.faults = sum(state.skipped for state in states)
        errors = [state.error for state in states if state.error is not None]
        if errors:
            warnings.warn(f"{self.name}: {len(errors)} errors, {errors[0]}", stacklevel=1)
        difference, living = self.add_up(sum(state.weight for state in states))
        accuracies = [state.accuracy for state in states if state.accuracy is not None]
        return Row(
            self.name,
            len(self.runners),
            seconds,
            steps,
            self.faults,
            self.starts,
            sum(map(count_lives, self.folder.rglob("*.jsonl"))),
            difference,
            living,
            min(accuracies, default=0.0),
            hanging + len(errors),
        )

    def add_up(self, weight: float) -> tuple[float, float]:
        """What part of the founders' weight the account misses, and the weight of the living."""
        journals = sorted(self.folder.rglob("*.jsonl"))
        if self.name == "disk":
            self.faults = sum(map(count_missing, journals))
            return weight / len(self.runners) - 1, weight
        account = gx.asynchronous.account(journals)
        living = float(sum(account.living.values()))
        return account.difference / float(account.founded), living


def count_missing(journal: Path) -> int:
    """The lines that a journal lacks, for which it must not have an account; 0 if it has one."""
    try:
        gx.asynchronous.account([journal])
    except ValueError as error:
        if "could not be written" in str(error):
            with journal.open() as lines:
                return sum(json.loads(line).get("missing", 0) for line in lines)
    return 0


def count_lives(path: Path) -> int:
    """The lives in a journal."""
    with path.open() as lines:
        return sum(json.loads(line)["event"] == "life" for line in lines)


def run_undisturbed(job: Job) -> None:
    """Nothing happens."""
    time.sleep(job.options.seconds)


def run_deaths(job: Job) -> None:
    """Kills nodes, each as soon as all are there."""
    for _ in range(job.options.deaths):
        job.wait_for_all()
        job.kill_and_replace(job.rng.randrange(len(job.runners)))
    time.sleep(max(0.0, job.options.seconds - job.seconds))


def run_clock(job: Job) -> None:
    """Kills nodes, and sets the clock back at each death."""
    read_clock = time.time
    time.time = lambda: read_clock() - CLOCK_SECONDS * job.faults
    try:
        run_deaths(job)
    finally:
        time.time = read_clock


def run_disk(job: Job) -> None:
    """Lets the disk be full, and then have room."""
    time.sleep(job.options.seconds * 2 / 3)
    make_room(job.folder / "disk")
    time.sleep(job.options.seconds / 3)


def run_crowd(job: Job) -> None:
    """Nodes join and leave."""
    address = job.runners[0].find_address()
    next_place = len(job.runners)
    while job.seconds < job.options.seconds:
        time.sleep(CROWD_SECONDS)
        leaver = job.rng.choice(job.runners[1:])
        leaver.tell("leave")
        job.runners.remove(leaver)
        time.sleep(CROWD_SECONDS)
        job.runners.append(job.start(next_place, address, False))
        next_place += 1
        job.faults += 2


def run_strangers(job: Job) -> None:
    """Sends garbage to all nodes."""
    context = zmq.Context()
    sockets = []
    for runner in job.runners:
        sockets.append(context.socket(zmq.PUSH))
        sockets[-1].connect(f"tcp://{runner.find_address()}")
    header = {"version": 2, "job": "another", "sender": [1, "life", "127.0.0.1:9"]}
    kinds = (b"P[]", b"A", b"M{", b"", b"{}", b"\xff" * 99, json.dumps(header).encode())
    while job.seconds < job.options.seconds:
        frames = [job.rng.choice(kinds), job.rng.randbytes(job.rng.randrange(9))]
        job.rng.choice(sockets).send_multipart(frames)
        job.faults += 1
        time.sleep(0.002)
    context.destroy(linger=0)


SCENARIOS: dict[str, Callable[[Job], None]] = {
    "undisturbed": run_undisturbed,
    "nan": run_undisturbed,
    "deaths": run_deaths,
    "clock": run_clock,
    "disk": run_disk,
    "crowd": run_crowd,
    "strangers": run_strangers,
}


def measure(options: ChaosOptions, out: Path, bar: Progress) -> list[str]:
    """Runs the scenarios, prints their table, and returns what was violated."""
    if "disk" in options.scenario:
        require_root()
    rows = []
    for scenario in ("undisturbed", *options.scenario):
        task = bar.add_task(scenario, total=None, status="")
        rows.append(run_scenario(options, scenario, out / scenario))
        bar.update(task, total=1, completed=1)
    bar.console.print(show_rows(rows))
    results.write_summary(out, dataclasses.asdict(options), {}, [row._asdict() for row in rows])
    return [violation for row in rows for violation in check(row, rows[0])]


def run_scenario(options: ChaosOptions, scenario: str, folder: Path) -> Row:
    """Runs a scenario, whose journals are in a new folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    disk = contextlib.nullcontext()
    if scenario == "disk":
        disk = mount_small_disk(folder / "disk", DISK_KILOBYTES * options.nodes)
    with disk:
        job = Job(options, scenario, folder)
        SCENARIOS[scenario](job)
        return job.finish()


HEADERS = ("scenario", "nodes", "s", "steps", "faults", "starts", "lives", "account\noff by")
HEADERS += ("weight\nliving", "accu-\nracy %")


def show_rows(rows: list[Row]) -> Table:
    """A table with a row for each scenario."""
    cells = [
        (
            row.scenario,
            f"{row.nodes}",
            f"{row.seconds:.0f}",
            f"{row.steps:,}",
            f"{row.faults:,}",
            f"{row.starts:,}",
            f"{row.lives:,}",
            f"{row.difference:.1e}",
            f"{row.living:.3g}",
            f"{100 * row.accuracy:.1f}",
        )
        for row in rows
    ]
    return make_table(("#", *HEADERS), cells, left=("scenario",))


def check(row: Row, undisturbed: Row) -> list[str]:
    """What a scenario has violated."""
    required = [
        (row.threads == 0, "all nodes end", row.threads),
        (row.faults > 0 or row.scenario == undisturbed.scenario, "faults", row.faults),
        (abs(row.difference) <= MAX_DIFFERENCE, "the account closes", row.difference),
        (row.lives <= row.starts, "nobody that lives is declared dead", row.lives),
        (
            row.accuracy >= undisturbed.accuracy - MAX_LOSS,
            f"an accuracy of {undisturbed.accuracy - MAX_LOSS:.3f}",
            row.accuracy,
        ),
    ]
    return [f"{row.scenario}: {what}, got {got}" for holds, what, got in required if not holds]
