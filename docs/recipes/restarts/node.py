"""A node of an asynchronous job: your training, and what makes it one of several."""

import jax
import jax.numpy as jnp
import optax

import gossipjax as gx


def loss_fn(params, rows):
    loss = jnp.mean((params - rows) ** 2)
    return loss, loss


def read_rows(place, step):  # each node has data of its own
    return place + jax.random.normal(jax.random.fold_in(jax.random.key(place), step), (32, 3))


gradients = jax.grad(loss_fn, has_aux=True)
with gx.asynchronous.join(
    optax.adamw(1e-3),
    jnp.zeros(3),
    algorithm=gx.asynchronous.outer(every=50),
    folder="saved",
) as node:
    while node.total_steps < 20_000:
        loss = node.step(gradients, read_rows(node.place, node.steps))
        if node.steps % 100 == 0:
            print(f"step {node.steps}, loss {loss:.3f}, nodes {node.members}", flush=True)
    print(f"the average of all: {node.average()}")
