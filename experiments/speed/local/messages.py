"""Memory, processor time and rate of asynchronous nodes with large models, beside a TCP stream.

    python -m experiments.speed local messages --megabytes 200 1000

Two nodes of `gx.asynchronous`, each in a process, send each other half of one large array at each
step, by SGD whose gradients are cheap; a sleep stands for their computation. A node alone makes the
same steps: what it takes is the optimizer's, and the rest is of the messages. Afterwards the two
processes send each other as many bytes by plain TCP sockets, both at the same time, as nodes do.

Memory is the largest resident memory of a process so far, less that of nodes with a tiny model.

As a program this module is one of the processes: its argument is a `Settings` as JSON. The first
node prints where it listens, `{"address": ..., "port": ...}`, and each at its end what it measured.
"""

import dataclasses
import json
import os
import resource
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.table import Table

import gossipjax as gx
from experiments.data.prefetch import total_memory
from experiments.options import Check, NonNegativeFloat, PositiveInt
from experiments.program import ProgramError
from experiments.results import Record
from experiments.sleep import compute_one
from experiments.speed import harness

PROGRAM = "experiments.speed.local.messages"
HOST = "127.0.0.1"
TINY = 1000  # bytes of the model that memory is compared with
WARM_UP = 2  # steps
PASSES = 3  # of the TCP stream, of which the median is reported
WAIT_SECONDS = 60.0
NEEDED = 5  # models of memory per node, at least


@dataclasses.dataclass(frozen=True)
class Options(harness.CheckOptions):
    """Options of the measurement of large messages."""

    megabytes: tuple[
        Annotated[float, Check("at least 0.1", lambda megabytes: megabytes >= 0.1)], ...
    ] = (200.0, 1000.0)
    """Float32 parameters, in 1e6 bytes: one or several sizes."""
    steps: PositiveInt = 15
    """Timed steps of each node."""
    compute_seconds: NonNegativeFloat = 1.0
    """Seconds of sleep in each step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.megabytes:
            raise ValueError("--megabytes must be one or several sizes, got none.")
        total = total_memory()
        needed = 2 * NEEDED * 1e6 * max(self.megabytes)
        if total is not None and needed > total:
            raise ValueError(
                f"--megabytes must leave room for {NEEDED} models of each of two nodes in "
                f"{total / 1e9:.1f} GB of memory, got {max(self.megabytes):g}."
            )


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a process."""

    place: int
    nodes: int  # 1 or 2
    size: int  # values of the model
    steps: int
    compute_seconds: float
    journal: str
    address: str | None = None  # of the first node
    port: int = 0  # where that takes the TCP stream


def compute_gradients(params: jax.Array, seconds: Any) -> tuple[jax.Array, None]:
    """Gradients that are there after a while."""
    return params * compute_one(seconds), None


def run_node(settings: Settings) -> Record:
    """Makes the steps of a node, then sends by TCP; returns what was measured."""
    listener = socket.create_server((HOST, 0))
    node = gx.asynchronous.join(
        settings.address,
        optax.sgd(1e-3),
        jnp.ones(settings.size),
        algorithm=gx.asynchronous.sgp(),
        place=settings.place,
        is_founder=True,
        patience=WAIT_SECONDS,
        journal=Path(settings.journal),
    )
    if settings.address is None:
        print(json.dumps({"address": node.address, "port": listener.getsockname()[1]}), flush=True)
    if not node.wait_for_members(settings.nodes, WAIT_SECONDS):
        raise ProgramError("the other node must join, got none.")
    for _ in range(WARM_UP):
        node.step(compute_gradients, settings.compute_seconds)
    sent = node.statistics.sent
    start, processor_start = time.perf_counter(), time.process_time()
    for _ in range(settings.steps):
        node.step(compute_gradients, settings.compute_seconds)
    result = {
        "seconds": (time.perf_counter() - start) / settings.steps,
        "processor_seconds": (time.process_time() - processor_start) / settings.steps,
        "sent_per_step": (node.statistics.sent - sent) / settings.steps,
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }
    if settings.nodes == 1:
        node.abort()
        return result
    if settings.address is None:
        connection = listener.accept()[0]
    else:
        connection = socket.create_connection((HOST, settings.port))
    with connection:
        exchange(connection, np.ones(1), np.ones(1))  # both have made their steps
        node.abort()
        passes = [time_stream(connection, settings.size) for _ in range(PASSES)]
    return result | dict(
        zip(("tcp_seconds", "tcp_processor_seconds"), np.median(passes, 0).tolist(), strict=True)
    )


def time_stream(connection: socket.socket, size: int) -> tuple[float, float]:
    """Sends and receives as many float32; returns the seconds, and those of the processor."""
    source, target = np.ones(size, np.float32), np.ones(size, np.float32)
    exchange(connection, np.ones(1), np.ones(1))  # begin together
    start, processor_start = time.perf_counter(), time.process_time()
    exchange(connection, source, target)
    return time.perf_counter() - start, time.process_time() - processor_start


