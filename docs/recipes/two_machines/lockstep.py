"""One of two machines in lockstep, by DiLoCo, in a tunnel: python lockstep.py STEPS"""

import sys
import time

import jax
import numpy as np
import optax
import training

import gossipjax as gx
from gossipjax.checkpoint import Checkpoints, TrainState

gx.launch.initialize()
EVERY, STEPS = 50, int(sys.argv[1])
nodes = gx.Nodes(mesh=gx.launch.mesh())


def make_tx(saved):
    nesterov = optax.sgd(0.7, momentum=0.9, nesterov=True)
    return gx.outer(optax.adam(1e-3), nesterov, every=EVERY)


gradients = jax.grad(training.loss_fn, has_aux=True)
train_step = gx.TrainStep(gradients, make_tx({}), nodes=nodes)
with Checkpoints("saved_lockstep", every=EVERY, shared=False) as checkpoints:
    state = TrainState(0, *nodes.init(make_tx({}), training.make_params()))
    state = checkpoints.resume(state, nodes, make_tx)
    clock = time.time()
    for step in range(state.step, STEPS):
        batches = [training.read_rows(i, step) for i in nodes.local]
        rows = nodes.put(jax.tree.map(lambda *leaves: np.stack(leaves), *batches))
        params, opt_state, loss = train_step(step, state.params, state.opt_state, rows)
        state = TrainState(step + 1, params, opt_state)
        if state.step % EVERY == 0:  # machines agree on a save: that is a message
            checkpoints.after(state, last=state.step == STEPS)
            loss = nodes.to_host(loss).mean()  # of all nodes
            rate = nodes.size * EVERY * training.TOKENS / (time.time() - clock)
            clock = time.time()
            print(f"step {state.step} loss {loss:.3f} {rate:,.0f} tokens/s")
model = gx.average_model(state.params, state.opt_state, nodes=nodes)
rows = training.read_rows(0, 10**9)
print(f"loss of the average {training.loss_fn(model, rows)[0]:.3f}")
