"""Nodes with 90, 10 and 1 examples reach the least squares of all 101, if they count by them."""

from secrets import token_hex

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gossipjax as gx

COUNTS = (90, 10, 1)
RANDOM = np.random.default_rng(0)
A = [RANDOM.normal(size=(count, 4)) for count in COUNTS]
B = [a @ RANDOM.normal(size=4) for a in A]  # each node has another model in its data
OPTIMUM = np.linalg.lstsq(np.concatenate(A), np.concatenate(B))[0]
SECRET = token_hex()


@jax.value_and_grad
def loss(params, a, b):
    return jnp.mean((a @ params - b) ** 2) / 2


def gradients(params, a, b):
    value, grads = loss(params, a, b)
    return grads, value


def train(algorithm, rate, steps, leaves=(), counts=COUNTS):
    """The average model at the end, and the means of the losses that the nodes are told."""
    nodes = []
    for place, count in enumerate(counts):
        address = nodes[0].address if nodes else None
        tx = optax.sgd(optax.linear_schedule(rate, rate / 10, steps))
        options = {"algorithm": algorithm, "secret": SECRET, "address": address, "place": place}
        nodes.append(gx.asynchronous.join(tx, jnp.zeros(4), node_weight=count, **options))
    for node in nodes:
        node.wait_for_mass()
    for step in range(steps):
        for node in nodes:
            if (node.place, step) in leaves:
                node.leave()
                nodes = [other for other in nodes if other is not node]
            else:
                node.step(gradients, A[node.place], B[node.place])
    for node in nodes:
        node._participant.ending.finish()
    models = [None] * len(nodes)
    means = [0.0] * len(nodes)
    import threading

    def end(i):
        models[i] = nodes[i].average()
        value, _ = loss(models[i], A[nodes[i].place], B[nodes[i].place])
        means[i] = nodes[i].mean(value)
        nodes[i].leave()

    threads = [threading.Thread(target=end, args=(i,)) for i in range(len(nodes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return models[0], means


@pytest.mark.parametrize(
    ("algorithm", "rate", "steps"),
    [
        (gx.asynchronous.sgp(graph="random"), 0.05, 2000),
        (gx.asynchronous.adpsgd(), 0.05, 2000),
        (gx.asynchronous.outer(5), 0.02, 4000),
    ],
    ids=["sgp", "adpsgd", "outer"],
)
def test_nodes_that_count_by_examples_reach_the_pooled_optimum(algorithm, rate, steps):
    """And the mean that all print is the loss of all examples."""
    model, means = train(algorithm, rate, steps)
    pooled = np.mean((np.concatenate(A) @ model - np.concatenate(B)) ** 2) / 2
    np.testing.assert_allclose(means, pooled, rtol=1e-5)
    best = np.mean((np.concatenate(A) @ OPTIMUM - np.concatenate(B)) ** 2) / 2
    assert best < pooled < 1.02 * best
    assert np.linalg.norm(model - OPTIMUM) < 0.1
