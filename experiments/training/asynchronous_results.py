"""Writes the files of an asynchronous node, and collects the results of all nodes of a run."""

import dataclasses
import itertools
import json
import operator
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import gossipjax as gx
from experiments.results import (
    AFTER_MIXING,
    BEFORE_MIXING,
    TEXT_FOLDER,
    Record,
    read_lines,
    replace_text,
)
from experiments.training.delays import measure_delays
from experiments.training.evaluation import Evaluator
from experiments.training.output import write_texts
from experiments.training.plan import TrainingPlan
from experiments.training.task import Task, Variables
from experiments.training.trainer import NonFiniteError

COLLECT_SECONDS = 10.0  # how long to wait for the files of other nodes
Show = Callable[[float, str], None]


@dataclasses.dataclass
class NodeLog:
    """Writes the losses of one node in lines, with the seconds since 1970.

    A node that was started again appends to the file.
    """

    path: Path
    node: Any
    plan: TrainingPlan
    nodes: int
    show: Show  # gets the progress of the run and a text
    seconds_per_step: list[float] = dataclasses.field(default_factory=list)
    losses: list[jax.Array] = dataclasses.field(default_factory=list)  # since the last line

    def __post_init__(self) -> None:
        self.began = self.last = time.time()

    def add(self, loss: jax.Array) -> None:
        """Adds the loss of a step."""
        self.losses.append(loss)
        if len(self.losses) == self.plan.options.log_every:
            self.finish()

    def finish(self) -> None:
        """Writes the losses since the last line; raises `NonFiniteError` for NaN or infinity."""
        if not self.losses:
            return
        loss = float(np.mean(jax.device_get(self.losses)))
        if not np.isfinite(loss):
            raise NonFiniteError(
                f"the loss of node {self.node.place} must be finite, got {loss} after "
                f"{self.node.statistics.steps} steps: lower --learning-rate."
            )
        now = time.time()
        self.seconds_per_step.append((now - self.last) / len(self.losses))
        self.last = now
        self.losses = []
        step = min(self.node.total_steps / self.nodes, self.plan.steps)
        line = {"step": step, "time": now, "loss": loss, "members": self.node.members}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self.show(step, f"loss {loss:.3g}, {len(self.node.members)} nodes")


def write_node(path: Path, node: gx.asynchronous.Node, log: Any) -> None:
    """Writes the statistics of a node."""
    counts = node.statistics._asdict()
    seconds = time.time() - log.began
    record = counts | {
        "steps": node.steps,
        "steps_per_second": counts["steps"] / seconds,
        "seconds_per_step": float(np.median(log.seconds_per_step or [0.0])),
    }
    replace_text(path, json.dumps(record))


def read_nodes(folder: Path) -> list[list[Record]]:
    """Returns the lines of each node, without lines that were cut off."""
    return [read_lines(path) for path in sorted(folder.glob("[0-9]*.jsonl"))]


def merge_lines(folder: Path, metrics: Path, run: str, plan: TrainingPlan, nodes: int) -> None:
    """Adds means of the nodes' lines, in order of time, to `metrics.jsonl`."""
    all_lines = itertools.chain.from_iterable(read_nodes(folder))
    lines = sorted(all_lines, key=operator.itemgetter("time"))
    if not lines:
        return
    start = lines[0]["time"]
    per_epoch = plan.num_examples / (nodes * plan.options.batch_size_per_node)
    with metrics.open("a") as file:
        for part in np.array_split(np.array(lines, object), max(1, len(lines) // nodes)):
            last = part[-1]
            line = {
                "run": run,
                "step": int(last["step"]),
                "epoch": last["step"] / per_epoch,
                "seconds": last["time"] - start,
                "loss": float(np.mean([entry["loss"] for entry in part])),
                BEFORE_MIXING: None,
                AFTER_MIXING: None,
            }
            file.write(json.dumps(line) + "\n")


def make_record(
    task: Task,
    plan: TrainingPlan,
    folder: Path,
    run: Any,
    topology: str,
    average: Variables,
    models: dict[int, Variables],
) -> Record:
    """Returns the entry of a run in `summary.json`; `models` are the nodes' models at the end."""
    paths = [folder / f"{place}.json" for place in models]
    deadline = time.monotonic() + COLLECT_SECONDS
    while not all(path.exists() for path in paths) and time.monotonic() < deadline:
        time.sleep(0.1)
    counts = [json.loads(path.read_text()) for path in paths if path.exists()]
    last_losses = [lines[-1]["loss"] for lines in read_nodes(folder) if lines]
    batch = plan.options.batch_size_per_node
    one = gx.Nodes(1)
    evaluator = Evaluator(task, one)
    test = evaluator.evaluate_average(one.replicate(average))
    of_nodes = [evaluator.evaluate_nodes(one.replicate(model)) for model in models.values()]
    examined = evaluator.examine_average(one.replicate(average), is_last=True)
    write_texts(folder.parents[1] / TEXT_FOLDER / folder.name, examined.texts)
    changes = [
        jax.tree.leaves(jax.tree.map(np.subtract, model["params"], average["params"]))
        for model in models.values()
    ]
    distances = [np.sqrt(sum(float(np.square(a).sum()) for a in one)) for one in changes]
    journals = sorted(folder.glob("journals/*/*.jsonl"))
    return {
        "run": run.name,
        "algorithm": run.title,
        "topology": topology,
        "nodes": plan.options.nodes,
        "steps": plan.steps,
        "seed": run.seed,
        "seconds_per_step": float(np.mean([record["seconds_per_step"] for record in counts])),
        "examples_per_second": sum(record["steps_per_second"] for record in counts) * batch,
        **test,
        **examined.metrics,
        **{name: [values[name][0] for values in of_nodes] for name in of_nodes[0]},
        **examined.details,
        "consensus_distance": float(np.mean(distances)),
        "places_nodes": list(models),
        "steps_nodes": [record["steps"] for record in counts],
        "staleness_nodes": [record["staleness"] for record in counts],
        "gradient_delay": float(measure_delays(journals).mean()),
        "messages_nodes": [record["sent"] for record in counts],
        "weight_nodes": [record["weight"] for record in counts],
        "bytes_nodes": [record["sent_bytes"] for record in counts],
        "final_loss": float(np.mean(last_losses)),
    }
