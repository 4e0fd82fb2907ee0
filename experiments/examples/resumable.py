"""A run that survives being stopped: on one process, under the launcher, or on a cluster.

    python -m experiments.examples.resumable FOLDER
    python -m gossipjax.launch --processes 4 --max-restarts 3 -- \\
        python -m experiments.examples.resumable FOLDER

It saves every 100 steps and on SIGTERM. Started again, it goes on, also with another number of
nodes.
"""

import sys

import jax
import jax.numpy as jnp
import optax

import gossipjax as gx
from gossipjax.checkpoint import Checkpoints, TrainState


def make_tx(saved):
    """The optimizer chain of a run with this metadata."""
    schedule = gx.topology.one_peer_exponential(saved["nodes"])
    return optax.chain(optax.sgd(0.01, momentum=0.9), gx.sgp(schedule))


def loss(params, target):
    return jnp.sum((params - target) ** 2), ()


def main(folder, steps=1000):
    """Trains until `steps`; returns the state and the mean target."""
    gx.launch.initialize()
    nodes = gx.Nodes(mesh=gx.launch.mesh())  # a node per device of all processes
    tx = make_tx({"nodes": nodes.size})
    train_step = gx.TrainStep(jax.grad(loss, has_aux=True), tx, nodes=nodes)
    targets = nodes.put(jnp.arange(3.0)[None] + jnp.array(nodes.local)[:, None])
    with Checkpoints(folder, every=100) as checkpoints:
        state = TrainState(0, *nodes.init(tx, jnp.zeros(3)))
        state = checkpoints.resume(state, nodes, make_tx)
        for step in range(state.step, steps):
            params, opt_state, _ = train_step(step, state.params, state.opt_state, targets)
            state = TrainState(step + 1, params, opt_state)
            checkpoints.after(state)
    model = gx.average_model(state.params, state.opt_state, nodes=nodes)
    if gx.processes.is_main_process():
        print(f"step {state.step}: average model {model}")
    return state, model


if __name__ == "__main__":
    main(sys.argv[1])
