"""A training loop with a closed `train_step` of flax's linen, as MaxText and nanodo have one.

    python -m experiments.examples.flax_linen
    python -m gossipjax.launch --processes 2 --local-devices 4 -- \\
        python -m experiments.examples.flax_linen

Eight nodes train a small network on digits: simulated where there is one device, else one on each.
The step knows nothing of gossip: its optimizer is inside, with BatchNorm, dropout and a
`TrainState`. Lines that the loop has because of gossip end in `# gossip`.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training import train_state

import gossipjax as gx  # gossip
from experiments.examples.digits import draw_batches, test_batch


class Model(nn.Module):
    """One hidden layer with BatchNorm and dropout."""

    @nn.compact
    def __call__(self, images, train):
        hidden = nn.Dense(64)(images.reshape(len(images), -1))
        hidden = nn.relu(nn.BatchNorm(not train, momentum=0.9)(hidden))
        return nn.Dense(10)(nn.Dropout(0.2, deterministic=not train)(hidden))


class TrainState(train_state.TrainState):
    """With the statistics of BatchNorm, and the key of dropout."""

    batch_stats: Any
    key: jax.Array


def create_state():
    """The state before the first step."""
    model = Model()
    variables = model.init(jax.random.key(0), jnp.ones((1, 28, 28, 1)), train=False)
    tx = optax.sgd(0.1, momentum=0.9)
    return TrainState.create(apply_fn=model.apply, tx=tx, key=jax.random.key(1), **variables)


def train_step(state, batch):
    """One update."""

    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        key = jax.random.fold_in(state.key, state.step)
        logits, new = state.apply_fn(
            variables, batch["image"], train=True, mutable=["batch_stats"], rngs={"dropout": key}
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses.mean(), new["batch_stats"]

    (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, batch_stats=stats), loss


def evaluate(state):
    """The accuracy on the test digits."""
    test = test_batch()
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    logits = state.apply_fn(variables, test["image"], train=False)
    return float((logits.argmax(-1) == test["label"]).mean())


def main(steps=200, batch_size=256):
    """Trains, and returns the accuracy of the average model."""
    gx.launch.initialize()  # gossip
    one_device = jax.device_count() == 1
    nodes = gx.Nodes(8) if one_device else gx.Nodes(mesh=gx.launch.mesh())  # gossip
    schedule = gx.topology.one_peer_exponential(nodes.size)  # gossip
    program = gx.decentralize(train_step, gx.sgp(schedule), nodes)  # gossip: it was jax.jit
    state = create_state()
    batches = map(nodes.split, draw_batches(batch_size, steps))  # gossip: nodes.split
    loss = jnp.zeros(())
    for batch in gx.prefetch(batches):
        state, loss = program(state, batch)
    accuracy = evaluate(program.average(state))  # gossip: it was that of the state
    loss = nodes.to_host(loss).mean()  # gossip: of all nodes
    if gx.processes.is_main_process():
        print(f"{nodes.size} nodes, loss {loss:.3f}, accuracy {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main()
