"""What one host does to time the rows.

In every iteration it runs all rows, one after another, so that noise affects all of them alike. All
hosts start each run together, after a barrier that is not timed. The rows of outer optimizers and
of nodes that wait for nobody come after that, each in one go.
"""

import resource
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from experiments.speed.wire.model import (
    BucketTrainer,
    CalibratedModel,
    RowTrainer,
    compute_gradients,
    compute_loss,
)
from experiments.speed.wire.rows import BUCKETS, LEARNING_RATE, Options, Row, build_rows
from experiments.speed.wire.worker import Sample, Worker

# Names, in the files, of the measurements that are not rows.
COMPUTATION = "computation"
ALL_LINKS = "stream, all links"
SINGLE_LINK = "stream, one link"
BUSY_HOSTS = "stream, all links, beside computation"
MIN_STREAM_BYTES = 2**20  # a stream is as long as the model, between these two
MAX_STREAM_BYTES = 20_000_000


def name_computation(row: Row) -> str:
    """Name, in the files, of the steps without exchange before and after a row made in one go."""
    return f"{COMPUTATION} beside {row.name}"


def measure_rows(worker: Worker, options: Options) -> None:
    """Runs every row in every iteration; writes the seconds and bytes of this host."""
    rows, _ = build_rows(options, worker.hosts)
    worker.report_progress("connecting")
    worker.connect()
    model = CalibratedModel(worker.nodes, options.megabytes)
    examples = model.calibrate(options.compute_seconds, worker.time_slowest, worker.report_progress)
    stream_bytes = min(max(MIN_STREAM_BYTES, 4 * model.parameters), MAX_STREAM_BYTES)
    everybody = range(worker.hosts)
    jobs: dict[str, Callable[[int], Any]] = {
        COMPUTATION: lambda step: model.compute(),
        ALL_LINKS: lambda step: worker.stream(stream_bytes, everybody),
        SINGLE_LINK: lambda step: worker.stream(stream_bytes, range(1)),
        BUSY_HOSTS: lambda step: worker.stream(stream_bytes, everybody),
    }
    in_turns = [row for row in rows if row.waits and row.outer is None]
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
        if row.outer is not None:
            samples |= measure_outer(worker, model, row, options.iterations)
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
    """One iteration of a row, with every program compiled."""
    is_in_buckets = row.algorithm == BUCKETS
    trainer = BucketTrainer(model, row.wire) if is_in_buckets else RowTrainer(model, row.transform)
    for step in sorted({row.canonical_step(step) for step in range(iterations)}):
        worker.report_progress(f"compiling {row.name}, step {step}")
        jax.block_until_ready(trainer.run_step(step))
    trainer.start_anew()
    return trainer.run_step


def measure_outer(
    worker: Worker, model: CalibratedModel, row: Row, iterations: int
) -> dict[str, list[Sample]]:
    """The row of an outer optimizer, and steps without exchange before and after it, in one go.

    No barrier lies between the measured steps: averages are on their way, and no other collectives
    may run beside them. Before these steps all programs are compiled, the hosts meet once more, and
    then as much gets on its way as there is at the end.
    """
    assert row.outer is not None
    trainer = RowTrainer(model, row.transform)

    def run(steps: range, run_step: Callable[[int], Any], status: str) -> list[Sample]:
        seconds = []
        before = worker.read_sent_bytes()
        cpu_before = time.process_time()
        for step in steps:
            worker.report_progress(f"{row.name}, {status} {step}", iterations)
            start = time.perf_counter()
            jax.block_until_ready(run_step(step))
            seconds.append(time.perf_counter() - start)
        return worker.share_counts(seconds, cpu_before, before)

    def compute() -> list[Sample]:
        worker.gather(0)
        steps = range(max(iterations, row.period))
        return run(steps, lambda step: model.compute(), "computation")

    alone = compute()
    worker.gather(0)
    compiled = row.outer.steps_to_compile
    first = row.outer.first_measured
    run(range(compiled), trainer.run_step, "compiling step")
    trainer.wait()
    worker.gather(0)
    run(range(compiled, first), trainer.run_step, "warm-up step")
    measured = range(first, first + row.outer.count_steps(iterations))
    samples = run(measured, trainer.run_step, "step")
    trainer.wait()
    again = compute()
    return {name_computation(row): alone + again, row.name: samples}


def measure_asynchronous(
    worker: Worker, model: CalibratedModel, row: Row, iterations: int
) -> list[Sample]:
    """The row of nodes that wait for nobody: each makes its steps as fast as it can."""
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
        compute_gradients,
        batch,
        wire=row.wire,
    ) as node:
        worker.report_progress(row.name, iterations)
        sent_before = worker.read_sent_bytes()
        cpu_before = time.process_time()
        times = [time.perf_counter()]
        for _ in range(iterations):
            node.step(compute_gradients, batch)
            times.append(time.perf_counter())
        worker.gather(0)
        samples = worker.share_counts(np.diff(times).tolist(), cpu_before, sent_before)
    worker.gather(0)
    return samples
