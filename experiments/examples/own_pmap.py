"""A training loop with a `jax.pmap` of its own, now with gossip in the place of `lax.pmean`.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m experiments.examples.own_pmap
    python -m gossipjax.launch --processes 2 --local-devices 4 -- \\
        python -m experiments.examples.own_pmap

A node on each device; where there is one, eight are a `jax.vmap`, which takes the same axis. Lines
that the loop has because of gossip end in `# gossip`. Two that it had are gone: `lax.pmean` of the
gradients, which would make all nodes equal, and the one of `BatchNorm(axis_name=...)`, if a model
has it. Every array of the state has a row for each device: `in_axes` and `out_axes` of a model that
all devices share, `None`, would take one node's model for all.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gossipjax as gx  # gossip
from experiments.examples.digits import draw_batches, test_batch


def predict(params, images):
    hidden = jax.nn.relu(images.reshape(len(images), -1) @ params["first"])
    return hidden @ params["last"]


def loss_fn(params, batch):
    logits = predict(params, batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def init_params(key):
    make = jax.nn.initializers.he_normal()
    first, last = jax.random.split(key)
    return {"first": make(first, (784, 64)), "last": make(last, (64, 10))}


def make_maps():
    """The number of nodes, that of this process, and the map of functions over them."""
    if jax.device_count() > 1:
        return jax.device_count(), jax.local_device_count(), partial(jax.pmap, axis_name="batch")

    def vmap(fn, static_broadcasted_argnums=()):
        in_axes = [None if i in static_broadcasted_argnums else 0 for i in range(4)]
        mapped = jax.vmap(fn, in_axes[: fn.__code__.co_argcount], axis_name="batch")
        return jax.jit(mapped, static_argnums=static_broadcasted_argnums)

    return 8, 8, vmap


def main(steps=200, batch_size=256):
    """Trains, and returns the accuracy of the average model."""
    gx.launch.initialize()  # gossip
    size, local, pmap = make_maps()
    schedule = gx.topology.one_peer_exponential(size)  # gossip
    gossip = gx.sgp(schedule, axis_name="batch")  # gossip
    tx = optax.chain(optax.sgd(0.1, momentum=0.9), gossip)  # gossip: it was optax.sgd(...)

    def train_step(params, opt_state, batch, step):  # gossip: step
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params, step=step)  # gossip: step
        return optax.apply_updates(params, updates), opt_state, loss

    program = pmap(train_step, static_broadcasted_argnums=(3,))  # gossip: (3,)
    params = init_params(jax.random.key(0))
    state = jax.tree.map(lambda x: np.stack([x] * local), (params, tx.init(params)))
    loss = jnp.zeros(())
    for step, batch in enumerate(draw_batches(batch_size, steps)):
        rows = jax.tree.map(lambda x: x.reshape(local, -1, *x.shape[1:]), batch)
        number = gx.canonical_step(state[1], step)  # gossip
        *state, loss = program(*state, rows, number)
        loss = np.mean([shard.data for shard in loss.addressable_shards])

    averaged = pmap(lambda params, opt_state: gx.average_model(params, opt_state))(*state)  # gossip
    model = jax.tree.map(lambda x: np.asarray(x.addressable_shards[0].data)[0], averaged)
    test = test_batch()
    accuracy = float((predict(model, test["image"]).argmax(-1) == test["label"]).mean())
    if gx.processes.is_main_process():
        print(f"{size} nodes, loss {loss:.3f}, accuracy {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main()
