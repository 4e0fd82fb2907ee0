"""The model that the network measurement trains: an MLP, with a batch sized for a given time."""

import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import gossipjax as gx
from experiments.speed.network.rows import LEARNING_RATE

LAYERS = 8
MAX_TRIES = 6  # batch sizes
MAX_ERROR = 0.08  # relative; a batch size whose time is this near to the target is taken
TIMINGS_PER_TRY = 3
SECOND_BATCH = 33  # examples; far enough from the first, 1, to draw a line through both
MAX_GROWTH = 8  # from one try to the next

Batch = tuple[jax.Array, jax.Array]
"""Inputs and targets, `[B, width]` each."""


def choose_width(megabytes: float) -> int:
    """Width of an MLP of 8 equal layers with `megabytes` of float32 parameters (1e6 bytes).

    >>> width = choose_width(20)
    >>> width, 4 * LAYERS * (width * width + width) / 1e6
    (790, 19.99648)
    """
    return max(1, int((1 + megabytes * 1e6 / LAYERS) ** 0.5 / 2 - 0.5))


def init_params(width: int) -> list[dict[str, jax.Array]]:
    """The initial parameters, the same on every node."""
    keys = jax.random.split(jax.random.key(0), LAYERS)
    scale = (2 / width) ** 0.5
    return [
        {"w": scale * jax.random.normal(key, (width, width)), "b": jnp.zeros(width)} for key in keys
    ]


def compute_loss(params: Any, batch: Batch) -> jax.Array:
    """Mean squared error of the MLP."""
    x, y = batch
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"][None])
    return jnp.mean((x @ params[-1]["w"] + params[-1]["b"][None] - y) ** 2)


def compute_gradients(params: Any, batch: Batch) -> tuple[Any, None]:
    """Gradients of the loss, without further results, in the form that `gx.TrainStep` takes."""
    return jax.grad(compute_loss)(params, batch), None


def apply_sgd(params: Any, batch: Batch) -> Any:
    """One iteration without exchange: the parameters after a step of plain SGD."""
    tx = optax.sgd(LEARNING_RATE)
    updates, _ = tx.update(jax.grad(compute_loss)(params, batch), tx.init(params), params)
    return optax.apply_updates(params, updates)


class CalibratedModel:
    """The parameters and the batch of all nodes; every row of the measurement trains them.

    Only one model exists, handed from row to row, so that many rows fit into memory: its values do
    not affect the time. Each row keeps its optimizer state, and with it its messages in flight.
    """

    def __init__(self, nodes: gx.Nodes, megabytes: float):
        self.nodes = nodes
        self.width = choose_width(megabytes)
        self.params = nodes.spmd(lambda: init_params(self.width))()
        self.parameters = sum(x[0].size for x in jax.tree.leaves(self.params))
        self.batch: Any = None
        donated = gx.donate_on_accelerators(0)  # as gx.TrainStep does
        self._local_step = nodes.spmd(apply_sgd, donate_argnums=donated)

    def draw_batch(self, size: int) -> None:
        """Draws `size` examples for every node, other ones on each."""

        def draw() -> Batch:
            key = jax.random.fold_in(jax.random.key(1), jax.lax.axis_index(self.nodes.axis_name))
            x, y = jax.random.normal(key, (2, size, self.width))
            return x, y

        self.batch = self.nodes.spmd(draw)()

    def compute(self) -> Any:
        """Runs one iteration without exchange."""
        self.params = self._local_step(self.params, self.batch)
        return self.params

    def calibrate(
        self,
        target_seconds: float,
        time_call: Callable[[Callable[[], Any]], float],
        report_progress: Callable[[str], None],
    ) -> int:
        """Sizes the batch so that `compute` takes about `target_seconds`; returns its examples.

        Args:
          target_seconds: the time to reach.
          time_call: calls a function and returns the seconds that it took on the slowest host.
          report_progress: is called before each try.
        """
        seconds: dict[int, float] = {}
        size = 1
        while size not in seconds and len(seconds) < MAX_TRIES:
            report_progress(f"sizing the batch: {size} examples")
            self._change_batch(size)
            timings = [time_call(self.compute) for _ in range(TIMINGS_PER_TRY)]
            seconds[size] = statistics.median(timings)
            if abs(seconds[size] - target_seconds) < MAX_ERROR * target_seconds:
                break
            size = choose_batch_size(seconds, target_seconds)
        best = min(seconds, key=lambda size: abs(seconds[size] - target_seconds))
        self._change_batch(best)
        return best

    def _change_batch(self, size: int) -> None:
        self.draw_batch(size)
        jax.block_until_ready(self.compute())  # compiles the program of this batch


class RowTrainer:
    """Trains a `CalibratedModel` by one row's algorithm."""

    def __init__(self, model: CalibratedModel, tx: optax.GradientTransformationExtraArgs):
        self._model = model
        self._train_step = gx.TrainStep(compute_gradients, tx, nodes=model.nodes)
        self._tx = tx
        self.start_anew()

    def start_anew(self) -> None:
        """Makes a new optimizer state, of no updates: the next step may be any."""
        self._opt_state = self._model.nodes.run(self._tx.init, self._model.params)

    def run_step(self, step: int) -> Any:
        """Runs one iteration; returns the parameters and the optimizer state after it."""
        model = self._model
        model.params, self._opt_state, _ = self._train_step(
            step, model.params, self._opt_state, model.batch
        )
        return model.params, self._opt_state

    def wait(self) -> None:
        """Waits for the averages on their way, so that other collectives may follow."""
        self._train_step.wait()


def choose_batch_size(seconds: dict[int, float], target: float) -> int:
    """The batch size that should take `target` seconds, on the line through the two nearest.

    Args:
      seconds: of the batch sizes that were timed.
      target: seconds.

    >>> choose_batch_size({1: 0.1}, 0.5), choose_batch_size({1: 0.1, 33: 0.26}, 0.5)
    (33, 81)
    """
    if len(seconds) == 1:
        return SECOND_BATCH if seconds[1] < target else 1
    nearest = sorted(seconds.items(), key=lambda item: abs(item[1] - target))[:2]
    (a, seconds_a), (b, seconds_b) = nearest
    slope = (seconds_b - seconds_a) / (b - a)
    largest = max(seconds)
    in_proportion = largest * target / seconds[largest]  # where a larger batch takes no longer
    size = a + (target - seconds_a) / slope if slope > 0 else in_proportion
    return max(1, min(round(size), MAX_GROWTH * largest))
