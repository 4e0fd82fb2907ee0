"""Trains an image classifier over gossiping nodes, one algorithm beside another.

    python -m experiments.image

With no option: a small CNN on 5,000 MNIST digits, SGP over 8 nodes beside AllReduce. It prints a
table and writes `metrics.jsonl`, `summary.json` and plots into a folder, `--out`.

It runs unchanged on one process, under `python -m gossipjax.launch` and on the hosts of a cluster:
a node keeps its part of the data and its batches whatever process holds it.
"""

import dataclasses
import itertools
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from rich.console import Console

import gossipjax as gx
from experiments import data, methods, models, processes, report, results, saving, training
from experiments.accuracy import Accuracy
from gossipjax.agreement import everywhere
from gossipjax.loop import MOST_PROGRAMS


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the image experiment."""

    algorithm: tuple[str, ...] = ("sgp", "allreduce")
    """One or several, NAME or NAME@TOPOLOGY: sgp, 1-osgp (any number of steps), biased-1-osgp,
    dpsgd, dpsgd-adapt-then-combine, adpsgd (simulated), rand-psgd, d1d-psgd, easgd, allreduce."""
    topology: str | None = None
    """Who talks to whom, where NAME says nothing: one_peer_exponential, two_peer_exponential,
    exponential, bipartite_exponential, complete_cycle, random_peer_exponential,
    random_peer_complete, ring, directed_ring, random_ring, torus, hypercube, star, complete,
    base_graph, two_peer_base_graph, or FIRST/THEN; else that of the algorithm's paper. The last
    four algorithms have their own."""
    switch_at: float = 1 / 3
    """The share of the steps after which FIRST/THEN switches."""
    local_steps: int = 1
    """Steps from one exchange to the next; AllReduce exchanges at every step."""
    wire_dtype: Literal["float32", "bfloat16"] = "float32"
    """The type in which messages travel; easgd knows float32 only."""
    staleness: float = 1.0
    """AD-PSGD: mean age (steps) of the models that gradients are taken at: Poisson, at most 4."""
    nodes: int = 8
    """Number of nodes; each has its own model and its own part of the data."""
    batch_per_node: int = 32
    """Examples per node and step."""
    epochs: int = 15
    """Passes over the training set, all nodes together."""
    optimizer: methods.Optimizer = "nesterov"
    """The local optimizer: plain SGD, SGD with Nesterov momentum 0.9, or Adam."""
    rate: float = 0.1
    """Learning rate, not scaled by the number of nodes; with goyal, the rate per 256 examples."""
    rate_schedule: methods.RateSchedule = "cosine"
    """constant; cosine, down to 0; goyal: warm-up, then 10x down at 1/3, 2/3 and 8/9 of the run."""
    weight_decay: float = 1e-4
    """L2 for sgd and nesterov, decoupled for adam."""
    seed: tuple[int, ...] = (0,)
    """One or several, each a run: of the starting model, the split of the data and the batches."""
    dirichlet: float | None = None
    """Uneven split: each class over the nodes by Dirichlet(this), small uneven; else shuffled."""
    dataset: Literal["mnist5k", "fashion_mnist"] = "mnist5k"
    """mnist5k: 5,000 digits, installed with the program. fashion_mnist: see --data-dir."""
    data_dir: Path | None = None
    """Folder of Fashion-MNIST's four official idx files, or of TensorFlow Datasets."""
    download: bool = False
    """Let TensorFlow Datasets download Fashion-MNIST if it is not there."""
    normalization: models.Normalization = "none"
    """batch: BatchNorm after the convolutions."""
    statistics: training.StatisticsPolicy = "local"
    """BatchNorm's running statistics: each node's own; mixed by gossip; averaged to evaluate."""
    precision: Literal["float32", "mixed_bfloat16", "bfloat16"] = "float32"
    """mixed_bfloat16: computation in bfloat16, parameters in float32. bfloat16: parameters too."""
    where: training.Where = "auto"
    """mesh: a device per node, virtual ones on a CPU. vmap: one device. auto: mesh if possible."""
    log_every: int = 10
    """Steps between two lines of metrics.jsonl; each line costs one more gradient."""
    checkpoint_every: int | None = None
    """Steps between checkpoints, in --out; on SIGTERM one more is saved. After a restart by the
    launcher, a run goes on from its newest one."""
    checkpoint_keep: int = 3
    """How many checkpoints of a run stay."""
    resume: bool = False
    """Go on in --out where the program was stopped; --nodes may be another number."""
    initial: Path | None = None
    """Go on from the newest checkpoint in this folder, of a run with another algorithm, topology or
    number of nodes: OUT/checkpoints/RUN. All runs begin there."""
    out: Path | None = None
    """Folder for the results; a new one under runs/ if not given."""
    overwrite: bool = False
    """Replace another run's results in --out."""

    def __post_init__(self) -> None:
        counts = ("nodes", "batch_per_node", "epochs", "log_every", "local_steps")
        for name in (*counts, "checkpoint_every", "checkpoint_keep"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} is at least 1, not {value}.")
        for name, values in (("algorithm", self.algorithm), ("seed", self.seed)):
            if not values or len(set(values)) < len(values):
                raise ValueError(f"--{name} takes one or several different values, not {values}.")
        if min(self.seed) < 0:
            raise ValueError(f"--seed is at least 0, not {min(self.seed)}.")
        if not 0 < self.rate < math.inf:
            raise ValueError(f"--rate is positive and finite, not {self.rate}.")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"--weight-decay is at least 0 and finite, not {self.weight_decay}.")
        if not 0 < self.switch_at < 1:
            raise ValueError(f"--switch-at is a share between 0 and 1, not {self.switch_at}.")
        if not 0 <= self.staleness < math.inf:
            raise ValueError(f"--staleness is at least 0 and finite, not {self.staleness}.")
        if self.statistics != "local" and self.normalization == "none":
            raise ValueError(f"--statistics {self.statistics} needs --normalization batch.")
        if self.dirichlet is not None and not 0 < self.dirichlet < math.inf:
            raise ValueError(f"--dirichlet is positive and finite, not {self.dirichlet}.")
        for name in ("checkpoint_every", "resume"):
            if getattr(self, name) and self.out is None:
                raise ValueError(f"--{name.replace('_', '-')} needs --out, where a run goes on.")
        if self.resume and self.overwrite:
            raise ValueError("--resume goes on with what --overwrite takes away: choose one.")
        old = self.out.resolve() if self.out and self.overwrite else None
        if self.initial and old in self.initial.resolve().parents:
            raise ValueError("--initial is in what --overwrite takes away: choose another --out.")
        if self.dataset == "mnist5k" and (self.data_dir or self.download):
            raise ValueError(
                "--data-dir and --download are for fashion_mnist; mnist5k is installed."
            )


