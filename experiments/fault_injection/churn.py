"""Goodput and loss while nodes die, by one algorithm after another, over slow links.

    python -m experiments.fault_injection churn
    python -m experiments.fault_injection churn --deaths-per-minute 0 6 --bandwidth 20mbit

Asynchronous nodes train `experiments.language`, a process per node in a network namespace of its
own, for `--minutes` from the first steps of all nodes on. It needs root. Computation is a sleep in
each step, as of devices that do not share these cores; node 0 is `--slow` times as slow. Deaths are
SIGKILL to a random node, at random moments; its process is started again, and joins. Links have no
limit before all nodes have begun.

Goodput is the share of the steps that all nodes would make without deaths and messages, and that
are not lost: redone after a restart, or of a learner that died before it sent them.

What runs in lockstep, diloco and allreduce, is simulated: its losses are those of nodes in one
process, and its clock counts the slowest node's steps, the bytes of a ring all-reduce at the
slowest link, and for each death `--restart-seconds` and the steps since the last checkpoint.
`quorum` is simulated as well (`quorum.py`): learners whose syncer waits for `--quorum` of them.

Every run closes an account, exactly: of the push-sum weight of asynchronous nodes, of the steps of
what is simulated.

async-outer steps outside every `--outer-every` steps of a node; diloco every 2 (N - 1) / N times as
many, so that both send as many bytes per step. The losses are those of the nodes' own models on
their next batches.
"""

import dataclasses
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import optax
import tyro
from matplotlib.figure import Figure
from rich.progress import Progress

import gossipjax as gx
from experiments import language, results
from experiments.data.tokenizer import TOKENIZER_FILE
from experiments.fault_injection import slow
from experiments.fault_injection.job import ROOT, make_table
from experiments.fault_injection.quorum import Rule, list_pushes, train
from experiments.options import (
    Check,
    Fraction,
    NonNegativeFloat,
    OptionalPath,
    PositiveFloat,
    PositiveInt,
    Seed,
    check_fields,
)
from experiments.plots import COLORS
from experiments.program import ProgramError
from experiments.results import Record
from experiments.speed.wire import links
from experiments.speed.wire.harness import kill
from experiments.speed.wire.rows import DILOCO
from experiments.training.asynchronous import ASYNCHRONOUS
from experiments.training.optimization import make_lr_schedule, make_optimizer

PROGRAM = slow.__name__
PORT = 5600
MAX_DIFFERENCE = 1e-9  # of the account, relative to what founders brought
START_SECONDS = 400.0  # until all nodes have made a step
NO_LIMIT = 10**10  # bits per second
POLL_SECONDS = 0.5
MEAN_SECONDS = 20.0  # over which a loss in the table is a mean
POINTS = 48  # of a curve in the figure
ENDLESS = 100_000  # epochs: runs end after their minutes
LANGUAGE = (
    *("--model", "pico", "--vocabulary-size", "512", "--sequence-length", "32"),
    *("--batch-size-per-node", "4"),
    *("--lr-schedule", "constant", "--learning-rate", "0.003", "--warmup-steps", "20"),
)
LOCKSTEP = (DILOCO, "allreduce")
QUORUM = "quorum"
SIMULATED = (*LOCKSTEP, QUORUM)

Curve = list[tuple[float, float]]
"""Seconds and losses, in order."""


