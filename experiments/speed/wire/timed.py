"""What one host does to time the rows: an MLP, and who trains it.

Every iteration runs all rows, one after another, so that noise affects all of them alike, each from
a common start of all hosts. The rows of asynchronous nodes come after that, each in one go.
"""

import resource
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gossipjax as gx
from experiments.sleep import compute_one
from experiments.speed.wire.rows import LAYERS, LEARNING_RATE, Row, WireOptions, build_rows
from experiments.speed.wire.worker import Sample, Worker

# Names, in the files, of the measurements that are not rows.
COMPUTATION = "computation"
ALL_LINKS = "stream, all links"
SINGLE_LINK = "stream, one link"
BUSY_HOSTS = "stream, all links, beside computation"
MIN_STREAM_BYTES = 2**20  # a stream is as long as the model, between these two
MAX_STREAM_BYTES = 20_000_000
MAX_TRIES = 6  # batch sizes
MAX_ERROR = 0.08  # relative; a batch size whose time is this near to the target is taken
TIMINGS_PER_TRY = 3

Batch = tuple[jax.Array, jax.Array]
"""Inputs and targets, `[B, width]` each."""


def choose_width(megabytes: float) -> int:
    """Width of an MLP of 8 equal layers with `megabytes` of float32 parameters (1e6 bytes).

    >>> width = choose_width(20)
    >>> width, 4 * LAYERS * (width * width + width) / 1e6
    (790, 19.99648)
    """
    return max(1, int((1 + megabytes * 1e6 / LAYERS) ** 0.5 / 2 - 0.5))


def init_params(width: int) -> list[dict[str, jax.Array]]:
    """The initial parameters, the same on every node."""
    keys = jax.random.split(jax.random.key(0), LAYERS)
    scale = (2 / width) ** 0.5
    return [
        {"w": scale * jax.random.normal(key, (width, width)), "b": jnp.zeros(width)} for key in keys
    ]


def compute_loss(params: Any, batch: Batch) -> jax.Array:
    """Mean squared error of the MLP."""
    x, y = batch
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"][None])
    return jnp.mean((x @ params[-1]["w"] + params[-1]["b"][None] - y) ** 2)


def compute_gradients(params: Any, batch: Batch) -> tuple[Any, None]:
    """Gradients of the loss, without further results, in the form that `gx.TrainStep` takes."""
    return jax.grad(compute_loss)(params, batch), None


def sleep_gradients(params: Any, seconds: Any) -> tuple[Any, None]:
    """Returns zeros instead of gradients, after sleeps of these seconds, a third of them forward.

    The last layers come first, as in a backward pass.
    """
    layers = params if isinstance(params, list) else [params]
    zero = compute_one(seconds / 3) - 1
    grads: list[Any] = []
    for layer in reversed(layers):
        zero = compute_one(2 * seconds / 3 / len(layers) + zero) - 1
        grads.insert(0, jax.tree.map(partial(jnp.multiply, zero), layer))
    return grads if layers is params else grads[0], None


def apply_gradients(params: Any, grads: Any) -> Any:
    """The parameters after a step of plain SGD."""
    tx = optax.sgd(LEARNING_RATE)
    updates, _ = tx.update(grads, tx.init(params), params)
    return optax.apply_updates(params, updates)


class CalibratedModel:
    """The parameters and the batch of all nodes, handed from row to row: many fit into memory."""

    def __init__(self, nodes: gx.Nodes, megabytes: float, slept_seconds: float | None = None):
        self.nodes = nodes
        self.slept_seconds = slept_seconds  # in place of computation
        self.gradients = compute_gradients
        if slept_seconds is not None:
            self.gradients = lambda params, batch: sleep_gradients(params, slept_seconds)
        gradients = self.gradients
        self.width = choose_width(megabytes)
        self.params = nodes.spmd(lambda: init_params(self.width))()
        self.parameters = sum(x[0].size for x in jax.tree.leaves(self.params))
        self.batch: Any = None
        self._local_step = nodes.spmd(
            lambda params, batch: apply_gradients(params, gradients(params, batch)[0])
        )

    def draw_batch(self, size: int) -> None:
        """Draws `size` examples for every node, other ones on each."""

        def draw() -> Batch:
            key = jax.random.fold_in(jax.random.key(1), jax.lax.axis_index(self.nodes.axis_name))
            x, y = jax.random.normal(key, (2, size, self.width))
            return x, y

        self.batch = self.nodes.spmd(draw)()

    def compute(self) -> Any:
        """Runs one iteration without exchange."""
        self.params = self._local_step(self.params, self.batch)
        return jax.block_until_ready(self.params)

    def calibrate(
        self,
        target_seconds: float,
        time_call: Callable[[Callable[[], Any]], float],
        report_progress: Callable[[str], None],
    ) -> int:
        """Sizes the batch so that `compute` takes about `target_seconds`; returns its examples.

        A part of the time does not depend on the batch, so that it takes a few tries.
        """
        if self.slept_seconds is not None:
            self._change_batch(1)
            return 1
        seconds: dict[int, float] = {}
        size = 1
        while size not in seconds and len(seconds) < MAX_TRIES:
            report_progress(f"sizing the batch: {size} examples")
            self._change_batch(size)
            timings = [time_call(self.compute) for _ in range(TIMINGS_PER_TRY)]
            seconds[size] = statistics.median(timings)
            if abs(seconds[size] - target_seconds) < MAX_ERROR * target_seconds:
                break
            size = max(1, round(size * target_seconds / seconds[size]))
        best = min(seconds, key=lambda size: abs(seconds[size] - target_seconds))
        self._change_batch(best)
        return best

    def _change_batch(self, size: int) -> None:
        self.draw_batch(size)
        self.compute()  # compiles the program of this batch


