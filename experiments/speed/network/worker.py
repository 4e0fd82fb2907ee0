"""One host of the network measurement: a JAX process that `measure.py` starts.

    python -m experiments.speed.network.worker FOLDER RANK

It reads `FOLDER/config.json`, writes its results into `FOLDER/RANK.json`, and its progress into
`FOLDER/RANK.progress`. In every iteration it runs all rows, one after another, so that noise
affects all of them alike. All hosts start each run together, after a barrier that is not timed. The
rows of outer optimizers and of nodes that wait for nobody come after that, each in one go.
"""

import dataclasses
import json
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

import gossipjax as gx
from experiments.results import Record
from experiments.speed.network.loops.asynchronous import join_job, run_steps
from experiments.speed.network.loops.buckets import BucketTrainer
from experiments.speed.network.loops.model import CalibratedModel, RowTrainer, compute_loss
from experiments.speed.network.rows import (
    ALL_LINKS,
    BUCKETS,
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
CHUNK_BYTES = 2**20


@dataclasses.dataclass(frozen=True)
class WorkerConfig:
    """Settings that all hosts of a measurement share; written as `config.json`.

    Attributes:
      coordinator_address: address and port where host 0 starts JAX's coordination service.
      addresses: of every host.
      rows: pairs of an algorithm and the type of its messages.
      megabytes: 1e6 bytes of float32 parameters.
      compute_seconds: of an iteration without exchange on all hosts at once; sizes the batch.
      iterations: to measure of each row.
      outer: the fields of `OuterTimes`.
      secret: of the nodes that wait for nobody.
      interface: the network interface whose counter is read; None where hosts share one.
    """

    coordinator_address: str
    addresses: list[str]
    rows: list[tuple[str, WireName]]
    megabytes: float
    compute_seconds: float
    iterations: int
    outer: tuple[int, int, int]
    secret: str
    interface: str | None

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return len(self.addresses)


class Sample(NamedTuple):
    """What was measured of a call.

    Attributes:
      seconds: that it took.
      cpu_seconds: of all threads of this process.
      nic_bytes: that this host sent; None where hosts share an interface.
    """

    seconds: float
    cpu_seconds: float
    nic_bytes: int | None


class Worker:
    """This process among the others: barriers, gathered numbers, clocks and byte counters."""

    def __init__(self, config: WorkerConfig, folder: Path, rank: int):
        self.config = config
        self.rank = rank
        self.nodes = gx.Nodes(mesh=Mesh(np.array(jax.devices()), ("nodes",)))
        self._progress = folder / f"{rank}.progress"
        self._all_gather = self.nodes.spmd(lambda x: jax.lax.all_gather(x, "nodes"))
        self._connections: tuple[socket.socket, socket.socket] | None = None

    def report_progress(self, progress: str) -> None:
        """Writes what this host is doing to where the parent reads it."""
        self._progress.write_text(progress)

    def gather(self, value: float) -> np.ndarray:
        """The numbers of all hosts, float32 `[N]`; waits for all of them."""
        gathered = self._all_gather(self.nodes.put(np.array([value], np.float32)))
        return np.asarray(gathered.addressable_shards[0].data)[0]

    def time_call(self, call: Callable[..., Any], *args: Any) -> Sample:
        """Times a call from a common start of all hosts, and counts the bytes that it sent."""
        self.gather(0)
        sent_before = self.read_sent_bytes()
        cpu_start = time.process_time()
        start = time.perf_counter()
        jax.block_until_ready(call(*args))
        seconds = time.perf_counter() - start
        self.gather(0)  # until all has arrived: what is sent last waits in the kernel
        cpu_seconds = time.process_time() - cpu_start
        return Sample(seconds, cpu_seconds, self.count_sent_bytes(sent_before))

    def time_slowest(self, call: Callable[[], Any]) -> float:
        """Seconds that a call took on the slowest host."""
        return float(self.gather(self.time_call(call).seconds).max())

    def count_sent_bytes(self, before: int | None) -> int | None:
        """Bytes since an earlier `read_sent_bytes`; None where hosts share an interface."""
        now = self.read_sent_bytes()
        return None if now is None or before is None else now - before

    def read_sent_bytes(self) -> int | None:
        """Bytes that this host has sent so far; None where hosts share an interface."""
        if self.config.interface is None:
            return None
        file = Path(f"/sys/class/net/{self.config.interface}/statistics/tx_bytes")
        return int(file.read_text())

    def connect(self) -> None:
        """Opens a plain TCP connection to the next host, and accepts the previous host's."""
        with socket.create_server((self.config.addresses[self.rank], 0)) as server:
            ports = self.gather(server.getsockname()[1])
            next_rank = (self.rank + 1) % self.config.hosts
            address = (self.config.addresses[next_rank], int(ports[next_rank]))
            to_next = socket.create_connection(address)
            from_previous, _ = server.accept()
        to_next.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connections = to_next, from_previous

    def stream(self, size: int, senders: range) -> None:
        """Sends `size` bytes from each host of `senders` to its next; waits until they arrive."""
        assert self._connections is not None
        to_next, from_previous = self._connections
        thread = threading.Thread(target=to_next.sendall, args=(bytes(size),))
        if self.rank in senders:
            thread.start()
        if (self.rank - 1) % self.config.hosts in senders:
            buffer = bytearray(CHUNK_BYTES)
            missing = size
            while missing:
                count = from_previous.recv_into(buffer, min(CHUNK_BYTES, missing))
                if not count:
                    raise ConnectionError("the previous host has closed its stream")
                missing -= count
        if self.rank in senders:
            thread.join()


def measure(worker: Worker) -> Record:
    """Runs every row in every iteration; returns the seconds and bytes of this host."""
    config = worker.config
    worker.report_progress("connecting")
    worker.connect()
    model = CalibratedModel(worker.nodes, config.megabytes)
    examples = model.calibrate(config.compute_seconds, worker.time_slowest, worker.report_progress)
    stream_bytes = min(max(MIN_STREAM_BYTES, 4 * model.parameters), MAX_STREAM_BYTES)
    jobs: dict[str, Callable[[int], Any]] = {
        COMPUTATION: lambda step: model.compute(),
        ALL_LINKS: lambda step: worker.stream(stream_bytes, range(config.hosts)),
        SINGLE_LINK: lambda step: worker.stream(stream_bytes, range(1)),
    }
    jobs |= compile_rows(worker, model)
    for name in (ALL_LINKS, SINGLE_LINK):
        worker.time_call(jobs[name], 0)  # until TCP has found its window
    samples: dict[str, list[Sample]] = {name: [] for name in jobs}
    for step in range(config.iterations):
        for name, run_step in jobs.items():
            worker.report_progress(f"iteration {step + 1} of {config.iterations}: {name}")
            samples[name].append(worker.time_call(run_step, step))
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
