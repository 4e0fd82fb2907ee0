"""A training function that knows nothing of what starts it: softmax regression on 5,000 digits.

`ray_train.py` gives it to Ray Train as it is. `ray_asynchronous.py` takes the parts above `train`.
"""

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gossipjax as gx
from experiments import data
from gossipjax.checkpoint import Checkpoints, TrainState


def init():
    return {"w": jnp.zeros((28 * 28, 10)), "b": jnp.zeros(10)}


def predict(params, images):
    return images.reshape(len(images), -1) @ params["w"] + params["b"]


def loss(params, batch):
    images, labels = batch
    losses = optax.softmax_cross_entropy_with_integer_labels(predict(params, images), labels)
    return losses.mean(), ()


gradients = jax.grad(loss, has_aux=True)


def draw_batch(digits, step, node):
    """32 digits. They depend on the node and the step alone: after a restart they are the same."""
    rows = np.random.default_rng((step, node)).integers(len(digits.train_labels), size=32)
    return digits.train_images[rows], digits.train_labels[rows]


def measure_accuracy(params, digits):
    """Of a model on the test digits."""
    return float((predict(params, digits.test_images).argmax(-1) == digits.test_labels).mean())


def make_tx(saved):
    """The optimizer chain of a run with this metadata."""
    schedule = gx.topology.one_peer_exponential(saved["nodes"])
    return optax.chain(optax.sgd(0.01, momentum=0.9), gx.sgp(schedule))


def train(
    folder: Path,
    steps: int,
    checkpoint_every: int,
    before_step: Callable[[int], None] = lambda step: None,
):
    """Trains until `steps`, from the newest checkpoint in `folder` on if it has one.

    Every process of the job calls it; the nodes are the devices of all processes.

    Returns:
      The test accuracy of the average model.
    """
    gx.launch.initialize()  # finds the job that Ray, a scheduler or the launcher has made
    nodes = gx.Nodes(mesh=gx.launch.mesh())
    tx = make_tx({"nodes": nodes.size})
    train_step = gx.TrainStep(gradients, tx, nodes=nodes)
    digits = data.load("mnist5k")
    with Checkpoints(folder, every=checkpoint_every) as checkpoints:
        state = TrainState(0, *nodes.init(tx, init()))
        state = checkpoints.resume(state, nodes, make_tx)
        if gx.processes.is_main_process():
            print(f"{nodes.size} nodes go on from step {state.step}", flush=True)
        for step in range(state.step, steps):
            before_step(step)
            batches = [draw_batch(digits, step, node) for node in nodes.local]
            batch = nodes.put(tuple(map(np.stack, zip(*batches, strict=True))))
            params, opt_state, _ = train_step(step, state.params, state.opt_state, batch)
            state = TrainState(step + 1, params, opt_state)
            checkpoints.after(state, last=step + 1 == steps)
    model = gx.average_model(state.params, state.opt_state, nodes=nodes)
    return measure_accuracy(model, digits)
