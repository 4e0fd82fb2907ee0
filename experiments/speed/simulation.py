"""Images per second of many nodes on one machine, compared with one plain optax loop.

    python -m experiments.speed simulation --nodes 8 32 64 128

Trains the small CNN on random images: by SGP over N nodes, each with a separate model; and by plain
optax one model on the batch of all nodes together. The two take turns, so that noise affects both
alike. README.md in this folder lists the columns and fields.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import gossipjax as gx
from experiments import results
from experiments.models import SmallCNN
from experiments.prefetch import prefetch
from experiments.program import exit_on_error
from experiments.results import Record
from experiments.speed.timing import TimedLoop, summarize_samples
from experiments.training.algorithms import Method, MethodOptions, make_method
from experiments.training.checks import PositiveInt, check_fields
from experiments.training.placement import (
    Placement,
    describe_nodes,
    place_nodes,
    request_cpu_devices,
)

TURNS = 7  # of which the median is reported
DISTINCT_BATCHES = 4  # drawn once, then repeated
OPTIMIZER = optax.sgd(0.05, momentum=0.9, nesterov=True)  # of both loops
IMAGE_SHAPE = (28, 28, 1)
CLASSES = 10


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the measurement of simulated nodes."""

    nodes: tuple[PositiveInt, ...] = (8, 32, 64, 128)
    """Number of simulated nodes: one or several numbers."""
    algorithm: str = "sgp"
    """ALGORITHM or ALGORITHM@TOPOLOGY, as in experiments.image."""
    batch_size_per_node: PositiveInt = 32
    """Images per node and step."""
    steps: PositiveInt = 5
    """Steps of one turn."""
    placement: Placement = "auto"
    """mesh: a device per node, virtual ones on a CPU. vmap: one device. auto: mesh if possible."""
    out: Path | None = None
    """Folder for the results; a new one under runs/ if not given."""
    overwrite: bool = False
    """Replace another run's results in --out."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.nodes:
            raise ValueError("--nodes must be one or several numbers, got none.")


def compute_loss(params: Any, batch: Any) -> jax.Array:
    """Cross-entropy of one batch of images and labels."""
    images, labels = batch
    logits: Any = SmallCNN(CLASSES).apply({"params": params}, images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def compute_gradients(params: Any, batch: Any) -> tuple[Any, jax.Array]:
    """Gradients and loss of one node, in the form that `gx.TrainStep` takes."""
    loss, grads = jax.value_and_grad(compute_loss)(params, batch)
    return grads, loss


def draw_batches(nodes: int, batch_size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Infinite random batches: images `[N, B, 28, 28, 1]` and labels `[N, B]`."""
    rng = np.random.default_rng(0)
    batches = [
        (
            rng.normal(size=(nodes, batch_size, *IMAGE_SHAPE)).astype(np.float32),
            rng.integers(0, CLASSES, (nodes, batch_size), dtype=np.int32),
        )
        for _ in range(DISTINCT_BATCHES)
    ]
    yield from itertools.cycle(batches)


def make_simulated_loop(method: Method, nodes: gx.Nodes, params: Any, batch_size: int) -> TimedLoop:
    """N nodes, each with a separate model; all programs are compiled."""
    train_step = gx.TrainStep(compute_gradients, method.transform, nodes=nodes)
    params, opt_state = nodes.init(method.transform, params)
    batches = prefetch(nodes.put(batch) for batch in draw_batches(nodes.size, batch_size))

    def run_step(step: int, state: Any, batch: Any) -> Any:
        params, opt_state, _ = train_step(step, *state, batch)
        return params, opt_state

    loop = TimedLoop(run_step, (params, opt_state), batches)
    loop.compile(train_step.canonical_steps(opt_state) or [0])
    return loop


def make_plain_loop(nodes: int, params: Any, batch_size: int) -> TimedLoop:
    """One model, trained on the batch of all nodes together; its program is compiled."""

    @jax.jit
    def update(params: Any, opt_state: Any, batch: Any) -> Any:
        grads, _ = compute_gradients(params, batch)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def run_step(step: int, state: Any, batch: Any) -> Any:
        del step
        return update(*state, batch)

    def merge_nodes(x: np.ndarray) -> jax.Array:
        return jnp.asarray(x.reshape(-1, *x.shape[2:]))

    batches = prefetch(
        jax.tree.map(merge_nodes, batch) for batch in draw_batches(nodes, batch_size)
    )
    loop = TimedLoop(run_step, (params, OPTIMIZER.init(params)), batches)
    loop.compile([0])
    return loop


def measure_case(options: Options, method: Method, nodes: gx.Nodes) -> Record:
    """Runs both loops in turns; returns the object in `runs`."""
    batch_size = options.batch_size_per_node
    key = jax.random.key(0)
    params = SmallCNN(CLASSES).init(key, np.zeros((1, *IMAGE_SHAPE), np.float32))["params"]
    simulated = make_simulated_loop(method, nodes, params, batch_size)
    plain = make_plain_loop(nodes.size, params, batch_size)
    simulated_seconds = []
    plain_seconds = []
    for _ in range(TURNS):
        simulated_seconds.append(simulated.run(options.steps))
        plain_seconds.append(plain.run(options.steps))
    images = options.steps * nodes.size * batch_size  # of a turn
    return {
        "algorithm": method.algorithm,
        "topology": method.topology,
        "nodes": nodes.size,
        "placement": describe_nodes(nodes),
        "images_per_second": images / float(np.median(simulated_seconds)),
        "plain_images_per_second": images / float(np.median(plain_seconds)),
        **summarize_samples("ratio", np.divide(plain_seconds, simulated_seconds)),
    }


def make_table(runs: list[Record]) -> Table:
    """A row per number of nodes."""
    table = Table(box=SIMPLE_HEAD, title="Images per second, all nodes together")
    for header in ("nodes", "simulated", "one model,\none batch", "ratio", "10-90 %"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("placement")
    for run in runs:
        table.add_row(
            f"{run['nodes']}",
            f"{run['images_per_second']:,.0f}",
            f"{run['plain_images_per_second']:,.0f}",
            f"{run['ratio']:.2f}",
            f"{run['ratio_p10']:.2f}-{run['ratio_p90']:.2f}",
            run["placement"],
        )
    return table


def measure_simulation(options: Options) -> None:
    """Images per second of simulated nodes, compared with one plain loop."""
    out = None
    with exit_on_error(lambda: out):
        if options.placement != "vmap":
            request_cpu_devices(max(options.nodes))
        methods = [
            make_method(options.algorithm, MethodOptions(size), OPTIMIZER) for size in options.nodes
        ]
        places = [place_nodes(options.placement, size) for size in options.nodes]
        out = results.create_run_dir("simulation", options.out, options.overwrite)
        console = Console()
        runs: list[Record] = []
        with results.make_progress_bar(console) as bar:
            task = bar.add_task("simulation", total=len(options.nodes), status="")
            for method, nodes in zip(methods, places, strict=True):
                bar.update(task, status=f"{nodes.size} nodes")
                runs.append(measure_case(options, method, nodes))
                bar.advance(task)
                results.write_summary(out, dataclasses.asdict(options), {}, runs)
        console.print(make_table(runs))