@dataclasses.dataclass(frozen=True)
class ChurnOptions:
    """Trains a language model over slow links while nodes die, by one algorithm after another."""

    algorithm: tuple[str, ...] = ("async-outer", "async-adpsgd", "async-sgp", DILOCO)
    """One or several: those of asynchronous nodes, diloco, allreduce and quorum."""
    deaths_per_minute: tuple[NonNegativeFloat, ...] = (0.0, 1.0)
    """One or several, a run of each algorithm for each."""
    nodes: Annotated[PositiveInt, Check("from 2 to 64", lambda value: 2 <= value <= 64)] = 8
    """Number of nodes, a process each."""
    bandwidth: str = "5mbit"
    """Bandwidth of every node's link, each way, as tc reads it."""
    slow_link: str | None = None
    """Bandwidth of node 0's link; as the others' if not given."""
    slow: Annotated[PositiveFloat, Check("at least 1", lambda value: value >= 1)] = 4.0
    """How many times as long each step of node 0 takes."""
    step_seconds: PositiveFloat = 0.4
    """Seconds that a step of another node takes at least."""
    outer_every: PositiveInt = 12
    """Steps from one outer step to the next, of async-outer."""
    outer_rate: PositiveFloat = 0.7
    """Learning rate of the outer optimizers."""
    outer_momentum: Fraction = 0.9
    """Nesterov's momentum of the outer optimizers."""
    checkpoint_every: PositiveInt = 25
    """Steps between checkpoints, in lockstep."""
    restart_seconds: NonNegativeFloat = 15.0
    """From a death to the next step, of what is simulated."""
    quorum: PositiveInt = 4
    """Learners for which the syncer of quorum waits."""
    minutes: PositiveFloat = 6.0
    """Length of a run."""
    seed: Seed = 0
    """Seed of the deaths, and of the runs."""
    out: OptionalPath = None
    """Folder for the results; a new one under runs/ if not given."""
    overwrite: bool = False
    """Replace the results of another run in --out."""

    def __post_init__(self) -> None:
        check_fields(self)
        self.list_rates()
        known = (*ASYNCHRONOUS, *SIMULATED)
        for name in self.algorithm:
            if name not in known:
                raise ValueError(f"--algorithm must be of {', '.join(known)}, got {name}.")
        if QUORUM in self.algorithm and self.quorum > self.nodes:
            raise ValueError(
                f"--quorum must be at most --nodes, {self.nodes}, got {self.quorum}: no round "
                "would end."
            )

    @property
    def seconds(self) -> float:
        """Length of a run."""
        return 60 * self.minutes

    def list_step_seconds(self) -> list[float]:
        """Seconds of a step of each node."""
        return [self.slow * self.step_seconds, *[self.step_seconds] * (self.nodes - 1)]

    @property
    def most_steps(self) -> float:
        """Steps that all nodes would make if nobody died, and messages took no time."""
        return sum(self.seconds / seconds for seconds in self.list_step_seconds())

    def list_rates(self) -> list[int]:
        """Bits per second of the links."""
        given = [self.slow_link or self.bandwidth, *[self.bandwidth] * (self.nodes - 1)]
        return [links.parse_rate(rate) for rate in given]

    def find_period(self, algorithm: str) -> int:
        """Steps from one exchange to the next, of what has such a period."""
        ring = 2 * (self.nodes - 1) / self.nodes  # models that an all-reduce sends
        periods = {DILOCO: round(ring * self.outer_every)}
        periods |= dict.fromkeys(("async-outer", QUORUM), self.outer_every)
        return periods.get(algorithm, 1)

    def list_arguments(self, algorithm: str) -> list[str]:
        """The options of the program that trains."""
        given = ["--algorithm", "local" if algorithm == DILOCO else algorithm]
        if algorithm in ("async-outer", DILOCO):
            given += ["--outer-every", f"{self.find_period(algorithm)}", "--outer-nesterov"]
            given += ["--outer-rate", f"{self.outer_rate}"]
            given += ["--outer-momentum", f"{self.outer_momentum}"]
        given += ["--nodes", f"{self.nodes}", "--epochs", f"{ENDLESS}", "--seed", f"{self.seed}"]
        return [*given, *LANGUAGE]


