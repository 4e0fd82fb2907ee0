"""What one node does beside slow nodes: softmax regression on digits, with a sleep as computation.

The sleep is a part of the compiled step, as computation on a device would be: what can run beside
the computation of gradients, as the exchange of `osgp`, runs beside the sleep.
"""

import dataclasses
import math
import time
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

import gossipjax as gx
from experiments.data.images import load
from experiments.data.sharding import split_examples
from experiments.options import OptionalPath, PositiveFloat, PositiveInt, check_fields
from experiments.results import Record
from experiments.sleep import compute_one
from experiments.speed.wire import links
from experiments.speed.wire.rows import MAX_HOSTS, MIN_HOSTS, require_different
from experiments.speed.wire.worker import Worker
from experiments.training.asynchronous import ASYNCHRONOUS
from experiments.training.methods import ALGORITHM_HELP, MethodOptions, make_method
from gossipjax.cost_model import parse_slowness

DEFAULT_ALGORITHMS = ("allreduce", "sgp", "1-osgp", "async-sgp", "async-adpsgd")
HELP = f"{ALGORITHM_HELP} Of nodes that wait for nobody: {', '.join(ASYNCHRONOUS)}."
LEARNING_RATE = 0.05  # of plain SGD
BATCH_SIZE_PER_NODE = 32
CLASSES = 10
FLOAT_BYTES = 4
DATA_FILE = "digits.npz"

Batch = tuple[Any, Any]
"""Images `[B, D]` and labels `[B]`."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the measurement of slow nodes."""

    nodes: int = 8
    """Number of nodes, one process each."""
    slowness: tuple[str, ...] = ("none", "4x")
    """One or several. none: no node is slow. A factor, as 2x or 4x: each step of node 0 takes this
    many times as long. random: each step of each node takes 1, 2 or 4 times as long. lognormal:
    exp(0.5 g) times as long, with g standard normal."""
    algorithm: Annotated[tuple[str, ...], tyro.conf.arg(help=HELP)] = DEFAULT_ALGORITHMS
    compute_seconds: PositiveFloat = 0.2
    """Seconds that a step of a node sleeps when it is not slow."""
    steps: PositiveInt = 60
    """Steps of each node, on average."""
    megabytes: float = 0.0
    """Float32 parameters, in 1e6 bytes: the model has 0.03, and is padded to this size."""
    bandwidth: str | None = None
    """Bandwidth of every node's link, each way, as tc reads it (200mbit); needs root. Without it
    the nodes share the machine's loopback, without limits."""
    out: OptionalPath = None
    """Folder for the results; a new one under runs/ if not given."""
    overwrite: bool = False
    """Replace another run's results in --out."""

    def __post_init__(self) -> None:
        check_fields(self)
        require_different("--slowness", self.slowness)
        require_different("--algorithm", self.algorithm)
        if not MIN_HOSTS <= self.nodes <= MAX_HOSTS:
            raise ValueError(f"--nodes must be from {MIN_HOSTS} to {MAX_HOSTS}, got {self.nodes}.")
        if not 0 <= self.megabytes < math.inf:
            raise ValueError(f"--megabytes must be finite and >= 0, got {self.megabytes}.")
        for name in self.slowness:
            parse_slowness(name, "--slowness")
        if self.bandwidth is not None:
            links.parse_rate(self.bandwidth)

    @property
    def runs(self) -> list[tuple[str, str]]:
        """Pairs of an algorithm and a slowness, those of an algorithm one after another."""
        return [(algorithm, name) for algorithm in self.algorithm for name in self.slowness]

    @property
    def bits_per_second(self) -> int | None:
        """Bandwidth of every link; None without limits."""
        return None if self.bandwidth is None else links.parse_rate(self.bandwidth)

    def draw_factors(self, slowness: str, steps: int) -> np.ndarray:
        """Factors of the computation time, `[steps, N]`: of every node at each of its steps."""
        return parse_slowness(slowness).draw(self.nodes, steps, 0)


def save_data(folder: Path) -> None:
    """Writes the digits into a folder, for all processes."""
    digits = load("mnist5k")
    images = digits.train_images.reshape(len(digits.train_labels), -1)
    np.savez(folder / DATA_FILE, images=images, labels=digits.train_labels)


def make_params(features: int, megabytes: float) -> dict[str, np.ndarray]:
    """Zeros; an array that the model does not use pads them to this number of 1e6 bytes."""
    params = {
        "w": np.zeros((features, CLASSES), np.float32),
        "b": np.zeros(CLASSES, np.float32),
    }
    padding = int(megabytes * 1e6 / FLOAT_BYTES) - sum(x.size for x in params.values())
    if padding > 0:
        params["padding"] = np.zeros(padding, np.float32)
    return params


def compute_loss(params: Any, batch: Batch) -> jax.Array:
    """Cross-entropy of one batch."""
    images, labels = batch
    logits = images @ params["w"] + params["b"][None]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def compute_gradients(params: Any, batch: Batch, seconds: jax.Array) -> tuple[Any, jax.Array]:
    """Gradients and loss of one node, which are there after these seconds."""
    one = compute_one(seconds)
    loss, grads = jax.value_and_grad(lambda params: one * compute_loss(params, batch))(params)
    return grads, loss


