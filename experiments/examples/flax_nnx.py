"""A training loop of flax's NNX, with BatchNorm, dropout and `nnx.Optimizer`; now with gossip.

    python -m experiments.examples.flax_nnx
    python -m gossipjax.launch --processes 2 --local-devices 4 -- \\
        python -m experiments.examples.flax_nnx

Eight nodes train a small network on digits: simulated where there is one device, else one on each.
Lines that the loop has because of gossip end in `# gossip`.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import gossipjax as gx  # gossip
from experiments.examples.digits import draw_batches, test_batch


class Model(nnx.Module):
    """One hidden layer with BatchNorm and dropout."""

    def __init__(self, rngs):
        self.first = nnx.Linear(784, 64, rngs=rngs)
        self.norm = nnx.BatchNorm(64, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.last = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, images):
        hidden = self.first(images.reshape(len(images), -1))
        return self.last(self.dropout(nnx.relu(self.norm(hidden))))


def loss_fn(model, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["image"]), batch["label"])
    return losses.mean()


def find_params(state):  # gossip
    return nnx.filter_state(state, nnx.Param)  # gossip


def main(steps=200, batch_size=256):
    """Trains, and returns the accuracy of the average model."""
    gx.launch.initialize()  # gossip
    one_device = jax.device_count() == 1
    nodes = gx.Nodes(8) if one_device else gx.Nodes(mesh=gx.launch.mesh())  # gossip
    schedule = gx.topology.one_peer_exponential(nodes.size)  # gossip
    model = Model(nnx.Rngs(0, dropout=1))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))

    def train_step(state, batch):
        model, optimizer = nnx.merge(graph, state)
        loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    gossip = gx.sgp(schedule)  # gossip
    program = gx.decentralize(
        train_step, gossip, nodes, params=find_params
    )  # gossip: it was jax.jit
    batches = map(nodes.split, draw_batches(batch_size, steps))  # gossip: nodes.split
    loss = jnp.zeros(())
    for batch in gx.prefetch(batches):
        state, loss = program(state, batch)

    nnx.update((model, optimizer), program.average(state))  # gossip: it was state
    model.eval()
    test = test_batch()
    accuracy = float((model(test["image"]).argmax(-1) == test["label"]).mean())
    loss = nodes.to_host(loss).mean()  # gossip: of all nodes
    if gx.processes.is_main_process():
        print(f"{nodes.size} nodes, loss {loss:.3f}, accuracy {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main()