class Job:
    """The processes of asynchronous nodes, as a context that ends them."""

    def __init__(self, options: ChurnOptions, algorithm: str, out: Path, hosts: list[links.Host]):
        self.out = out
        self.back_seconds: list[float] = []  # from a death to the next step of that node
        self._options = options
        self._hosts = hosts
        given = ["--step-seconds", f"{options.step_seconds}", "--out", f"{out}"]
        given += ["--tokenizer", f"{out.parent / TOKENIZER_FILE}"]
        self._arguments = [*options.list_arguments(algorithm), *given]
        self._variables = {
            "GOSSIPJAX_JOB": uuid.uuid4().hex,
            "GOSSIPJAX_SECRET": uuid.uuid4().hex,
            "GOSSIPJAX_NODE_ADDRESSES": ",".join(f"{host.address}:{PORT}" for host in hosts),
        }
        self._processes: list[subprocess.Popen[bytes]] = []
        self._restarts = [0] * len(hosts)
        self._away: dict[int, tuple[float, int]] = {}  # place -> when it died, and its steps then

    def __enter__(self) -> "Job":
        self.out.mkdir(parents=True)
        places = range(len(self._hosts))
        for place in places:
            self._losses(place).touch()
        self._processes = [self._start(place) for place in places]
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            kill(process)

    def _start(self, place: int) -> "subprocess.Popen[bytes]":
        variables = self._variables | {
            "GOSSIPJAX_NODE": f"{place}",
            "GOSSIPJAX_RESTART": f"{self._restarts[place]}",
            slow.LOSSES: f"{self._losses(place)}",
            slow.SLOWNESS: f"{1.0 if place else self._options.slow}",
        }
        words = [PROGRAM, "language", *self._arguments]
        return start(self._hosts[place].prefix, words, self.out / f"{place}.log", variables)

    def _losses(self, place: int) -> Path:
        return self.out / f"{place}.losses"

    def _count_steps(self, place: int) -> int:
        return self._losses(place).read_bytes().count(b"\n")

    def wait_for_start(self) -> float:
        """Waits until all nodes make steps, and limits their links; returns the time."""
        deadline = time.time() + START_SECONDS
        while not all(map(self._count_steps, range(len(self._hosts)))):
            self.look()
            if time.time() > deadline:
                raise ProgramError(
                    f"no step in {START_SECONDS:g} s: see the files *.log in {self.out}."
                )
            time.sleep(POLL_SECONDS)
        for host, rate in zip(self._hosts, self._options.list_rates(), strict=True):
            links.limit_link(host, rate)
        return time.time()

    def kill(self, place: int) -> None:
        """Kills a node, and starts its process again."""
        self._away.setdefault(place, (time.time(), self._count_steps(place)))
        kill(self._processes[place])
        self._restarts[place] += 1
        self._processes[place] = self._start(place)

    def look(self) -> None:
        """Notes which nodes are back; raises `ProgramError` if a process has ended by itself."""
        for place, process in enumerate(self._processes):
            require_running(process, self.out / f"{place}.log")
        for place, (died, steps) in list(self._away.items()):
            if self._count_steps(place) > steps:
                self.back_seconds.append(time.time() - died)
                del self._away[place]

    def read_curve(self, began: float, until: float) -> Curve:
        """The losses of all nodes between two times."""
        curve = []
        for place in range(len(self._hosts)):
            with self._losses(place).open() as lines:
                pairs = [line.split() for line in lines if line.endswith("\n")]
            curve += [(float(when) - began, float(loss)) for when, loss in pairs]
        return sorted(point for point in curve if 0 <= point[0] <= until - began)

    def measure_bytes(self) -> float:
        """Bytes that a node has sent, on average, with headers."""
        counter = f"/sys/class/net/{links.INTERFACE}/statistics/tx_bytes"
        counted = [links.run_command(*host.prefix, "cat", counter) for host in self._hosts]
        return statistics.mean(map(int, counted))


def start(
    prefix: Sequence[str], words: Sequence[str], log: Path, variables: dict[str, str]
) -> "subprocess.Popen[bytes]":
    """Runs a module with its options in a process, whose output goes to the end of a file."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with log.open("ab") as file:
        return subprocess.Popen(
            [*prefix, sys.executable, "-m", *words],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
            start_new_session=True,  # Ctrl-C goes to the parent only
        )


def require_running(process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Raises `ProgramError` if a process has ended by itself."""
    if process.poll() is not None:
        tail = log.read_text(errors="replace")[-2000:]
        raise ProgramError(f"{log} ended with {process.returncode}:\n{tail}")


