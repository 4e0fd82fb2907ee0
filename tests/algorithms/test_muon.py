"""Muon under gossip: what is orthogonal at a push-sum weight, and MuLoCo as a setting."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
from promotion import promoting

import gossipjax as gx

N = 4
RATE = 0.1
SHAPE = (6, 4)


def make_gradients(steps):
    return jnp.asarray(np.random.default_rng(0).normal(size=(N, steps, *SHAPE)), jnp.float32)


def test_at_weight_w_the_step_has_singular_values_of_the_update_over_w():
    """A round that moves the weights, and a local step: the weighted mean moves by the mean of u.

    With u = U S V^T, S from 0.6 to 1.3 times the rate, a node of weight w steps by u / w.
    """
    matrices = oracle.column_stochastic(np.random.default_rng(0), N)
    schedule = gx.topology.from_matrices(matrices).every(2)
    muon = promoting(optax.contrib.muon(RATE, nesterov=False))
    tx = optax.chain(muon, gx.sgp(schedule))

    def two_steps(grads):
        z = jnp.zeros(SHAPE)
        state: Any = tx.init(z)
        updates: Any
        updates, state = tx.update(grads[0], state, z, step=0)
        z = z + updates
        before, weight = state[0], state[1].weight
        after: Any
        moved, after = tx.update(grads[1], state, z, step=1)
        update, _ = muon.update(grads[1], before, z)
        return moved, update, weight, after[1].weight

    moved, update, weight, after = map(np.asarray, gx.spmd(two_steps, nodes=N)(make_gradients(2)))
    assert np.ptp(weight) > 0.2
    np.testing.assert_array_equal(weight, after)
    singular = np.linalg.svd(update / RATE, compute_uv=False)
    assert 0.6 < singular.min() < singular.max() < 1.3
    steps = np.linalg.svd(moved / RATE, compute_uv=False)
    np.testing.assert_allclose(steps * weight[:, None], singular, rtol=1e-4)
    weighted = np.einsum("n,nij->ij", weight, moved) / N
    np.testing.assert_allclose(weighted, update.mean(axis=0), atol=1e-6)


def test_muloco_is_nesterov_sgd_on_the_average_of_muon():
    """`u <- mu u + eta D; a <- a - mu u - eta D`, after each third local step."""
    muon = promoting(optax.contrib.muon(RATE))
    eta, mu = 0.7, 0.6
    tx = gx.outer(muon, optax.sgd(eta, momentum=mu, nesterov=True), every=3)

    def run(tx):
        def steps(grads):
            def step(carry, g):
                z, state = carry
                updates, state = tx.update(g, state, z)
                return (z + updates, state), (z + updates, updates)

            z = jnp.ones(SHAPE)
            return jax.lax.scan(step, (z, tx.init(z)), grads)[1]

        return map(np.asarray, gx.spmd(steps, nodes=N)(make_gradients(9)))

    _, local = run(muon)  # without decay, Muon's updates do not depend on the model
    models, _ = run(tx)
    anchor, u = np.ones(SHAPE), np.zeros(SHAPE)
    for k in range(2, 9, 3):
        D = -local[:, k - 2 : k + 1].sum(axis=1).mean(axis=0)
        u = mu * u + eta * D
        anchor = anchor - mu * u - eta * D
        np.testing.assert_allclose(models[:, k], np.tile(anchor, (N, 1, 1)), rtol=1e-5, atol=1e-5)
