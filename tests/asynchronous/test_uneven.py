"""Nodes with 90, 10 and 1 examples reach the least squares of all 101, as they count by them."""

from concurrent.futures import ThreadPoolExecutor
from secrets import token_hex

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gossipjax as gx

RANDOM = np.random.default_rng(0)
A = [RANDOM.normal(size=(count, 4)) for count in (90, 10, 1)]
B = [a @ RANDOM.normal(size=4) for a in A]  # the data of each node fit another model
SECRET = token_hex()


@jax.value_and_grad
def loss_and_grads(params, a, b):
    return jnp.mean((a @ params - b) ** 2) / 2


def gradients(params, a, b):
    loss, grads = loss_and_grads(params, a, b)
    return grads, loss


def loss_of(model, places):
    """The mean loss of all examples of these nodes."""
    a, b = (np.concatenate([rows[place] for place in places]) for rows in (A, B))
    return float(np.mean((a @ model - b) ** 2) / 2)


def best_of(places):
    a, b = (np.concatenate([rows[place] for place in places]) for rows in (A, B))
    return loss_of(np.linalg.lstsq(a, b)[0], places)


def train(algorithm, rate, steps, leaves_at=None):
    """The average model at the end, and the means that the nodes are told; node 0 may leave."""
    nodes = []
    for place, rows in enumerate(A):
        address = nodes[0].address if nodes else None
        tx = optax.sgd(optax.linear_schedule(rate, rate / 10, steps))
        options = {"secret": SECRET, "address": address, "place": place, "node_weight": len(rows)}
        nodes.append(gx.asynchronous.join(tx, jnp.zeros(4), algorithm=algorithm, **options))
    for node in nodes:
        node.wait_for_mass()
    for step in range(steps):
        if step == leaves_at:
            nodes.pop(0).leave()
        for node in nodes:
            node.step(gradients, A[node.place], B[node.place])

    def end(node):
        with node:
            model = node.average()
            return model, node.mean(gradients(model, A[node.place], B[node.place])[1])

    with ThreadPoolExecutor(len(nodes)) as pool:
        models, means = zip(*pool.map(end, nodes), strict=True)
    return models[0], means


@pytest.mark.parametrize(
    ("algorithm", "rate", "steps"),
    [
        (gx.asynchronous.sgp(graph="random"), 0.1, 300),
        (gx.asynchronous.adpsgd(), 0.1, 300),
        (gx.asynchronous.outer(5), 0.05, 400),
    ],
    ids=["sgp", "adpsgd", "outer"],
)
def test_the_pooled_optimum_is_reached_and_the_mean_says_so(algorithm, rate, steps):
    """If all nodes counted alike, the loss would be 1.74 instead of 0.20."""
    model, means = train(algorithm, rate, steps)
    loss = loss_of(model, [0, 1, 2])
    np.testing.assert_allclose(means, loss, rtol=1e-4)
    assert loss < 1.02 * best_of([0, 1, 2])


def test_who_has_left_does_not_count():
    model, means = train(gx.asynchronous.sgp(graph="random"), 0.1, 500, leaves_at=100)
    loss = loss_of(model, [1, 2])
    np.testing.assert_allclose(means, loss, rtol=1e-4, atol=1e-6)
    assert loss < best_of([1, 2]) + 0.02
    assert loss_of(model, [0]) > 1.5 * best_of([0, 1, 2])
