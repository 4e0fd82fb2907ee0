"""Simulated: outer optimizers where one worker is slow, by loss against seconds.

    python -m experiments.asynchronous_outer
    python -m experiments.asynchronous_outer --slowness 1 1 1 1 --death 20

Workers fit a linear classifier of digits (`experiments.survival`: mnist5k in 7 x 7 values, half of
each worker's examples of its own classes) by SGD on batches of 32, `--every` local steps at a time.
A local step of worker i takes 10 ms times its `--slowness`; messages take no time. Times and
losses are those of one simulation, event by event.

- `diloco`: all wait for the slowest; Nesterov on the mean.
- `nesterov`: a server steps at each arrival.
- `delayed`: Delayed Nesterov: the momentum is stepped at every N-th arrival.
- `delayed, dynamic`: the same, and slower workers make fewer local steps.
- `quorum`: a server waits for half of the workers, and then for `--grace`. It averages by tokens
  what has come; the others count later.
- `quorum, drop`: the same, but what comes late is dropped.
- `quorum of 1`: as `quorum`, but a server waits for one worker before the grace begins.
- `push-sum`: ours, `gx.asynchronous.outer`, with no server: the average model.
- `push-sum, nodes`: the mean over the nodes of the losses of their own models.

The momentum is 0.9. The outer rate of each rule is chosen in the same way, on other seeds: it
begins at 0.4, and is doubled and halved until the middle of three has the smallest loss at the end.
The table has the part of the time in which workers wait, the mean number of updates of the server
that a movement is late by, and the mean loss over the seeds, with its standard deviation, after
half of the seconds, at their end, and after as many steps of all workers as the rule with the
fewest makes.

The program writes `metrics.jsonl` (the curves of each rule), `summary.json` and
`asynchronous_outer.png` into `--out`.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from experiments import results, survival
from experiments.asynchronous_outer.events import (
    Arrivals,
    Rule,
    Shares,
    Workers,
    list_arrivals,
    list_shares,
)
from experiments.asynchronous_outer.training import (
    Job,
    average_living,
    train_with_server,
    train_without_server,
)
from experiments.options import (
    NonNegativeFloat,
    OptionalPath,
    PositiveFloat,
    PositiveInt,
    Seed,
    check_fields,
    parse_arguments,
)
from experiments.plots import choose_looks
from experiments.program import exit_on_error
from experiments.rate_rule import choose_rate
from experiments.results import Record

STEP_SECONDS = 0.01  # of a local step of a worker of slowness 1
BATCH = 32
INNER_RATE = 0.1
MOMENTUM = 0.9
FIRST_RATE = 0.4
TUNING_SEED = 1000  # added to the seeds
POINTS = 50  # of a curve
PUSH_SUM = "push-sum"


@dataclasses.dataclass(frozen=True)
class Options:
    """Outer optimizers of workers that are not equally fast, simulated."""

    slowness: tuple[PositiveFloat, ...] = (4, 2, 1, 1, 1, 1, 1, 1)
    """How many times as long a step of each worker takes; as many workers as there are values."""
    every: PositiveInt = 16
    """H, local steps from one exchange to the next."""
    grace: NonNegativeFloat = 0.25
    """Of a quorum: a part of the time in which the fastest worker makes its local steps."""
    seconds: PositiveFloat = 10.0
    """Simulated, of each run."""
    death: PositiveFloat | None = None
    """When the last worker dies, in seconds; it lives if not given."""
    seed: tuple[Seed, ...] = (0, 1, 2)
    """One or several seeds of batches; they share the peers of push-sum."""
    out: OptionalPath = None
    """Folder for the results; a new one under runs/ if not given."""
    overwrite: bool = False
    """Replace the results of another run in --out."""

    def __post_init__(self) -> None:
        check_fields(self)
        if len(self.slowness) != survival.NODES:
            raise ValueError(
                f"--slowness must be {survival.NODES} numbers, as the data has {survival.NODES} "
                f"parts, got {len(self.slowness)}."
            )
        if not self.seed or len(set(self.seed)) < len(self.seed):
            raise ValueError(f"--seed must be one or several different values, got {self.seed}.")
        needed = self.every * STEP_SECONDS * max(self.slowness)
        if self.seconds < 4 * needed:
            raise ValueError(
                f"--seconds must be at least {4 * needed:g}, in which the slowest worker makes 4 "
                f"times --every steps, got {self.seconds:g}."
            )


def make_rules(options: Options) -> dict[str, Rule]:
    """Returns the rules of a server, by name."""
    size = len(options.slowness)
    grace = options.grace * options.every * STEP_SECONDS * min(options.slowness)
    quorum = Rule(size // 2, grace, goes_on=True)
    return {
        "diloco": Rule(size),
        "nesterov": Rule(),
        "delayed": Rule(momentum_every=size),
        "delayed, dynamic": Rule(momentum_every=size, dynamic=True),
        "quorum": quorum,
        "quorum, drop": dataclasses.replace(quorum, late="drop"),
        "quorum of 1": dataclasses.replace(quorum, quorum=1),
    }


class Runs(NamedTuple):
    """The events of a rule, and its training.

    Attributes:
      train: `(rate, seeds [S]) -> losses [S, P, columns]` at P moments.
      names: of the columns.
      seconds, steps: those moments, and the local steps of all workers until then, `[P]`.
      waiting: part of the time in which workers do not compute, or None.
      staleness: the mean over what a server counts, or None.
    """

    train: Callable[[Any, Any], np.ndarray]
    names: Sequence[str]
    seconds: np.ndarray
    steps: np.ndarray
    waiting: float | None = None
    staleness: float | None = None


def make_job(parts: Sequence[jax.Array], steps: int, seed: jax.Array) -> Job:
    """The task: images `[N, B, 50]`, one-hot labels `[N, B, 10]`; so many local steps at most."""
    images, labels = parts
    shape = (len(images), steps, BATCH)
    rows = jax.random.randint(jax.random.key(seed), shape, 0, images.shape[1])

    def gradient(model: jax.Array, worker: jax.Array, step: jax.Array) -> jax.Array:
        batch = rows[worker, step]
        return jax.grad(survival.loss)(model, images[worker, batch], labels[worker, batch])

    zeros = jnp.zeros((images.shape[-1], survival.CLASSES), jnp.float32)
    return Job(zeros, optax.sgd(INNER_RATE), gradient)


@jax.jit
def find_losses(parts: Sequence[jax.Array], models: jax.Array) -> jax.Array:
    """The losses over all examples of models `[..., 50, 10]`, one after the other."""
    flat = [a.reshape(-1, a.shape[-1]) for a in parts]
    row = models.reshape(-1, *models.shape[-2:])
    losses = jax.lax.map(lambda model: survival.loss(model, *flat), row)
    return losses.reshape(models.shape[:-2])


@functools.partial(jax.jit, static_argnums=1)
@functools.partial(jax.vmap, in_axes=(None,) * 6 + (0,))
def run_server(
    parts: Any, steps: int, arrivals: Arrivals, every: Any, last: jax.Array, rate: Any, seed: Any
) -> jax.Array:
    """Returns the server's models after some of the arrivals, `[S, P, 50, 10]`."""
    return train_with_server(make_job(parts, steps, seed), arrivals, every, rate, MOMENTUM)[last]


