"""The runs of a node that goes in lockstep with the others."""

import time
from typing import Any

import jax
import numpy as np

import gossipjax as gx
from experiments.results import Record
from experiments.speed.stragglers.node import Worker
from experiments.speed.stragglers.problem import (
    compute_gradients,
    compute_loss,
    make_optimizer,
)
from experiments.training.methods import MethodOptions, make_method


class LockstepTrainer:
    """Trains by `gx.TrainStep`, whose programs are compiled at first.

    Args:
      worker: this node.
      algorithm: one of `experiments.training.methods`.
    """

    def __init__(self, worker: Worker, algorithm: str):
        self.algorithm = algorithm
        self._worker = worker
        options = MethodOptions(worker.config.nodes, worker.config.steps)
        self._tx = make_method(algorithm, options, make_optimizer()).transform
        self._train_step = gx.TrainStep(compute_gradients, self._tx, nodes=worker.nodes)
        params, opt_state = worker.nodes.init(self._tx, worker.params)
        rng = np.random.default_rng(worker.rank)
        for step in range(1 + max(self._train_step.canonical_steps(opt_state) or [0])):
            params, opt_state, _ = self._run_step(step, params, opt_state, rng, 0.0)
        self._average(params, opt_state)

    def run(self, number: int, seconds: np.ndarray) -> Record:
        """Makes the run of this number.

        Args:
          number: in the settings.
          seconds: that the steps sleep.

        Returns:
          When it started, by `time.monotonic()`; when its steps ended and their losses; the loss
          of the average model; and what nodes that wait for nobody count, None.
        """
        worker = self._worker
        params, opt_state = worker.nodes.init(self._tx, worker.params)
        rng = np.random.default_rng(worker.rank)
        ends = []
        losses = []
        worker.gather(0)
        start = time.monotonic()
        for step in range(worker.config.steps):
            params, opt_state, loss = self._run_step(
                step, params, opt_state, rng, seconds[step % len(seconds)]
            )
            ends.append(time.monotonic())
            losses.append(float(loss.addressable_shards[0].data[0]))
            worker.report_progress(number, step + 1, "training")
        model = self._average(params, opt_state)
        loss = float(compute_loss(model, (worker.data.images, worker.data.labels)))
        counts = dict.fromkeys(("sent", "kept", "staleness"))
        return {"start": start, "ends": ends, "losses": losses, "loss": loss, **counts}

    def _run_step(
        self, step: int, params: Any, opt_state: Any, rng: np.random.Generator, seconds: float
    ) -> tuple[Any, Any, Any]:
        worker = self._worker
        batch, sleep = jax.tree.map(
            lambda x: x[None], (worker.data.draw_batch(rng), np.float32(seconds))
        )
        batch, sleep = worker.nodes.put((batch, sleep))
        return jax.block_until_ready(self._train_step(step, params, opt_state, batch, sleep))

    def _average(self, params: Any, opt_state: Any) -> Any:
        """The average model, on this process."""
        average = self._worker.nodes.run(gx.average_model, params, opt_state)
        return jax.tree.map(lambda x: x.addressable_shards[0].data[0], average)
