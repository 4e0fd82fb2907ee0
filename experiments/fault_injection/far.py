"""Asynchronous nodes, a process each, over a router that is slow, far away, and loses packets.

    python -m experiments.fault_injection far
    python -m experiments.fault_injection far --megabytes 0.2 --partition 60

It needs root, network namespaces and TUN devices (`router.py`). Every node holds one large array,
which it moves to a goal of its own; the average of all models goes to that of the goals. With
`--partition` the first half of the nodes cannot reach the other for so many seconds. Before the job
starts, one plain TCP stream is measured over the same router.

Required: all nodes end, the account of the weight closes to 1e-9, each had one life unless there
was a partition, they all return the same average, and no more was sent than one model per share and
grant, within 10 %.
"""

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from rich.progress import Progress

import gossipjax as gx
from experiments import results
from experiments.fault_injection.job import ROOT, make_table
from experiments.fault_injection.router import make_far_network, require_tools
from experiments.fault_injection.stream import measure_stream
from experiments.options import (
    Check,
    NonNegativeFloat,
    OptionalPath,
    PositiveFloat,
    PositiveInt,
    Seed,
    check_fields,
)

MAX_DIFFERENCE = 1e-9
MAX_RESENT = 1.1
STREAM_SECONDS = 8.0
RATE = 0.05
PORT = 5000
SECRET = "of the far nodes"
MESSAGES = ("share", "grant", "hand over")  # that have a whole model