@functools.partial(jax.jit, static_argnums=1)
@functools.partial(jax.vmap, in_axes=(None,) * 5 + (0,))
def run_nodes(
    parts: Any, steps: int, shares: Shares, last: jax.Array, rate: Any, seed: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns the average models, `[S, P, 50, 10]`, and those of the nodes, `[S, P, N, 50, 10]`."""
    job = make_job(parts, steps, seed)
    models, weights = train_without_server(job, shares, rate, MOMENTUM)
    models = models[last]
    return average_living(models, weights[last], jnp.asarray(shares.living)[last]), models


def train_server(parts: Any, *given: Any) -> np.ndarray:
    """Returns the losses of the server's models, `[S, P, 1]`."""
    return np.asarray(find_losses(parts, run_server(parts, *given)))[..., None]


def train_nodes(
    parts: Any, steps: int, shares: Shares, last: np.ndarray, rate: Any, seeds: Any
) -> np.ndarray:
    """Returns the losses of the average model, and the mean of those of the nodes, `[S, P, 2]`."""
    average, nodes = run_nodes(parts, steps, shares, last, rate, seeds)
    losses = np.asarray(find_losses(parts, nodes))
    living = np.broadcast_to(shares.living[last], losses.shape)
    mean = np.mean(losses, axis=-1, where=living)
    return np.stack([np.asarray(find_losses(parts, average)), mean], axis=-1)


def pad(arrivals: Arrivals, length: int) -> Arrivals:
    """Appends arrivals of nothing, so that one program runs all rules."""
    missing = length - len(arrivals.worker)
    return Arrivals(
        *(np.concatenate([a, np.zeros_like(a, shape=(missing, *a.shape[1:]))]) for a in arrivals)
    )


def make_runs(options: Options, examples: tuple[np.ndarray, np.ndarray]) -> dict[str, Runs]:
    """Returns what is compared, by name."""
    seconds = [STEP_SECONDS * factor for factor in options.slowness]
    deaths = {} if options.death is None else {len(seconds) - 1: options.death}
    workers = Workers(seconds, options.every, deaths=deaths)
    most = math.ceil(options.seconds / min(seconds)) + options.every
    parts = [jnp.asarray(a, jnp.float32) for a in examples]
    moments = np.linspace(0, options.seconds, POINTS + 1)

    def find_last(events: Arrivals | Shares) -> tuple[np.ndarray, np.ndarray]:
        """The last event before each moment, and the steps until then; -1 and 0 if none."""
        last = np.searchsorted(events.seconds, moments, side="right") - 1
        return last, np.where(last >= 0, events.tokens[last], 0)

    rules = make_rules(options)
    arrivals = {name: list_arrivals(workers, rule, options.seconds) for name, rule in rules.items()}
    length = max(len(a.worker) for a in arrivals.values())
    runs = {}
    for name, rule in rules.items():
        found = arrivals[name]
        last, steps = find_last(found)
        given = (pad(found, length), rule.momentum_every, np.maximum(last, 0))
        train = functools.partial(train_server, parts, most, *given)
        busy = found.steps @ np.asarray(seconds)[found.worker]
        waiting = float(1 - busy / len(seconds) / options.seconds)
        staleness = float(found.staleness[found.share > 0].mean())
        runs[name] = Runs(train, [name], moments, steps, waiting, staleness)
    shares = list_shares(workers, options.seconds, seed=0)
    last, steps = find_last(shares)
    train = functools.partial(train_nodes, parts, most, shares, np.maximum(last, 0))
    return runs | {PUSH_SUM: Runs(train, [PUSH_SUM, f"{PUSH_SUM}, nodes"], moments, steps)}


def measure(runs: Runs, options: Options) -> list[Record]:
    """Chooses the rate of a rule, and returns an object for each column."""
    seeds = np.asarray(options.seed, np.uint32)

    def find_loss(rate: float) -> float:
        losses = np.asarray(runs.train(rate, seeds + np.uint32(TUNING_SEED)))[:, -1, 0]
        return float(losses.mean()) if np.isfinite(losses).all() else math.inf

    rate = choose_rate(find_loss, FIRST_RATE)
    losses = np.asarray(runs.train(rate, seeds), float)
    losses[:, runs.steps == 0] = math.log(survival.CLASSES)
    return [
        {
            "rule": name,
            "rate": rate,
            "waiting": runs.waiting,
            "staleness": runs.staleness,
            "seconds": runs.seconds.tolist(),
            "steps": runs.steps.tolist(),
            "loss": losses[..., column].tolist(),
        }
        for column, name in enumerate(runs.names)
    ]


def pick_losses(record: Record, steps: float) -> list[list[float]]:
    """The losses of all seeds after half of the seconds, at the end, and after these steps."""
    columns = (POINTS // 2, POINTS, int(np.searchsorted(record["steps"], steps)))
    return [[losses[column] for losses in record["loss"]] for column in columns]


def write_table(records: Sequence[Record], console: Console) -> None:
    """Prints the table."""
    fewest = min(record["steps"][-1] for record in records)
    seconds = records[0]["seconds"][-1]
    table = Table(title="Loss of workers that are not equally fast", box=SIMPLE_HEAD, padding=0)
    headers = ("outer\nrate", "waiting\n%", "late by\nupdates", f"{seconds / 2:g} s")
    table.add_column("rule", no_wrap=True)
    for header in (*headers, f"{seconds:g} s", f"{fewest:,.0f}\nsteps"):
        table.add_column(header, justify="right")
    for record in records:
        late = record["staleness"]
        waiting = record["waiting"]
        losses = [
            f"{np.mean(values):.3f}±{np.std(values, ddof=1):.3f}"
            if len(values) > 1
            else f"{values[0]:.3f}"
            for values in pick_losses(record, fewest)
        ]
        table.add_row(
            record["rule"],
            f"{record['rate']:.3g}",
            "-" if waiting is None else f"{100 * waiting:.0f}",
            "-" if late is None else f"{late:.1f}",
            *losses,
        )
    console.print(table)


def plot(records: Sequence[Record], options: Options, path: Path) -> None:
    """Draws the loss against simulated seconds and steps, as a PNG."""
    figure = Figure((12, 5), dpi=120, layout="constrained")
    figure.suptitle(
        f"{len(options.slowness)} workers whose steps take {', '.join(map(str, options.slowness))} "
        f"times as long: mean ± standard deviation over {len(options.seed)} seed(s)"
    )
    left, right = figure.subplots(1, 2, sharey=True)
    left.set(xlabel="simulated time (seconds)", ylabel="loss over all examples", yscale="log")
    right.set(xlabel="local steps of all workers", xscale="log")
    looks = choose_looks([record["rule"] for record in records])
    for record in records:
        losses = np.array(record["loss"])
        mean = losses.mean(axis=0)
        spread = losses.std(axis=0, ddof=1) if len(losses) > 1 else np.zeros_like(mean)
        look = looks[record["rule"]]
        for axes, x in ((left, record["seconds"]), (right, record["steps"])):
            axes.plot(x, mean, label=record["rule"], **look)
            axes.fill_between(x, mean - spread, mean + spread, color=look["color"], alpha=0.2)
            axes.grid(alpha=0.3)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, runs all rules, and reports."""
    out = None
    with exit_on_error(lambda: out):
        options = parse_arguments(
            Options,
            "experiments.asynchronous_outer",
            arguments,
        )
        out = results.create_run_dir("asynchronous_outer", options.out, options.overwrite)
        console = Console()
        records = []
        lines = out / "metrics.jsonl"
        all_runs = make_runs(options, survival.load_examples())
        with lines.open("w") as file, results.make_progress_bar(console) as bar:
            task = bar.add_task("rules", total=len(all_runs), status="")
            for name, runs in all_runs.items():
                bar.update(task, status=name)
                found = measure(runs, options)
                records += found
                file.writelines(json.dumps(record, allow_nan=False) + "\n" for record in found)
                file.flush()
                bar.advance(task)
        keep = ("rule", "rate", "waiting", "staleness")
        fewest = min(record["steps"][-1] for record in records)
        rows = [
            {name: record[name] for name in keep}
            | dict(
                zip(
                    ("loss_half", "loss_end", "loss_equal"),
                    pick_losses(record, fewest),
                    strict=True,
                )
            )
            for record in records
        ]
        results.write_summary(out, dataclasses.asdict(options), {"steps": fewest}, rows)
        write_table(records, console)
        plot(records, options, out / "asynchronous_outer.png")


if __name__ == "__main__":
    main()