def measure(options: ChurnOptions, out: Path, bar: Progress) -> list[str]:
    """Makes the runs, writes `summary.json`, `loss.png` and `churn.png`, prints the table, and
    returns the violations."""
    if not set(options.algorithm) <= set(SIMULATED):
        links.require_tools()
    model_bytes = prepare(out)
    records: list[Record] = []
    try:
        for algorithm, rate in itertools.product(options.algorithm, options.deaths_per_minute):
            title = f"{algorithm}, {rate:g} deaths a minute"
            row = bar.add_task(title, total=options.seconds, status="compiling")
            deaths = list(draw_deaths(options, rate))
            if algorithm == QUORUM:
                found = train_with_quorum(options, model_bytes, deaths)
                bar.update(row, completed=options.seconds)
            elif algorithm in LOCKSTEP:
                losses = train_in_lockstep(options, algorithm, out / algorithm)
                found = replay_clock(options, algorithm, losses, model_bytes, deaths)
                bar.update(row, completed=options.seconds)
            else:
                folder = out / f"{algorithm}-{rate:g}".replace("@", "-")
                found = train_asynchronously(options, algorithm, folder, deaths, bar, row)
            found["loss"] = average_end(found["curve"], options.seconds)
            bar.update(row, status=f"loss {found['loss']:.3g}")
            records.append({"algorithm": algorithm, "deaths_per_minute": rate} | found)
            results.write_summary(out, dataclasses.asdict(options), {}, records)
    finally:
        if records:
            draw(options, records, out / "loss.png")
            draw_rates(options, records, out / "churn.png")
            rows = (make_row(record, options.seconds) for record in records)
            bar.console.print(make_table(HEADERS, rows, left=("algorithm",)))
    return [
        f"{record['algorithm']}, {record['deaths_per_minute']:g} deaths a minute: the account "
        f"closes to {MAX_DIFFERENCE:g}, got {record['account']}"
        for record in records
        if abs(record["account"]["difference"]) > MAX_DIFFERENCE * record["account"]["founded"]
    ]


def prepare(out: Path) -> int:
    """Saves the tokenizer for all processes; returns the bytes of a model."""
    task = language.LanguageModeling(tyro.cli(language.Options, args=LANGUAGE))
    task.save(out)
    return sum(4 * x.size for x in jax.tree.leaves(jax.eval_shape(task.init, 0)))


def draw_deaths(options: ChurnOptions, rate: float) -> Iterator[tuple[float, int]]:
    """Random moments, in seconds, and the nodes that die then: one in each 60 / rate seconds."""
    rng = random.Random(options.seed)
    for number in range(round(rate * options.minutes)):
        yield (number + rng.random()) * 60 / rate, rng.randrange(options.nodes)


def train_asynchronously(
    options: ChurnOptions,
    algorithm: str,
    folder: Path,
    deaths: Sequence[tuple[float, int]],
    bar: Progress,
    row: Any,
) -> Record:
    """Trains asynchronous nodes, some of which die."""
    pending = list(deaths)
    with (
        links.make_network(options.nodes, NO_LIMIT) as hosts,
        Job(options, algorithm, folder, hosts) as job,
    ):
        began = job.wait_for_start()
        sent = job.measure_bytes()
        while (elapsed := time.time() - began) < options.seconds:
            if pending and elapsed >= pending[0][0]:
                job.kill(pending.pop(0)[1])
            job.look()
            bar.update(row, completed=elapsed, status="training")
            time.sleep(POLL_SECONDS)
        sent = job.measure_bytes() - sent
    curve = job.read_curve(began, began + options.seconds)
    account = gx.asynchronous.account(sorted(folder.glob("nodes/*/journals/*/*.jsonl")))
    return {
        "deaths": len(deaths) - len(pending),
        "steps": len(curve) / options.nodes,
        "goodput": len(curve) / options.most_steps,
        "bytes_per_second": sent / options.seconds,
        "back_seconds": job.back_seconds,
        "curve": curve,
        "account": jax.tree.map(float, account._asdict()) | {"difference": account.difference},
    }


