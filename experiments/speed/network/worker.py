"""One host of the network measurement: a JAX process that `measure.py` starts.

    python -m experiments.speed.network.worker FOLDER RANK

It reads `FOLDER/config.json`, writes its results into `FOLDER/RANK.json`, and its progress into
`FOLDER/RANK.progress`. In every iteration it runs all rows, one after another, so that noise
affects all of them alike. All hosts start each run together, after a barrier that is not timed. The
rows of outer optimizers and of nodes that wait for nobody come after that, each in one go.
"""

import json
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.results import Record
from experiments.speed.network.loops.asynchronous import join_job, run_steps
from experiments.speed.network.loops.buckets import BucketTrainer
from experiments.speed.network.loops.model import CalibratedModel, RowTrainer, compute_loss
from experiments.speed.network.process import Sample, Worker, WorkerConfig
from experiments.speed.network.rows import (
    ALL_LINKS,
    BUCKETS,
    BUSY_HOSTS,
    COMPUTATION,
    SINGLE_LINK,
    make_row,
    name_computation,
)
from experiments.speed.outer_rows import OUTER, OuterTimes
from experiments.training.asynchronous import ASYNCHRONOUS
from experiments.training.methods import WireName

MIN_STREAM_BYTES = 2**20  # a stream is as long as the model, between these two
MAX_STREAM_BYTES = 20_000_000


def measure(worker: Worker) -> Record:
    """Runs every row in every iteration; returns the seconds and bytes of this host."""
    config = worker.config
    worker.report_progress("connecting")
    worker.connect()
    model = CalibratedModel(worker.nodes, config.megabytes)
    examples = model.calibrate(config.compute_seconds, worker.time_slowest, worker.report_progress)
    stream_bytes = min(max(MIN_STREAM_BYTES, 4 * model.parameters), MAX_STREAM_BYTES)

    def compute() -> Any:
        return jax.block_until_ready(model.compute())

    jobs: dict[str, Callable[[int], Any]] = {
        COMPUTATION: lambda step: compute(),
        ALL_LINKS: lambda step: worker.stream(stream_bytes, range(config.hosts)),
        SINGLE_LINK: lambda step: worker.stream(stream_bytes, range(1)),
        BUSY_HOSTS: lambda step: worker.stream(stream_bytes, range(config.hosts)),
    }
    jobs |= compile_rows(worker, model)
    for name in (ALL_LINKS, SINGLE_LINK):
        worker.time_call(jobs[name], 0)  # until TCP has found its window
    samples: dict[str, list[Sample]] = {name: [] for name in jobs}
    for step in range(config.iterations):
        for name, run_step in jobs.items():
            worker.report_progress(f"iteration {step + 1} of {config.iterations}: {name}")
            beside = compute if name == BUSY_HOSTS else None
            samples[name].append(worker.time_call(run_step, step, beside=beside))
    for algorithm, wire in config.rows:
        if algorithm in OUTER:
            samples |= measure_outer(worker, model, algorithm, wire)
        if algorithm in ASYNCHRONOUS:
            name = make_row(algorithm, wire, config.hosts).name
            samples[name] = measure_asynchronous(worker, model, algorithm, wire)
    require_finite(model)
    return {
        **{
            field: {name: [getattr(sample, field) for sample in of] for name, of in samples.items()}
            for field in Sample._fields
        },
        "stream_bytes": stream_bytes,
        "parameters": model.parameters,
        "examples": examples,
        "peak_memory_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def share_counts(
    worker: Worker, seconds: list[float], cpu_before: float, sent_before: int | None
) -> list[Sample]:
    """Samples of steps made in one go: their processor time and bytes are the mean of all."""
    sent = worker.count_sent_bytes(sent_before)
    steps = max(1, len(seconds))
    cpu_seconds = (time.process_time() - cpu_before) / steps
    nic_bytes = None if sent is None else sent // steps
    return [Sample(step_seconds, cpu_seconds, nic_bytes) for step_seconds in seconds]


