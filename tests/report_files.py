"""The files of runs: of made-up ones, for the tests of the report, and of those of programs."""

import json
from pathlib import Path
from typing import Any

from experiments.results import Record


def make_run(algorithm: str, topology: str, seed: int, **fields: object) -> Record:
    return {
        "run": f"{algorithm}-{topology}-{seed}",
        "algorithm": algorithm,
        "topology": topology,
        "nodes": 4,
        "steps": 20,
        "seed": seed,
        "seconds_per_step": 0.0125,
        "examples_per_second": 12345.6,
        "test_accuracy_average_model": 0.975,
        "test_accuracy_nodes": [0.97, 0.96, 0.98, 0.95],
        "consensus_distance": 0.0123,
        "consensus_distance_before_mixing": 0.03,
        "final_loss": 0.1,
        **fields,
    }


def make_lines(run: Record, distance: float = 1.0, evaluations: bool = True) -> list[Record]:
    training = [
        {
            "run": run["run"],
            "step": step,
            "epoch": step / 10,
            "seconds": step / 5,
            "loss": 2.0 / (step + 1),
            "consensus_distance_before_mixing": 2 * distance,
            "consensus_distance": distance,
            "examples_per_second": 1e4,
            "learning_rate": 0.1,
        }
        for step in range(0, 20, 5)
    ]
    shared = {"run": run["run"], "step": 10, "epoch": 1.0, "seconds": 2.0}
    return training + [shared | {"test_accuracy_average_model": 0.5}] * evaluations


def write_run(folder: Path, runs: list[Record], lines: list[Record]) -> Path:
    (folder / "summary.json").write_text(json.dumps({"options": {}, "runs": runs}))
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


def read_run(folder: Path) -> tuple[dict[str, Any], list[Record]]:
    """The summary and the lines of the metrics."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return json.loads((folder / "summary.json").read_text()), [json.loads(line) for line in lines]


RUNS = [
    make_run("allreduce", "complete", 0),
    make_run("sgp", "ring", 0),
    make_run("sgp", "ring", 1),
]
LINES = [line for run in RUNS for line in make_lines(run, 0.0 if run is RUNS[0] else 1.0)]

PERPLEXITY_RUNS = [
    {
        **{k: v for k, v in make_run("sgp", "ring", seed).items() if "accuracy" not in k},
        "test_perplexity_average_model": 20.5 + seed,
        "test_perplexity_nodes": [21.0 + seed, 25.0 + seed, 23.0 + seed],
    }
    for seed in range(2)
]


def make_perplexity_lines(run: Record) -> list[Record]:
    shared = {"run": run["run"], "step": 10, "epoch": 1.0, "seconds": 2.0}
    evaluation = shared | {"test_perplexity_average_model": 30.0}
    return [*make_lines(run, evaluations=False), evaluation]
