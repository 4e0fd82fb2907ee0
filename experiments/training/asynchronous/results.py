"""The results of a run of nodes that wait for nobody: their lines and counts in the usual files."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import gossipjax as gx
from experiments.results import AFTER_MIXING, BEFORE_MIXING, Record
from experiments.training.evaluation import Evaluator
from experiments.training.plan import Plan
from experiments.training.task import Task, Variables

COLLECT_SECONDS = 10.0  # for the files of the other nodes


def write_node(path: Path, node: gx.asynchronous.Node, log: Any, position: int) -> None:
    """Writes what a node counted; `position` is the number of its steps in an earlier process."""
    counts = node.statistics._asdict()
    seconds = time.time() - log.began
    record = counts | {
        "steps": position + counts["steps"],
        "steps_per_second": counts["steps"] / seconds,
        "seconds_per_step": float(np.median(log.seconds_per_step or [0.0])),
    }
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(record))
    temporary.replace(path)


def read_lines(folder: Path) -> dict[int, list[Record]]:
    """Returns the lines of every node, by place; one that was cut off is left out."""
    lines: dict[int, list[Record]] = {}
    for path in sorted(folder.glob("[0-9]*.jsonl")):
        found = []
        for text in path.read_text().splitlines():
            try:
                found.append(json.loads(text))
            except json.JSONDecodeError:
                continue
        lines[int(path.stem)] = found
    return lines


def merge_lines(folder: Path, metrics: Path, run: str, plan: Plan, nodes: int) -> None:
    """Adds lines of the run to `metrics.jsonl`: means of the nodes' lines, in order of time."""
    by_node = read_lines(folder)
    lines = sorted((line for lines in by_node.values() for line in lines), key=lambda x: x["time"])
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
    plan: Plan,
    folder: Path,
    run: Any,
    topology: str,
    average: Variables,
    models: dict[int, Variables],
) -> Record:
    """Returns the entry of a run in `summary.json`.

    Args:
      task, plan, folder, run, topology: of the run.
      average: the average model of the nodes that live at the end.
      models: place -> the model of each of them.
    """
    counts = collect_nodes(folder, list(models))
    by_node = read_lines(folder)
    batch = plan.options.batch_size_per_node
    one = gx.Nodes(1)
    evaluator = Evaluator(task, one)
    test = evaluator.evaluate_average(one.replicate(average))
    of_nodes = [evaluator.evaluate_nodes(one.replicate(model)) for model in models.values()]
    examined = evaluator.examine_average(one.replicate(average), is_last=True)
    distances = [measure_distance(model, average) for model in models.values()]
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
        "messages_nodes": [record["sent"] for record in counts],
        "weight_nodes": [record["weight"] for record in counts],
        "bytes_nodes": [record["sent_bytes"] for record in counts],
        "final_loss": float(np.mean([lines[-1]["loss"] for lines in by_node.values() if lines])),
    }


def collect_nodes(folder: Path, places: Sequence[int]) -> list[Record]:
    """Returns what the nodes at these places counted; waits a little for their files."""
    paths = [folder / f"{place}.json" for place in places]
    deadline = time.monotonic() + COLLECT_SECONDS
    while not all(path.exists() for path in paths) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def measure_distance(model: Variables, average: Variables) -> float:
    """Returns the Euclidean distance between the parameters of two models."""
    leaves = zip(jax.tree.leaves(model["params"]), jax.tree.leaves(average["params"]), strict=True)
    return float(np.sqrt(sum(float(np.square(a - b).sum()) for a, b in leaves)))
