"""One host of a measurement: a JAX process that `harness.py` starts.

    python -m experiments.speed.wire FOLDER RANK

It reads `FOLDER/job.json`, writes what it measures in each run into `FOLDER/RUN-RANK.json`, and its
progress into `FOLDER/RANK.progress`. It ends with its parent.
"""

import json
import os
import sys
import threading
from pathlib import Path

import jax

from experiments.speed.wire import rows, stragglers
from experiments.speed.wire.timed import measure_rows
from experiments.speed.wire.worker import Job, Worker


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
    job = Job(**json.loads((folder / "job.json").read_text()))
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(job.coordinator_address, len(job.addresses), rank)
    worker = Worker(job, folder, rank)
    if job.kind == "rows":
        measure_rows(worker, rows.WireOptions(**job.options))
    else:
        stragglers.make_runs(worker, stragglers.StragglerOptions(**job.options))
    worker.gather(0)  # nobody leaves while others still need the coordinator
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