class Node:
    """This node of a measurement: its digits, and its runs."""

    def __init__(self, worker: Worker, options: Options):
        self.worker = worker
        self.options = options
        with np.load(worker.folder / DATA_FILE) as arrays:
            self.images = arrays["images"]
            self.labels = arrays["labels"]
        self.shard = split_examples(self.labels, options.nodes, None, seed=0)[worker.rank]
        self.params: Any = make_params(self.images.shape[1], options.megabytes)

    def draw_batch(self, rng: np.random.Generator) -> Batch:
        """A batch of this node's digits."""
        chosen = rng.choice(self.shard, BATCH_SIZE_PER_NODE)
        return self.images[chosen], self.labels[chosen]

    def draw_seconds(self, slowness: str) -> np.ndarray:
        """Seconds of this node's steps, float32; as many as it may make, and they begin anew."""
        options = self.options
        factors = options.draw_factors(slowness, options.steps * options.nodes)
        return (options.compute_seconds * factors[:, self.worker.rank]).astype(np.float32)

    def report(self, number: int, step: float, status: str) -> None:
        """Writes how far a run is."""
        self.worker.report_progress(status, step, ", ".join(self.options.runs[number]))

    def make_record(
        self, start: float, ends: list[float], losses: list[Any], model: Any, counts: Record
    ) -> Record:
        """What this node measured in a run; times are those of `time.monotonic()`.

        Args:
          start: of the run.
          ends, losses: of its steps.
          model: the average at the end.
          counts: what nodes that wait for nobody count.
        """
        loss = float(compute_loss(model, (self.images, self.labels)))
        floats = [float(x) for x in losses]
        return {"start": start, "ends": ends, "losses": floats, "loss": loss, **counts}


class LockstepTrainer:
    """Trains by `gx.TrainStep`, whose programs are compiled at first."""

    def __init__(self, node: Node, algorithm: str):
        self._node = node
        self._nodes = node.worker.nodes
        options = MethodOptions(node.options.nodes, node.options.steps)
        self._tx = make_method(algorithm, options, optax.sgd(LEARNING_RATE)).transform
        self._train_step = gx.TrainStep(compute_gradients, self._tx, nodes=self._nodes)
        params, opt_state = self._nodes.init(self._tx, node.params)
        rng = np.random.default_rng(node.worker.rank)
        for step in range(1 + max(self._train_step.canonical_steps(opt_state) or [0])):
            params, opt_state, _ = self._run_step(step, params, opt_state, rng, 0.0)
        self._average(params, opt_state)

    def run(self, number: int, seconds: np.ndarray) -> Record:
        """Makes the run of this number, whose steps sleep for these seconds."""
        node = self._node
        params, opt_state = self._nodes.init(self._tx, node.params)
        rng = np.random.default_rng(node.worker.rank)
        ends = []
        losses = []
        node.worker.gather(0)
        start = time.monotonic()
        for step in range(node.options.steps):
            params, opt_state, loss = self._run_step(
                step, params, opt_state, rng, seconds[step % len(seconds)]
            )
            ends.append(time.monotonic())
            losses.append(loss.addressable_shards[0].data[0])
            node.report(number, step + 1, "training")
        counts: Record = dict.fromkeys(("sent", "kept", "staleness"))
        model = self._average(params, opt_state)
        return node.make_record(start, ends, losses, model, counts)

    def _run_step(
        self, step: int, params: Any, opt_state: Any, rng: np.random.Generator, seconds: float
    ) -> tuple[Any, Any, Any]:
        rows = (self._node.draw_batch(rng), np.float32(seconds))
        batch, sleep = self._nodes.put(jax.tree.map(lambda x: x[None], rows))
        return jax.block_until_ready(self._train_step(step, params, opt_state, batch, sleep))

    def _average(self, params: Any, opt_state: Any) -> Any:
        """The average model, on this process."""
        average = self._nodes.run(gx.average_model, params, opt_state)
        return jax.tree.map(lambda x: x.addressable_shards[0].data[0], average)


class AsynchronousTrainer:
    """Trains by `gx.asynchronous`; every run is a job of its own."""

    def __init__(self, node: Node, algorithm: str):
        self._node = node
        self._algorithm = algorithm

    def run(self, number: int, seconds: np.ndarray) -> Record:
        """Makes the run of this number, until all nodes together have made N times its steps.

        A node that hears of it in the middle of a step ends that step.
        """
        node = self._node
        worker = node.worker
        options = node.options
        rng = np.random.default_rng(worker.rank)

        def draw_batch() -> Batch:
            return jax.tree.map(jnp.asarray, node.draw_batch(rng))

        ends = []
        losses = []
        with worker.join_job(
            f"stragglers {number}",
            self._algorithm,
            optax.sgd(LEARNING_RATE),
            jax.tree.map(jnp.asarray, node.params),
            compute_gradients,
            draw_batch(),
            jnp.float32(0),
        ) as peer:
            worker.gather(0)
            start = time.monotonic()
            while (done := peer.total_steps) < options.steps * options.nodes:
                node.report(number, done / options.nodes, "training")
                step_seconds = jnp.float32(seconds[len(ends) % len(seconds)])
                losses.append(peer.step(compute_gradients, draw_batch(), step_seconds))
                ends.append(time.monotonic())
            node.report(number, options.steps, "averaging")
            model = peer.average()
            statistics = peer.statistics
        counts = {name: getattr(statistics, name) for name in ("sent", "kept", "staleness")}
        return node.make_record(start, ends, losses, model, counts)


def make_runs(worker: Worker, options: Options) -> None:
    """Makes all runs, each from a common start; writes what this node measured in each."""
    node = Node(worker, options)
    trainer: Any = None
    trained = None
    for number, (algorithm, slowness) in enumerate(options.runs):
        node.report(number, 0, "compiling")
        if algorithm != trained:
            kind = AsynchronousTrainer if algorithm in ASYNCHRONOUS else LockstepTrainer
            trainer = kind(node, algorithm)
            trained = algorithm
        worker.write_record(number, trainer.run(number, node.draw_seconds(slowness)))