def train_in_lockstep(options: ChurnOptions, algorithm: str, folder: Path) -> list[float]:
    """The loss of each step, without slow nodes, links and deaths: the mean of all nodes, which are
    simulated in one process."""
    needed = math.ceil(options.seconds / (options.slow * options.step_seconds))
    metrics = folder / "metrics.jsonl"
    if not metrics.exists():
        folder.mkdir()
        given = ["--placement", "vmap", "--log-every", "1", "--out", f"{folder}", "--overwrite"]
        given += ["--tokenizer", f"{folder.parent / TOKENIZER_FILE}"]
        words = [language.__name__, *options.list_arguments(algorithm), *given]
        process = start((), words, folder / "log", {})
        try:
            while len(read_losses(metrics)) < needed:
                require_running(process, folder / "log")
                time.sleep(POLL_SECONDS)
        finally:
            kill(process)
    return read_losses(metrics)


def read_losses(metrics: Path) -> list[float]:
    """The training losses in `metrics.jsonl`; none where there is no such file yet."""
    text = metrics.read_text() if metrics.exists() else ""
    lines = (json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n"))
    return [line["loss"] for line in lines if "loss" in line]


def replay_clock(
    options: ChurnOptions,
    algorithm: str,
    losses: Sequence[float],
    model_bytes: int,
    deaths: Sequence[tuple[float, int]],
) -> Record:
    """The losses of a run in lockstep at the times of a simulated clock."""
    every = options.find_period(algorithm)
    message = 2 * (options.nodes - 1) / options.nodes * model_bytes
    exchange = 8 * message / min(options.list_rates())
    curve: Curve = []
    pending = [when for when, _ in deaths]
    now = 0.0
    step = sent = made = lost = 0
    while True:
        is_outer = (step + 1) % every == 0
        end = now + options.slow * options.step_seconds + exchange * is_outer
        if pending and pending[0] < end:
            now = pending.pop(0) + options.restart_seconds
            redone = step % options.checkpoint_every
            step -= redone
            lost += redone
            continue
        if end > options.seconds:
            break
        curve.append((end, losses[step]))
        now = end
        step += 1
        made += 1
        sent += is_outer
    return {
        "deaths": len(deaths) - len(pending),
        "steps": step,
        "goodput": options.nodes * step / options.most_steps,
        "bytes_per_second": sent * message / options.seconds,
        "back_seconds": [options.restart_seconds] * (len(deaths) - len(pending)),
        "curve": curve,
        "account": {
            "founded": made,
            "counted": step,
            "dead": lost,
            "difference": step + lost - made,
        },
    }


def train_with_quorum(
    options: ChurnOptions, model_bytes: int, deaths: Sequence[tuple[float, int]]
) -> Record:
    """Trains simulated learners and a syncer, some of which die."""
    rule = Rule(
        quorum=options.quorum,
        every=options.find_period(QUORUM),
        step_seconds=options.list_step_seconds(),
        message_seconds=8 * model_bytes / min(options.list_rates()),
        restart_seconds=options.restart_seconds,
    )
    events = list_pushes(rule, deaths, options.seconds)
    given = tyro.cli(language.Options, args=LANGUAGE)
    task = language.LanguageModeling(given)
    schedule = make_lr_schedule(given.lr_schedule, given.learning_rate, 1, 1, given.warmup_steps)
    inner = make_optimizer(
        given.optimizer,
        schedule,
        given.weight_decay,
        adam_b2=given.adam_b2,
        decay_mask=task.decay_mask,
    )
    outer = optax.sgd(options.outer_rate, momentum=options.outer_momentum, nesterov=True)
    curve = train(task, inner, outer, events, rule, given.batch_size_per_node, options.seed)
    return {
        "deaths": len(deaths),
        "steps": events.made / options.nodes,
        "goodput": events.counted / options.most_steps,
        "bytes_per_second": len(events.pushes) * model_bytes / options.nodes / options.seconds,
        "back_seconds": [options.restart_seconds] * len(deaths),
        "curve": [point for point in curve if point[0] <= options.seconds],
        "account": {
            "founded": events.made,
            "counted": events.counted,
            "in_flight": events.open,
            "dead": events.lost,
            "difference": events.difference,
        },
    }


def average_end(curve: Curve, seconds: float) -> float:
    """The mean loss before these seconds, over a part of a run; nan where there is none."""
    until = [(when, loss) for when, loss in curve if when <= seconds]
    last = [loss for when, loss in until if when > seconds - MEAN_SECONDS]
    return statistics.mean(last or [loss for _, loss in until[-1:]] or [math.nan])


HEADERS = ("algorithm", "deaths\na minute", "deaths", "steps", "goodput\n%", "kB/s\nsent")
HEADERS += ("back\ns",)
HEADERS += ("loss\nat 1/3", "at 2/3", "at the\nend", "account's\ndifference")


def make_row(record: Record, seconds: float) -> tuple[str, ...]:
    """The cells of a run."""
    back = record["back_seconds"]
    return (
        record["algorithm"],
        f"{record['deaths_per_minute']:g}",
        f"{record['deaths']}",
        f"{record['steps']:.0f}",
        f"{100 * record['goodput']:.0f}",
        f"{record['bytes_per_second'] / 1e3:.0f}",
        f"{statistics.median(back):.0f}" if back else "-",
        *(f"{average_end(record['curve'], part * seconds / 3):.3f}" for part in (1, 2, 3)),
        f"{record['account']['difference']:.0e}",
    )


def draw(options: ChurnOptions, records: Sequence[Record], path: Path) -> None:
    """Draws the losses against the minutes, a panel for each rate of deaths."""
    rates = options.deaths_per_minute
    figure = Figure((1 + 5 * len(rates), 4.5), dpi=120, layout="constrained")
    figure.suptitle(
        f"{options.nodes} nodes on links of {options.bandwidth}, one {options.slow:g} times as slow"
    )
    panels = figure.subplots(1, len(rates), squeeze=False, sharey=True)[0]
    for axes, rate in zip(panels, rates, strict=True):
        for record in records:
            if record["deaths_per_minute"] == rate:
                minutes, losses = average_by_time(record["curve"], options.seconds / POINTS)
                color = COLORS[options.algorithm.index(record["algorithm"]) % len(COLORS)]
                axes.plot(minutes, losses, color=color, label=record["algorithm"])
        axes.set(title=f"{rate:g} deaths a minute", xlabel="time (minutes)")
        axes.set(ylabel="training loss (mean of the nodes)")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path)