@dataclasses.dataclass(frozen=True)
class FarOptions:
    """Trains asynchronous nodes over slow links that lose packets."""

    nodes: Annotated[PositiveInt, Check("from 2 to 200", lambda value: 2 <= value <= 200)] = 3
    """Number of nodes, a process and a network namespace each."""
    megabytes: PositiveFloat = 20.0
    """Of a model."""
    rate: PositiveFloat = 1.0
    """Megabytes per second that a node sends, and receives."""
    delay: NonNegativeFloat = 0.1
    """Seconds that a packet travels, one way."""
    loss: Annotated[NonNegativeFloat, Check("below 1", lambda value: value < 1)] = 0.02
    """The part of the packets that is lost."""
    seconds: PositiveFloat = 120.0
    """Seconds of training."""
    partition: NonNegativeFloat = 0.0
    """Seconds without a way between the two halves, from a third of the training on."""
    patience: PositiveFloat = 4.0
    """Seconds of silence after which a node is declared dead."""
    step_seconds: PositiveFloat = 0.5
    """Pause after each step."""
    seed: Seed = 0
    """Seed of the lost packets."""
    out: OptionalPath = None
    """Folder for the results; a new one under runs/ if not given."""
    overwrite: bool = False
    """Replace the results of another run in --out."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclasses.dataclass(frozen=True)
class NodeOptions:
    """A node of the job; `measure` starts it."""

    place: int
    listen: str
    contact: str
    values: int
    seconds: float
    patience: float
    step_seconds: float
    journal: Path


def gradients(params: Any, goal: Any) -> tuple[Any, Any]:
    """Of half the squared distance to the goal."""
    return params - goal, None


def run_node(options: NodeOptions) -> None:
    """Trains a node, and prints what it came to as a line of JSON."""
    node = gx.asynchronous.join(
        options.contact if options.place else None,
        optax.sgd(RATE),
        jnp.zeros(options.values),
        algorithm=gx.asynchronous.sgp(),
        listen=options.listen,
        place=options.place,
        is_founder=True,
        patience=options.patience,
        secret=SECRET,
        journal=options.journal,
    )
    end = time.monotonic() + options.seconds
    while time.monotonic() < end:
        node.step(gradients, jnp.float32(options.place))
        time.sleep(options.step_seconds)
    before = node.params
    average = np.asarray(node.average())
    counts = node.statistics
    node.leave(timeout=10 * options.patience)
    record = {
        "model": float(before[0]),
        "average": float(average[0]),
        "is_whole": bool((average == average[0]).all()),
        "steps": counts.steps,
        "sent": counts.sent,
        "sent_bytes": counts.sent_bytes,
        "weight": counts.weight,
        "processor_seconds": time.process_time(),
    }
    print(json.dumps(record))


def measure(options: FarOptions, out: Path, bar: Progress) -> list[str]:
    """Runs the job, prints its table, and returns what was violated."""
    require_tools()
    values = int(options.megabytes * 1e6 / 4)
    network = make_far_network(
        options.nodes, 1e6 * options.rate, options.delay, options.loss, options.seed
    )
    task = bar.add_task("far", total=options.seconds, status="")
    with network as (router, hosts):
        stream_rate = measure_stream(hosts[0], hosts[1], STREAM_SECONDS)
        router.passed = 0
        began = time.monotonic()
        processes = []
        for place, host in enumerate(hosts):
            fields = {"place": place, "listen": f"{host.address}:{PORT}"}
            fields |= {"contact": f"{hosts[0].address}:{PORT}", "values": values}
            fields |= {name: getattr(options, name) for name in SHARED}
            fields |= {"journal": out / f"{place}.jsonl"}
            words = [f"--{name.replace('_', '-')}={value}" for name, value in fields.items()]
            processes.append(
                subprocess.Popen(
                    [*host.prefix, sys.executable, "-m", __name__, *words],
                    stdout=subprocess.PIPE,
                    text=True,
                    env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
                )
            )
        half = options.nodes // 2
        pairs = {frozenset((a, b)) for a in range(half) for b in range(half, options.nodes)}
        while any(process.poll() is None for process in processes):
            seconds = time.monotonic() - began
            since = seconds - options.seconds / 3
            router.cut = pairs if 0 <= since < options.partition else set()
            bar.update(task, completed=min(seconds, options.seconds))
            time.sleep(0.1)
        seconds = time.monotonic() - began
        rate = router.passed / seconds / options.nodes
        printed = [process.communicate()[0].splitlines() for process in processes]
    records = [json.loads(lines[-1]) if lines else {} for lines in printed]
    journals = sorted(out.glob("*.jsonl"))
    account = gx.asynchronous.account(journals)
    rows = [make_row(place, record, journals[place]) for place, record in enumerate(records)]
    bar.console.print(make_table(HEADERS, rows))
    bar.console.print(
        f"{seconds:.0f} s; {rate / 1e6:.2f} MB/s arrived at each node, of {options.rate:g}; one "
        f"plain TCP stream carried {stream_rate / 1e6:.2f} MB/s before. The account's difference "
        f"is {account.difference:.1e}.",
        soft_wrap=True,
    )
    record = {"account": jax.tree.map(float, account._asdict()), "nodes": records}
    record |= {"rate": rate, "stream_rate": stream_rate}
    results.write_summary(out, dataclasses.asdict(options), {}, [record])
    return check(options, records, [read_events(path) for path in journals], account)


SHARED = ("seconds", "patience", "step_seconds")
HEADERS = ("node", "place", "lives", "steps", "shares", "MB sent", "weight", "model", "average")
HEADERS += ("processor s",)


def read_events(path: Path) -> list[str]:
    """The names of the events in a journal."""
    with path.open() as lines:
        return [json.loads(line)["event"] for line in lines]


def make_row(place: int, record: dict[str, Any], journal: Path) -> tuple[str, ...]:
    """The cells of a node."""
    lives = read_events(journal).count("life")
    if not record:
        return (f"{place}", f"{lives}", *["-"] * 7)
    return (
        f"{place}",
        f"{lives}",
        f"{record['steps']}",
        f"{record['sent']}",
        f"{record['sent_bytes'] / 1e6:.0f}",
        f"{record['weight']:.3f}",
        f"{record['model']:.3f}",
        f"{record['average']:.4f}",
        f"{record['processor_seconds']:.1f}",
    )


def check(
    options: FarOptions,
    records: list[dict[str, Any]],
    events: list[list[str]],
    account: gx.asynchronous.Account,
) -> list[str]:
    """What the job has violated."""
    if not all(records):
        return [f"far: all nodes end, got {[bool(record) for record in records]}"]
    lives = [names.count("life") for names in events]
    averages = {record["average"] for record in records}
    model = 4 * int(options.megabytes * 1e6 / 4)
    finals = options.nodes * (options.nodes - 1)
    messages = sum(names.count(kind) for names in events for kind in MESSAGES) + finals
    sent = sum(record["sent_bytes"] for record in records) / (messages * model)
    required = [
        (
            abs(account.difference) <= MAX_DIFFERENCE * account.founded,
            "the account closes",
            account,
        ),
        (options.partition or max(lives) == 1, "one life each", lives),
        (len(averages) == 1, "the same average on all", averages),
        (all(r["is_whole"] for r in records), "whole models", records),
        (options.partition or sent <= MAX_RESENT, "nothing sent twice", f"{sent:.2f} of its bytes"),
    ]
    return [f"far: {what}, got {got}" for holds, what, got in required if not holds]


if __name__ == "__main__":
    run_node(tyro.cli(NodeOptions))
