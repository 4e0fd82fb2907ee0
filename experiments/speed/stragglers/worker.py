"""One node of the measurement of slow nodes: a JAX process that `measure.py` starts.

    python -m experiments.speed.stragglers.worker FOLDER RANK

It reads `FOLDER/config.json` and the digits, writes what it measured in each run into
`FOLDER/RUN-RANK.json`, and its progress into `FOLDER/RANK.progress`. The processes make one run
after another, each from a common start.
"""

import json
import sys
from pathlib import Path

import jax

from experiments.speed.network.worker import end_with_parent
from experiments.speed.stragglers.asynchronous import AsynchronousTrainer
from experiments.speed.stragglers.lockstep import LockstepTrainer
from experiments.speed.stragglers.node import Worker, WorkerConfig
from experiments.training.asynchronous import ASYNCHRONOUS


def measure(worker: Worker) -> None:
    """Makes all runs; writes what this node measured in each."""
    trainer = None
    for number, (algorithm, slowness) in enumerate(worker.config.runs):
        worker.report_progress(number, 0, "compiling")
        if trainer is None or trainer.algorithm != algorithm:
            kind = AsynchronousTrainer if algorithm in ASYNCHRONOUS else LockstepTrainer
            trainer = kind(worker, algorithm)
        worker.write_record(number, trainer.run(number, worker.draw_seconds(slowness)))


def main(folder: Path, rank: int) -> None:
    """Joins the other nodes and measures."""
    end_with_parent()
    config = WorkerConfig(**json.loads((folder / "config.json").read_text()))
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(config.coordinator_address, config.nodes, rank)
    worker = Worker(config, folder, rank)
    measure(worker)
    worker.gather(0)  # nobody leaves while others still need the coordinator
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
