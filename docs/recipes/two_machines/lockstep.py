"""One of several machines in lockstep, by DiLoCo: python lockstep.py STEPS"""

import sys
import time

import jax
import numpy as np
import optax
from safetensors.flax import save_file

import gossipjax as gx
from gossipjax.checkpoint import Checkpoints, TrainState

gx.launch.initialize()

import training  # noqa: E402 - it may use JAX, so `initialize` comes first

EVERY, STEPS = 50, int(sys.argv[1])
nodes = gx.Nodes(mesh=gx.launch.mesh())


def make_tx(saved):
    nesterov = optax.sgd(0.7, momentum=0.9, nesterov=True)
    return gx.outer(optax.adam(1e-3), nesterov, every=EVERY, weights="counted")


def gradients(params, rows, examples):
    grads, loss = jax.grad(training.loss_fn, has_aux=True)(params, rows)
    return grads, (loss, examples)


def put(function, *args):  # one row for each node of this machine
    rows = [function(node, *args) for node in nodes.local]
    return nodes.put(jax.tree.map(lambda *leaves: np.stack(leaves), *rows))


def evaluate(state):
    """The loss of the average model on what this machine holds out, and on all."""
    model = gx.average_model(state.params, state.opt_state, nodes=nodes)
    loss = jax.jit(training.loss_fn)
    own = [loss(model, training.read_held_out(node))[1] for node in nodes.local]
    losses = put(lambda node: own[nodes.local.index(node)])
    losses, counts = nodes.to_host((losses, examples))
    mean = np.average(losses, weights=counts)
    return f"held out {np.mean(own):.3f} here, {mean:.3f} on all"


examples = put(lambda node: np.float32(training.EXAMPLES))
train_step = gx.TrainStep(
    gradients, make_tx({}), nodes=nodes, extra_args=lambda aux: {"node_weight": aux[1]}
)
with Checkpoints("saved_lockstep", every=EVERY, shared=False) as checkpoints:
    state = TrainState(0, *nodes.init(make_tx({}), training.make_params()))
    state = checkpoints.resume(state, nodes, make_tx)
    print(f"node {nodes.local} of {nodes.size} begins at step {state.step}")
    clock = time.time()
    for step in range(state.step, STEPS):
        rows = put(training.read_rows, step)
        params, opt_state, (loss, _) = train_step(
            step, state.params, state.opt_state, rows, examples
        )
        state = TrainState(step + 1, params, opt_state)
        if state.step % EVERY == 0:  # machines agree on a save: that is a message
            checkpoints.after(state, last=state.step == STEPS)
            rate = nodes.size * EVERY * training.TOKENS / (time.time() - clock)
            loss = nodes.to_host(loss).mean()  # of all nodes
            speed = f"{rate:,.0f} tokens/s"
            print(f"step {state.step} loss {loss:.3f}, {evaluate(state)}, {speed}")
            clock = time.time()
print(f"average model: {evaluate(state)}")
model = gx.average_model(state.params, state.opt_state, nodes=nodes)
leaves = jax.tree_util.tree_leaves_with_path(model)
names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
arrays = dict(zip(names, jax.tree.leaves(model), strict=True))
save_file(arrays, "model.safetensors")