def draw_rates(options: ChurnOptions, records: Sequence[Record], path: Path) -> None:
    """Draws goodput and loss against the rate of deaths; what is simulated is dashed."""
    figure = Figure((10, 4), dpi=120, layout="constrained")
    figure.suptitle(f"{options.nodes} nodes, {options.minutes:g} minutes")
    panels = figure.subplots(1, 2)
    for index, algorithm in enumerate(options.algorithm):
        found = [record for record in records if record["algorithm"] == algorithm]
        rates = [record["deaths_per_minute"] for record in found]
        is_simulated = algorithm in SIMULATED
        look: dict[str, Any] = {"marker": "o", "color": COLORS[index % len(COLORS)]}
        look |= {"ls": "--" if is_simulated else "-"}
        look["label"] = f"{algorithm} (simulated)" if is_simulated else algorithm
        panels[0].plot(rates, [100 * record["goodput"] for record in found], **look)
        panels[1].plot(rates, [record["loss"] for record in found], **look)
    panels[0].set(title="Steps that are not lost", ylabel="goodput, % of a job without deaths")
    panels[1].set(title="Loss at the end", ylabel="training loss, nats per token")
    for axes in panels:
        axes.set_xlabel("deaths a minute, all nodes")
        axes.grid(alpha=0.3)
    panels[0].set_ylim(bottom=0)
    panels[0].legend(fontsize="small")
    figure.savefig(path)


def average_by_time(curve: Curve, width: float) -> tuple[list[float], list[float]]:
    """Minutes, and the mean loss in each of the parts of so many seconds that end there."""
    parts: dict[int, list[float]] = {}
    for when, loss in curve:
        parts.setdefault(int(when // width), []).append(loss)
    numbers = sorted(parts)
    return [(n + 1) * width / 60 for n in numbers], [statistics.mean(parts[n]) for n in numbers]
