"""A whole training program: warm-up, clipping, mixed precision, EMA, logging, resume, evaluation.

    python -m experiments.examples.whole_program runs/whole
    python -m gossipjax.launch --processes 2 --local-devices 4 --max-restarts 3 -- \\
        python -m experiments.examples.whole_program runs/whole

Eight nodes train a small network on digits: simulated where there is one device, else one on each.
Start it again with the same folder and it goes on, also with another number of nodes.
"""

import itertools
import sys
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from optax.losses import softmax_cross_entropy_with_integer_labels
from tensorboardX import SummaryWriter

import gossipjax as gx
from experiments.examples.digits import draw_batches, test_batch
from gossipjax.checkpoint import Checkpoints

SETTINGS = {"rate": 0.2, "momentum": 0.9, "clip": 1.0}
STEPS = 400
BATCH = 256  # examples of all nodes
LOG_EVERY = 20
EVALUATE_EVERY = 100


def make_model(rngs):
    """Its parameters are float32; it computes in bfloat16."""
    linear = partial(nnx.Linear, dtype=jnp.bfloat16, rngs=rngs)
    return nnx.Sequential(linear(784, 128), nnx.relu, linear(128, 10))


def make_tx(saved):
    """The chain of a run with this metadata, which `resume` asks for."""
    peak = SETTINGS["rate"]
    rate = optax.warmup_cosine_decay_schedule(0.0, peak, 50, decay_steps=STEPS)
    schedule = gx.topology.one_peer_exponential(saved["nodes"])
    sgd = optax.sgd(rate, momentum=SETTINGS["momentum"])
    clip = optax.clip_by_global_norm(SETTINGS["clip"])
    return optax.chain(clip, sgd, gx.sgp(schedule))


def main(folder, steps=STEPS):
    """Trains until `steps`; returns the accuracies of the average model and its EMA."""
    gx.launch.initialize()  # before the first array
    graph, start = nnx.split(make_model(nnx.Rngs(0)), nnx.Param)

    def predict(params, images):
        model = nnx.merge(graph, params)
        return model(images.reshape(len(images), -1)).astype(jnp.float32)

    def loss(params, batch):
        """The loss of one node, and the same as a second result, to log it."""
        logits = predict(params, batch["image"])
        losses = softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses.mean(), losses.mean()

    @jax.jit
    def accuracy(params, batch):
        return (predict(params, batch["image"]).argmax(-1) == batch["label"]).mean()

    nodes = gx.Nodes(8) if jax.device_count() == 1 else gx.Nodes(mesh=gx.launch.mesh())
    tx = make_tx({"nodes": nodes.size})
    train_step = gx.TrainStep(jax.grad(loss, has_aux=True), tx, nodes=nodes)
    is_main = gx.processes.is_main_process()
    # Weights & Biases: wandb.init(sync_tensorboard=True) before, in the main process.
    log = SummaryWriter(str(Path(folder, "tensorboard"))) if is_main else None
    update_ema = jax.jit(partial(optax.incremental_update, step_size=0.01))
    reached = {}
    with Checkpoints(Path(folder, "checkpoints"), every=100) as checkpoints:
        params, opt_state = nodes.init(tx, start)
        metadata = {"settings": SETTINGS}
        ema = params
        state = gx.TrainState(0, params, opt_state, ema, metadata)
        state = checkpoints.resume(state, nodes, make_tx)
        batches = itertools.islice(draw_batches(BATCH, steps), state.step, None)
        began = time.perf_counter()
        batches = gx.prefetch(map(nodes.split, batches))
        for step, batch in enumerate(batches, state.step):
            old = state.params, state.opt_state
            params, opt_state, losses = train_step(step, *old, batch)
            ema = update_ema(params, state.rest)
            state = gx.TrainState(step + 1, params, opt_state, ema, state.metadata)
            values = {}
            if state.step % LOG_EVERY == 0:  # of all nodes, and on every process
                values["loss"] = nodes.to_host(losses).mean()
                now = time.perf_counter()
                values["examples per second"] = LOG_EVERY * BATCH / (now - began)
                began = now
            if state.step % EVALUATE_EVERY == 0 or state.step == steps:
                average = gx.average_model(params, opt_state, nodes=nodes)
                average_ema = gx.average_batch_stats(ema, nodes=nodes)
                for name, model in (("model", average), ("EMA", average_ema)):
                    reached[name] = float(accuracy(model, test_batch()))
                    values[f"accuracy of the {name}"] = reached[name]
            if log and values:
                text = ", ".join(f"{name} {x:,.3f}" for name, x in values.items())
                print(f"step {state.step}: {text}", flush=True)
                for name, value in values.items():
                    log.add_scalar(name, float(value), state.step)
            checkpoints.after(state, last=state.step == steps)
    return reached


if __name__ == "__main__":
    main(sys.argv[1])
