"""Gossip last in a user's chain: each against a float64 oracle of the whole chain."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from promotion import promoting

import gossipjax as gx

N = 4
D = 6
STEPS = 9
RNG = np.random.default_rng(3)
START = RNG.normal(size=(N, D))
TARGETS = RNG.normal(size=(N, D))
SCALES = np.linspace(0.5, 3, D)
SCHEDULE = gx.topology.from_matrices(oracle.column_stochastic(RNG, N))


def expected_gradient(z, k=0):
    return (z - TARGETS) * SCALES


def make_params() -> Any:
    return {
        "a": jnp.asarray(START[:, :4], jnp.float32),
        "b": jnp.asarray(START[:, 4:], jnp.float32),
    }


def gradients(z, target):
    scales = jnp.asarray(SCALES, jnp.float32)
    return {"a": (z["a"] - target[:4]) * scales[:4], "b": (z["b"] - target[4:]) * scales[4:]}


def compare_with_the_oracle(tx, optimizer, steps=STEPS, schedule=SCHEDULE):
    """Trains with `tx` and with the oracle, and compares z after every step."""

    def step(z: Any, state, target) -> Any:
        updates, state = tx.update(gradients(z, target), state, z)
        return optax.apply_updates(z, updates), state

    program = gx.spmd(step, nodes=N)
    z = make_params()
    targets = jnp.asarray(TARGETS, jnp.float32)
    state = gx.spmd(tx.init, nodes=N)(z)
    expected = oracle.train_sgp(schedule.matrices(), START, expected_gradient, optimizer, steps)
    for k, (expected_z, _) in enumerate(expected):
        z, state = program(z, state, targets)
        np.testing.assert_allclose(
            np.concatenate([z["a"], z["b"]], axis=1),
            expected_z,
            rtol=1e-4,
            atol=1e-5,
            err_msg=f"step {k}",
        )
    return state


CHAINS = {
    "sgd with decay on z": (
        optax.chain(optax.add_decayed_weights(0.3), optax.sgd(0.1, 0.9)),
        oracle.sgd(0.1, 0.9, decay=0.3),
    ),
    "adamw": (optax.adamw(0.05, weight_decay=0.2), oracle.adamw(0.05, decay=0.2)),
    "multi_transform": (
        optax.multi_transform({"x": optax.sgd(0.1), "y": optax.sgd(0.1)}, {"a": "x", "b": "y"}),
        oracle.sgd(0.1),
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_in_a_chain(name):
    inner, optimizer = CHAINS[name]
    state = compare_with_the_oracle(optax.chain(promoting(inner), gx.sgp(SCHEDULE)), optimizer)
    gossip = gx.gossip_state(state)
    assert gossip is not None
    # Once per update, whatever the parameter groups.
    np.testing.assert_array_equal(gossip.count, np.full(N, STEPS))


def test_multi_steps_inside_the_chain():
    every = 4
    local = SCHEDULE.every(every, phase=every - 1)
    inner = optax.MultiSteps(optax.sgd(0.1, 0.9), every).gradient_transformation()
    tx = optax.chain(promoting(inner), gx.sgp(local))
    optimizer = oracle.accumulated(every, oracle.sgd(0.1, 0.9))
    compare_with_the_oracle(tx, optimizer, steps=3 * every, schedule=local)