class Run(NamedTuple):
    """One algorithm with one seed, on its nodes' shards of the data."""

    title: str
    seed: int
    method: methods.Method
    shards: list[np.ndarray]

    @property
    def name(self) -> str:
        """What it is called in the files."""
        return f"{self.method.algorithm}, {self.method.topology}, seed {self.seed}"


class Job(NamedTuple):
    """All that a command line asks for, found to be possible.

    Attributes:
      nodes: how many there are now; `options` has how many there were at the start.
      environment: of `summary.json`: what the runs are trained on, and how they went on.
      finished: what `summary.json` says of the runs that were finished before.
    """

    options: Options
    nodes: int
    dataset: data.Dataset
    steps: int
    rate: optax.Schedule
    runs: list[Run]
    placement: training.Placement
    out: Path
    environment: dict[str, Any]
    finished: list[dict[str, Any]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, trains, and reports."""
    sys.stdout.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
    try:
        options = tyro.cli(
            tyro.conf.FlagCreatePairsOff[Options],
            prog="python -m experiments.image",
            description="Trains an image classifier over gossiping nodes.",
            args=arguments,
        )
        place = gx.launch.initialize()
        if options.where != "vmap" and not place.processes > options.nodes:
            nodes = gx.launch.nodes_left(options.nodes)
            training.request_cpu_devices(-(-nodes // place.processes))
        job = prepare(options)
    except ValueError as error:
        refuse(error)
    except OSError as error:
        gx.launch.leave(f"error: {error}")
    except KeyboardInterrupt:
        gx.launch.leave(130)
    try:
        train_all(job, Console(quiet=not processes.is_first()))
    except (training.NonFiniteError, saving.CheckpointError) as error:
        refuse(error)
    except OSError as error:
        gx.launch.leave(f"error: {error}")
    except saving.PreemptedError as error:
        print(error, file=sys.stderr)
        gx.launch.leave(128 + signal.SIGTERM)
    except KeyboardInterrupt:
        print(f"interrupted; {job.out} holds what was measured", file=sys.stderr)
        gx.launch.leave(130)


def refuse(error: Exception) -> NoReturn:
    """Ends the program with status 2: started again, it would end in the same way."""
    print(f"error: {error}", file=sys.stderr)
    gx.launch.leave(2)


def prepare(options: Options) -> Job:
    """Checks everything that can be checked before training, and claims the folder.

    Raises:
      ValueError, OSError: for options that are impossible together, data that are not there, or a
        folder that holds another run.
    """
    nodes = gx.launch.nodes_left(options.nodes)
    restarts = options.checkpoint_every and int(os.environ.get("GOSSIPJAX_RESTART", 0))
    saved = results.read_summary(options.out) if options.resume or restarts else {}
    if everywhere(bool(saved)) == everywhere(not saved):
        raise OSError(f"--out {options.out} is not one folder for all processes.")
    # A restarted job goes on with what it began itself; it may have died before it wrote anything.
    job = os.environ.get("GOSSIPJAX_JOB")
    resume = options.resume or bool(
        restarts and (not saved or saved["environment"].get("job") == job)
    )
    if resume:
        options = as_it_began(options, saved.get("options", {}))
    dataset = data.load(options.dataset, options.data_dir, options.download)
    total_batch = options.nodes * options.batch_per_node
    steps = max(1, round(options.epochs * len(dataset.train_labels) / total_batch))
    rate = methods.learning_rate(options.rate_schedule, options.rate, steps, total_batch)
    runs = []
    for algorithm, seed in itertools.product(options.algorithm, options.seed):
        shards = data.split(dataset.train_labels, nodes, options.dirichlet, seed)
        how = method(options, steps, rate, algorithm, seed, nodes)
        runs.append(Run(algorithm, seed, how, shards))
    if len({run.name for run in runs}) < len(runs):
        raise ValueError(f"--algorithm asks for the same twice: {', '.join(options.algorithm)}.")
    placement = training.place(options.where, nodes)
    sizes = f"{len(dataset.train_labels):,} training and {len(dataset.test_labels):,} test examples"
    environment = {"placement": placement.words, "dataset": sizes}
    environment |= {"job": job, "resumed": []}
    finished = []
    if resume and saved:
        environment["resumed"] = saved["environment"].get("resumed", [])
        finished = saved["runs"]
    out = options.out
    if processes.is_first():
        out = results.claim_folder("image", out, options.overwrite, resume)
        results.write_summary(out, dataclasses.asdict(options), environment, finished)
    out = Path(processes.of_first(str(out)))
    return Job(options, nodes, dataset, steps, rate, runs, placement, out, environment, finished)


def method(
    options: Options, steps: int, rate: optax.Schedule, algorithm: str, seed: int, nodes: int
) -> methods.Method:
    """The method of a run over so many nodes."""
    setting = methods.Setting(
        nodes,
        steps,
        seed,
        options.local_steps,
        None if options.wire_dtype == "float32" else options.wire_dtype,
        options.staleness,
        options.switch_at,
    )
    optimizer = methods.optimizer(options.optimizer, rate, options.weight_decay)
    return methods.method(algorithm, setting, optimizer, options.topology)


MAY_CHANGE = {"nodes", "data_dir", "download", "where", "log_every", "checkpoint_every"}
MAY_CHANGE |= {"checkpoint_keep", "resume", "initial", "out", "overwrite"}


def as_it_began(options: Options, saved: dict[str, Any]) -> Options:
    """The options of a run that goes on: the number of nodes is that of its start.

    Raises:
      ValueError: if one that must stay is another one now.
    """
    now = json.loads(json.dumps(dataclasses.asdict(options), default=str))
    for name, value in now.items():
        if name not in MAY_CHANGE and saved.get(name, value) != value:
            raise ValueError(
                f"the run in {options.out} began with --{name.replace('_', '-')} {saved[name]}, "
                f"not {value}: go on with that, or choose another --out."
            )
    return dataclasses.replace(options, nodes=saved.get("nodes", options.nodes))


def train_all(job: Job, console: Console) -> None:
    """Trains one run after another; writes the files, and from them the table and the plots.

    If it is stopped, the runs that were finished are reported all the same.
    """
    options, environment, out = job.options, job.environment, job.out
    console.print(
        f"{job.dataset.name}, {environment['dataset']}; {job.nodes} nodes, {job.steps:,} steps; "
        f"{job.placement.words}. Results: {out}",
        soft_wrap=True,
    )
    for title, method in {run.title: run.method for run in job.runs}.items():
        rounds = len(method.schedule.canonical_steps(method.lookback))
        if rounds > MOST_PROGRAMS:
            console.print(f"{title}: {rounds} distinct rounds, so a traced step")
    finished = list(job.finished)
    done = {run["run"] for run in finished}
    metrics = out / "metrics.jsonl" if processes.is_first() else Path(os.devnull)

    def write_summary() -> None:
        if processes.is_first():
            results.write_summary(out, dataclasses.asdict(options), environment, finished)

    try:
        with results.progress_bar(console) as bar:
            for run in job.runs:
                if run.name in done:
                    continue
                task = bar.add_task(
                    f"{run.title} ({run.seed})", total=job.steps, status="compiling"
                )
                for line in train(job, run):
                    if "begun" in line:
                        if line["said"]:
                            console.print(line["said"], soft_wrap=True)
                            environment["resumed"].append(line["said"])
                            write_summary()
                        if processes.is_first():
                            results.keep_lines(metrics, _before(run.name, line["begun"], done))
                        continue
                    if "test_accuracy_nodes" in line:
                        finished.append(line)
                        done.add(run.name)
                        write_summary()
                        continue
                    with metrics.open("a") as file:
                        file.write(json.dumps({"run": run.name, **line}, allow_nan=False) + "\n")
                    if "loss" in line:
                        bar.update(task, completed=line["step"], status=status(line))
    finally:
        if finished and processes.is_first():
            gossiping = {run.method.topology for run in job.runs} - {"complete", "center"}
            for name in sorted({part for names in gossiping for part in names.split("/")}):
                title = f"{name}, {job.nodes} nodes"
                matrices = methods.schedule(name, job.nodes, seed=options.seed[0]).matrices()
                report.plot_topology(matrices, title, out / f"topology_{name}.png")
            report.write_report(out, console)


def _before(run: str, step: int, done: set[str]) -> Callable[[dict[str, Any]], bool]:
    """Which lines of `metrics.jsonl` stay when this run goes on after so many steps."""
    return lambda line: line["run"] in done or (line["run"] == run and line["step"] <= step)


def status(line: dict[str, Any]) -> str:
    """The numbers beside the progress bar."""
    return (
        f"loss {line['loss']:.3g}, consensus {line['consensus_distance']:.1e}, "
        f"{line['examples_per_second']:,.0f} examples/s"
    )


def train(job: Job, run: Run) -> Iterator[dict[str, Any]]:
    """Trains one run. Yields `begun`, the step after which it goes on, and what was `said`; then
    the lines of `metrics.jsonl`, and at the end that of `summary.json`."""
    options, dataset, steps, nodes = job.options, job.dataset, job.steps, job.nodes
    compute = jnp.float32 if options.precision == "float32" else jnp.bfloat16
    kept = jnp.bfloat16 if options.precision == "bfloat16" else jnp.float32
    model = models.SmallCNN(
        dataset.classes, dtype=compute, param_dtype=kept, normalization=options.normalization
    )

    def loss(params: Any, statistics: Any, batch: Any) -> tuple[jax.Array, Any]:
        images, labels = batch
        variables = {"params": params, **statistics}
        logits, after = model.apply(variables, images, train=True, mutable=[*statistics])
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), after

    def batches(start: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        own = processes.own_nodes(job.placement.mesh, nodes)
        indices = data.batches(run.shards, options.batch_per_node, run.seed, own)
        for chosen in itertools.islice(indices, start, None):
            yield dataset.train_images[chosen], dataset.train_labels[chosen]

    def method_of(place: saving.Place) -> methods.Method:
        of = place["algorithm"], place["seed"], place["nodes"]
        return method(options, steps, job.rate, *of)

    statistics: Any = model.init(jax.random.key(run.seed), dataset.train_images[:1])
    params = statistics.pop("params")
    trainer = training.Trainer(
        run.method, loss, job.placement, params, batches(0), statistics, options.statistics
    )
    place: dict[str, Any] = {"algorithm": run.title, "seed": run.seed, "nodes": nodes}
    place |= {"seconds": 0.0, "examples": 0, "seconds_per_step": [], "line": {}}
    saver = saving.Saver(trainer, run.method, place, method_of)
    step, said = saver.restore(saving.folder_of(job.out, run.name), options.initial)
    if step >= steps and not place["line"]:
        raise saving.CheckpointError(
            f"--initial {options.initial} is of step {step}, and this run ends after step {steps}: "
            "it needs more --epochs."
        )
    if step:
        trainer.feed(batches(step))
    yield {"begun": step, "said": said}
    alone = trainer.warm_up()
    accuracy = Accuracy(model, dataset, nodes, job.placement)
    epochs_per_step = options.nodes * options.batch_per_node / len(dataset.train_labels)
    epoch_ends = {round(epoch / epochs_per_step) for epoch in range(1, options.epochs)} - {0}
    epoch_ends |= {steps}
    every = options.checkpoint_every
    ends = epoch_ends | set(range(every, steps, every) if every else ())
    with saver.saving(saving.folder_of(job.out, run.name), every, options.checkpoint_keep):
        for interval in training.intervals(steps, options.log_every, ends, step):
            losses, took = trainer.advance(interval[:-1])
            before = trainer.distance_before_mixing()
            last_losses, took_last = trainer.advance(interval[-1:])
            took += took_last
            examples = len(interval) * nodes * options.batch_per_node
            place["seconds"] += took
            place["examples"] += examples
            place["seconds_per_step"].append(took / len(interval))
            at = {
                "step": interval.stop,
                "epoch": place["examples"] / len(dataset.train_labels),
                "seconds": place["seconds"],
            }
            place["line"] = {
                "loss": float(np.concatenate([losses, last_losses]).mean()),
                "consensus_distance_before_mixing": before,
                "consensus_distance": trainer.distance(interval.stop),
                "examples_per_second": examples / took,
                "rate": float(np.asarray(job.rate(interval[-1]))),
            }
            yield {**at, **place["line"]}
            if interval.stop in epoch_ends:
                average = accuracy.of_average(trainer.average_model())
                yield {**at, "test_accuracy_average_model": average}
            saver.after(interval.stop, last=interval.stop == steps)
    typical, line = float(np.median(place["seconds_per_step"])), place["line"]
    yield {
        "run": run.name,
        "algorithm": run.method.algorithm,
        "topology": run.method.topology,
        "nodes": nodes,
        "steps": steps,
        "seed": run.seed,
        "seconds_per_step": typical,
        "examples_per_second": nodes * options.batch_per_node / typical,
        "share_outside_the_step": 1 - alone / typical,
        "test_accuracy_average_model": accuracy.of_average(trainer.average_model()),
        "test_accuracy_nodes": accuracy.of_nodes(trainer.node_models()),
        "consensus_distance": line["consensus_distance"],
        "consensus_distance_before_mixing": line["consensus_distance_before_mixing"],
        "consensus_distance_by_layer": trainer.layer_distances(),
        "final_loss": line["loss"],
    }


if __name__ == "__main__":
    main()
