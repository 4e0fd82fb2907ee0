"""One of two machines that never wait for each other: python asynchronous.py STEPS"""

import sys
import time

import jax
import optax
import training

import gossipjax as gx

gradients = jax.grad(training.loss_fn, has_aux=True)
with gx.asynchronous.join(
    optax.adam(1e-3),
    training.make_params(),
    algorithm=gx.asynchronous.outer(every=50),
    folder="saved",
) as node:
    print(f"node {node.place} begins at step {node.steps}, nodes {node.members}")
    clock = time.time()
    while node.total_steps < int(sys.argv[1]):  # of all nodes together
        loss = node.step(gradients, training.read_rows(node.place, node.steps))
        if node.steps % 100 == 0:
            speed = f"{100 * training.TOKENS / (time.time() - clock):,.0f} tokens/s"
            clock = time.time()
            print(f"step {node.steps} loss {loss:.3f} {speed}, nodes {node.members}")
    model = node.average()
rows = training.read_rows(0, 10**9)
print(f"loss of the average {training.loss_fn(model, rows)[0]:.3f}")