def measure_outer(
    worker: Worker, model: CalibratedModel, algorithm: str, wire: WireName
) -> dict[str, list[Sample]]:
    """The row of an outer optimizer, and steps without exchange before and after it, in one go.

    No barrier lies between the measured steps: averages are on their way, and no other collectives
    may run beside them. Before these steps all programs are compiled, the hosts meet once more, and
    then as much gets on its way as there is at the end.
    """
    config = worker.config
    row = make_row(algorithm, wire, config.hosts, config.iterations, OuterTimes(*config.outer))
    assert row.outer is not None
    trainer = RowTrainer(model, row.method.transform)

    def run(steps: range, run_step: Callable[[int], Any], status: str) -> list[Sample]:
        seconds = []
        before = worker.read_sent_bytes()
        cpu_before = time.process_time()
        for step in steps:
            worker.report_progress(
                f"iteration {config.iterations} of {config.iterations}: {row.name}, {status} {step}"
            )
            start = time.perf_counter()
            jax.block_until_ready(run_step(step))
            seconds.append(time.perf_counter() - start)
        return share_counts(worker, seconds, cpu_before, before)

    def compute() -> list[Sample]:
        worker.gather(0)
        steps = range(max(config.iterations, row.period))
        return run(steps, lambda step: model.compute(), "computation")

    alone = compute()
    worker.gather(0)
    compiled, first = row.outer.steps_to_compile, row.outer.first_measured
    run(range(compiled), trainer.run_step, "compiling step")
    trainer.wait()
    worker.gather(0)
    run(range(compiled, first), trainer.run_step, "warm-up step")
    measured = range(first, first + row.outer.count_steps(config.iterations))
    samples = run(measured, trainer.run_step, "step")
    trainer.wait()
    again = compute()
    return {name_computation(row): alone + again, row.name: samples}


def measure_asynchronous(
    worker: Worker, model: CalibratedModel, algorithm: str, wire: WireName
) -> list[Sample]:
    """The row of nodes that wait for nobody."""
    config = worker.config
    name = f"{algorithm}, {wire}"
    worker.report_progress(f"starting {name}")
    with socket.create_server((config.addresses[worker.rank], 0)) as server:
        ports = worker.gather(server.getsockname()[1])
    listens = [f"{host}:{int(port)}" for host, port in zip(config.addresses, ports, strict=True)]
    node = join_job(model, algorithm, wire, listens, worker.rank, config.secret)
    steps = config.iterations
    before = worker.read_sent_bytes()
    worker.report_progress(f"iteration {steps} of {steps}: {name}")
    measured = run_steps(node, model, config.hosts, steps)
    worker.gather(0)
    samples = share_counts(worker, measured.seconds, measured.cpu_before, before)
    node.leave()
    worker.gather(0)
    return samples


def compile_rows(worker: Worker, model: CalibratedModel) -> dict[str, Callable[[int], Any]]:
    """One iteration of each row, by its name, with every program compiled."""
    config = worker.config
    jobs: dict[str, Callable[[int], Any]] = {}
    for algorithm, wire in config.rows:
        if algorithm in (*OUTER, *ASYNCHRONOUS):
            continue
        row = make_row(algorithm, wire, config.hosts, config.iterations)
        in_buckets = algorithm == BUCKETS
        trainer = (
            BucketTrainer(model, wire) if in_buckets else RowTrainer(model, row.method.transform)
        )
        for step in sorted({row.canonical_step(step) for step in range(config.iterations)}):
            worker.report_progress(f"compiling {row.name}, step {step}")
            jax.block_until_ready(trainer.run_step(step))
        if isinstance(trainer, RowTrainer):
            trainer.start_anew()
        jobs[row.name] = trainer.run_step
    return jobs


def require_finite(model: CalibratedModel) -> None:
    """Raises `FloatingPointError` if this host's loss is not finite."""
    loss = model.nodes.run(compute_loss, model.params, model.batch)
    if not np.isfinite(loss.addressable_shards[0].data).all():
        raise FloatingPointError("the model is no longer finite")


def end_with_parent() -> None:
    """Ends this process as soon as its parent is gone, which closes its end of the pipe."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(folder: Path, rank: int) -> None:
    """Joins the other hosts, measures, and writes the results."""
    end_with_parent()
    config = WorkerConfig(**json.loads((folder / "config.json").read_text()))
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(config.coordinator_address, config.hosts, rank)
    worker = Worker(config, folder, rank)
    (folder / f"{rank}.json").write_text(json.dumps(measure(worker)))
    worker.gather(0)  # nobody leaves while others still need the coordinator
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
