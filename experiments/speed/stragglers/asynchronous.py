"""The runs of a node that waits for nobody."""

import time

import jax
import jax.numpy as jnp
import numpy as np

import gossipjax as gx
from experiments.program import ProgramError
from experiments.results import Record
from experiments.speed.stragglers.node import Worker
from experiments.speed.stragglers.problem import (
    Batch,
    compute_gradients,
    compute_loss,
    make_optimizer,
)
from experiments.training.asynchronous import ASYNCHRONOUS

PATIENCE = 30.0  # seconds of silence after which a node is declared dead: none is meant to be
MEETING_SECONDS = 60.0  # that nodes wait for each other before the start


class AsynchronousTrainer:
    """Trains by `gx.asynchronous`; every run is a job of its own.

    Args:
      worker: this node.
      algorithm: one of `experiments.training.asynchronous`.
    """

    def __init__(self, worker: Worker, algorithm: str):
        self.algorithm = algorithm
        self._worker = worker

    def run(self, number: int, seconds: np.ndarray) -> Record:
        """Makes the run of this number; the arguments and the record are those in lockstep.

        Until all nodes together have made N times the steps of the run. A node that hears of it in
        the middle of a step ends that step.
        """
        worker = self._worker
        config = worker.config
        rng = np.random.default_rng(worker.rank)
        ends = []
        losses = []
        with self._join(number) as node:
            node.warm_up(compute_gradients, self._draw_batch(rng), jnp.float32(0))
            if not node.wait_for_members(config.nodes, MEETING_SECONDS):
                raise ProgramError(
                    f"{config.nodes} nodes must meet within {MEETING_SECONDS:g} s, got nodes "
                    f"{node.members}."
                )
            worker.gather(0)
            start = time.monotonic()
            while (done := node.total_steps) < config.steps * config.nodes:
                worker.report_progress(number, done / config.nodes, "training")
                step_seconds = jnp.float32(seconds[len(ends) % len(seconds)])
                losses.append(node.step(compute_gradients, self._draw_batch(rng), step_seconds))
                ends.append(time.monotonic())
            worker.report_progress(number, config.steps, "averaging")
            model = node.average()
            statistics = node.statistics
        loss = float(compute_loss(model, (worker.data.images, worker.data.labels)))
        return {
            "start": start,
            "ends": ends,
            "losses": [float(x) for x in losses],
            "loss": loss,
            "sent": statistics.sent,
            "kept": statistics.kept,
            "staleness": statistics.staleness,
        }

    def _join(self, number: int) -> gx.asynchronous.Node:
        """Node 0 starts the job; the others join it at its address, with a weight of their own."""
        worker = self._worker
        host = worker.config.addresses[worker.rank]
        port = 0.0
        node = None
        if worker.rank == 0:
            node = self._join_at(None, host, number)
            port = float(node.address.rpartition(":")[2])
        ports = worker.gather(port)
        address = f"{worker.config.addresses[0]}:{ports[0]:.0f}"
        return node or self._join_at(address, host, number)

    def _join_at(self, address: str | None, host: str, number: int) -> gx.asynchronous.Node:
        worker = self._worker
        return gx.asynchronous.join(
            address,
            make_optimizer(),
            jax.tree.map(jnp.asarray, worker.params),
            algorithm=ASYNCHRONOUS[self.algorithm].build(0),
            listen=f"{host}:0",
            place=worker.rank,
            job=f"stragglers {number}",
            is_founder=True,
            patience=PATIENCE,
            secret=worker.config.secret,
        )

    def _draw_batch(self, rng: np.random.Generator) -> Batch:
        images, labels = self._worker.data.draw_batch(rng)
        return jnp.asarray(images), jnp.asarray(labels)