def exchange(connection: socket.socket, source: np.ndarray, target: np.ndarray) -> None:
    """Sends an array while another of its size arrives."""
    sender = threading.Thread(target=connection.sendall, args=(source.data.cast("B"),))
    sender.start()
    left = target.data.cast("B")
    while left:
        count = connection.recv_into(left)
        if not count:
            raise ProgramError("the other process has ended.")
        left = left[count:]
    sender.join()


def make_process(settings: Settings) -> harness.ChildProcess:
    """The process of a node."""
    return harness.ChildProcess(PROGRAM, settings, {"JAX_PLATFORMS": "cpu"})


def run_nodes(options: Options, nodes: int, size: int) -> Record:
    """Runs one node, or two; returns the means of what they measured, and the largest memory."""
    with tempfile.TemporaryDirectory() as folder:
        journals = [Path(folder) / f"{place}.jsonl" for place in range(nodes)]
        settings = Settings(
            0, nodes, size, options.steps, options.compute_seconds, str(journals[0])
        )
        with make_process(settings) as first:
            listens = first.read()
            if nodes == 1:
                return first.read()
            more = {"place": 1, "journal": str(journals[1]), **listens}
            with make_process(dataclasses.replace(settings, **more)) as second:
                results = [first.read(), second.read()]
        means: Record = {name: float(np.mean([r[name] for r in results])) for name in results[0]}
        means["peak_bytes"] = max(result["peak_bytes"] for result in results)
        means["message_seconds"] = measure_delay(journals)
        return means


def measure_delay(journals: Sequence[Path]) -> float | None:
    """The median seconds from a share to its receipt."""
    events: dict[str, dict[Any, float]] = {"share": {}, "receive": {}}
    for path in journals:
        for line in map(json.loads, path.read_text().splitlines()):
            lives = line.get("peer"), line["life"]
            if line["event"] == "share":
                events["share"][*lives[::-1], line["number"]] = line["time"]
            elif line["event"] == "receive":
                events["receive"][*lives, line["number"]] = line["time"]
    arrived = events["receive"].items()
    seconds = [time - events["share"][key] for key, time in arrived if key in events["share"]]
    return float(np.median(seconds)) if seconds else None


def measure_case(options: Options, megabytes: float) -> list[Record]:
    """Measures one size; returns the one object in `runs`."""
    size = round(megabytes * 1e6 / 4)
    short = dataclasses.replace(options, steps=1, compute_seconds=0.1)
    tiny = run_nodes(short, 2, TINY // 4)
    alone, both = (run_nodes(options, nodes, size) for nodes in (1, 2))
    more_seconds = both["processor_seconds"] - alone["processor_seconds"]
    return [
        {
            "model_bytes": 4 * size,
            "models_alone": (alone["peak_bytes"] - tiny["peak_bytes"]) / (4 * size),
            "models": (both["peak_bytes"] - tiny["peak_bytes"]) / (4 * size),
            "seconds": both["seconds"],
            "processor_seconds_alone": alone["processor_seconds"],
            "processor_seconds": both["processor_seconds"],
            "sent_per_step": both["sent_per_step"],
            "processor_seconds_per_message": more_seconds / max(both["sent_per_step"], 1e-9),
            "tcp_processor_seconds": both["tcp_processor_seconds"],
            "bytes_per_second": both["message_seconds"] and 4 * size / both["message_seconds"],
            "tcp_bytes_per_second": 4 * size / both["tcp_seconds"],
        }
    ]


def make_table(runs: Sequence[Record]) -> Table:
    """A row per size."""
    columns: dict[str, harness.Cell] = {
        "MB": harness.scale("model_bytes", 1e6, ",.0f"),
        "models\nalone": "{models_alone:.1f}",
        "models": "{models:.1f}",
        "s/step": "{seconds:.2f}",
        "CPU s\nalone": "{processor_seconds_alone:.2f}",
        "CPU s": "{processor_seconds:.2f}",
        "sent": "{sent_per_step:.2f}",
        "CPU s/\nmessage": "{processor_seconds_per_message:.2f}",
        "TCP": "{tcp_processor_seconds:.2f}",
        "MB/s": harness.scale("bytes_per_second", 1e6, ",.0f"),
        "TCP MB/s": harness.scale("tcp_bytes_per_second", 1e6, ",.0f"),
    }
    caption = (
        "of a node and step; models: memory over that of the model; alone: without another node; "
        "CPU s/message: to send one and receive one, beside a plain TCP stream of as many bytes"
    )
    return harness.make_table("Two nodes with large models", caption, columns, runs, texts=0)


def make_plan(options: Options) -> harness.Plan:
    """All sizes."""
    cases = [
        (f"{megabytes:g} MB", partial(measure_case, options, megabytes))
        for megabytes in options.megabytes
    ]
    return harness.Plan("two processes on loopback", cases, make_table)


def measure_messages(options: Options) -> None:
    """Memory, processor time and rate of asynchronous nodes with large models."""
    harness.run_check("messages", options, partial(make_plan, options))


if __name__ == "__main__":
    print(json.dumps(run_node(Settings(**json.loads(sys.argv[1])))), flush=True)
    os._exit(0)