def measure_rows(worker: Worker, options: WireOptions) -> None:
    """Runs every row in every iteration; writes the seconds and bytes of this host."""
    rows, _ = build_rows(options, worker.hosts)
    worker.report_progress("connecting")
    worker.connect()
    is_slept = options.computation[0] == "slept"
    slept_seconds = options.compute_seconds if is_slept else None
    model = CalibratedModel(worker.nodes, options.megabytes, slept_seconds)
    examples = model.calibrate(options.compute_seconds, worker.time_slowest, worker.report_progress)
    stream_bytes = min(max(MIN_STREAM_BYTES, 4 * model.parameters), MAX_STREAM_BYTES)
    everybody = range(worker.hosts)
    jobs: dict[str, Callable[[int], Any]] = {
        COMPUTATION: lambda step: model.compute(),
        ALL_LINKS: lambda step: worker.stream(stream_bytes, everybody),
        SINGLE_LINK: lambda step: worker.stream(stream_bytes, range(1)),
        BUSY_HOSTS: lambda step: worker.stream(stream_bytes, everybody),
    }
    in_turns = [row for row in rows if row.waits]
    jobs |= {row.name: compile_row(worker, model, row, options.iterations) for row in in_turns}
    for name in (ALL_LINKS, SINGLE_LINK):
        worker.time_call(jobs[name], 0)  # until TCP has found its window
    samples: dict[str, list[Sample]] = {name: [] for name in jobs}
    for step in range(options.iterations):
        for name, run_step in jobs.items():
            worker.report_progress(name, step)
            beside = model.compute if name == BUSY_HOSTS else None
            samples[name].append(worker.time_call(run_step, step, beside=beside))
    for row in rows:
        if not row.waits:
            samples[row.name] = measure_asynchronous(worker, model, row, options.iterations)
    loss = model.nodes.run(compute_loss, model.params, model.batch)
    if not np.isfinite(loss.addressable_shards[0].data).all():
        raise FloatingPointError("the model is no longer finite")
    measured = {
        field: {name: [getattr(sample, field) for sample in of] for name, of in samples.items()}
        for field in Sample._fields
    }
    sizes = {
        "stream_bytes": stream_bytes,
        "parameters": model.parameters,
        "examples": examples,
        "peak_memory_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }
    worker.write_record(0, measured | sizes)


def compile_row(
    worker: Worker, model: CalibratedModel, row: Row, iterations: int
) -> Callable[[int], Any]:
    """Returns the iterations of a row by their number, with every program compiled."""
    # Buckets of a layer each, as the cost model counts them.
    bucket_bytes = 4 * model.parameters // LAYERS
    train_step = gx.TrainStep(
        model.gradients, row.transform, nodes=model.nodes, bucket_bytes=bucket_bytes
    )
    opt_state = model.nodes.run(row.transform.init, model.params)

    def run_step(step: int) -> Any:
        nonlocal opt_state
        model.params, opt_state, _ = train_step(step, model.params, opt_state, model.batch)
        return model.params, opt_state

    for step in sorted({row.canonical_step(step) for step in range(iterations)}):
        worker.report_progress(f"compiling {row.name}, step {step}")
        jax.block_until_ready(run_step(step))
    opt_state = model.nodes.run(row.transform.init, model.params)  # the next step may be any
    return run_step


def measure_asynchronous(
    worker: Worker, model: CalibratedModel, row: Row, iterations: int
) -> list[Sample]:
    """The row of asynchronous nodes: each makes its steps as fast as it can."""
    worker.report_progress(f"starting {row.name}", iterations)
    params, batch = (
        jax.tree.map(lambda x: x.addressable_data(0)[0], stacked)
        for stacked in (model.params, model.batch)
    )
    with worker.join_job(
        row.name,
        row.algorithm,
        optax.sgd(LEARNING_RATE),
        params,
        model.gradients,
        batch,
        wire=row.wire,
    ) as node:
        worker.report_progress(row.name, iterations)
        sent_before = worker.read_sent_bytes()
        cpu_before = time.process_time()
        times = [time.perf_counter()]
        for _ in range(iterations):
            node.step(model.gradients, batch)
            times.append(time.perf_counter())
        worker.gather(0)
        samples = worker.share_counts(np.diff(times).tolist(), cpu_before, sent_before)
    worker.gather(0)
    return samples
