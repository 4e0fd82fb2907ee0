"""AllReduce in buckets beside the backward pass, as data-parallel training does it today.

JAX on CPU does not run a collective beside the computation of the same program. So here the forward
pass, the backward pass of each bucket of layers and its all-reduce are separate programs: a thread
averages the gradients of a bucket while the next bucket's are computed. Nothing can travel before
the backward pass begins, so that `max(computation, bytes / goodput)` is out of reach by at least
the smaller of the forward pass and the exchange.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import optax

import gossipjax as gx
from experiments.speed.network.loops.model import LAYERS, Batch, CalibratedModel
from experiments.speed.network.rows import LEARNING_RATE
from experiments.training.methods import FORMS, WireName

BUCKET_LAYERS = 2  # 5 MB of the default model


def run_forward(params: Any, batch: Batch) -> tuple[list[jax.Array], jax.Array]:
    """The input of every layer, and the derivative of `compute_loss` by the last one's output."""
    x, y = batch
    inputs = []
    for layer in params:
        inputs.append(x)
        x = x @ layer["w"] + layer["b"][None]
        if len(inputs) < len(params):
            x = jax.nn.relu(x)
    return inputs, 2 / y.size * (x - y)


def run_backward(
    layers: Any, inputs: list[jax.Array], cotangent: jax.Array, is_first: bool
) -> tuple[Any, jax.Array]:
    """Gradients of consecutive layers, and the derivative of the loss by the output before them.

    Args:
      layers: their parameters.
      inputs: of each of them.
      cotangent: the derivative of the loss by the output of the last one, before its activation.
      is_first: whether nothing comes before them, whose derivative is asked for.
    """
    grads = []
    for number in reversed(range(len(layers))):
        x = inputs[number]
        grads.insert(0, {"b": cotangent.sum(axis=0), "w": x.T @ cotangent})
        if number or not is_first:
            cotangent = jnp.where(x > 0, cotangent @ layers[number]["w"].T, 0)
    return grads, cotangent


def apply_gradients(params: Any, grads: Any) -> Any:
    """The parameters after a step of plain SGD."""
    tx = optax.sgd(LEARNING_RATE)
    updates, _ = tx.update(grads, tx.init(params), params)
    return optax.apply_updates(params, updates)


class BucketTrainer:
    """Trains a `CalibratedModel` by AllReduce in buckets of layers, the last layers first."""

    def __init__(self, model: CalibratedModel, wire: WireName):
        self._model = model
        nodes = model.nodes
        average = gx.allreduce(wire=FORMS[wire].codec)
        self._forward = nodes.spmd(run_forward)
        self._backward = nodes.spmd(run_backward, static_argnums=3)
        self._average = nodes.spmd(lambda grads: average.update(grads, average.init(grads))[0])
        self._apply = nodes.spmd(apply_gradients, donate_argnums=gx.donate_on_accelerators(0))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="all-reduce")  # keeps the order

    def run_step(self, step: int) -> Any:
        """Runs one iteration; returns the parameters after it."""
        del step
        model = self._model
        inputs, cotangent = self._forward(model.params, model.batch)
        pending = []
        for first in reversed(range(0, LAYERS, BUCKET_LAYERS)):
            bucket = slice(first, first + BUCKET_LAYERS)
            layers = model.params[bucket]
            grads, cotangent = self._backward(layers, inputs[bucket], cotangent, first == 0)
            pending.append((bucket, self._thread.submit(self._average_when_ready, grads)))
        params = list(model.params)
        for bucket, mean in pending:
            params[bucket] = self._apply(params[bucket], mean.result())
        model.params = params
        return params

    def _average_when_ready(self, grads: Any) -> Any:
        # Dispatched only then, so that it waits for this bucket and not for those after it.
        return jax.block_until_ready(self._average(jax.block_until_ready(grads)))
