"""`gx.gossip`: what a `combine` of one's own is given, and what is noticed of it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from algorithms.problems import run_history
from modes import MODES

import gossipjax as gx

N = 4
RNG = np.random.default_rng(0)
START = RNG.normal(size=(N, 3))
UPDATES = RNG.normal(size=(3, N, 3))
DIRECTED = gx.topology.from_matrices(oracle.column_stochastic(RNG, N))
RING = gx.topology.ring(N)


def run_steps(tx, mode):
    """The models, and the state, after all updates."""

    with jax.enable_x64(True):
        args = jnp.asarray(START), jnp.asarray(UPDATES.swapaxes(0, 1))
        _, models, states, _, _ = run_history(mode, tx, "traced", *args)
    return models[:, -1], jax.tree.map(lambda x: x[:, -1], gx.gossip_state(states))


@pytest.mark.parametrize("mode", MODES)
def test_what_is_averaged_beside_numerators_equals_the_oracle(mode):
    """`P x` and `P (w m) / (P w)`: a constant stays one, whatever the weights."""

    def combine(x, u, node):
        m = optax.tree.add(optax.tree.scale(0.9, node.kept["m"]), u)
        pull = jax.tree.map(lambda m: node.weight * m, m)
        beside = m, node.kept["one"]
        x, (m, one) = node.mix(optax.tree.add(x, pull), averages=beside)
        return x, {"m": m, "one": one, "last": jnp.full((), node.step, jnp.float32)}

    keeps = {
        "m": "average",
        "one": ("average", jnp.ones_like),
        "last": ("restart", lambda params: jnp.full((), -1, jnp.float32)),
    }
    z, state = run_steps(gx.gossip(DIRECTED, combine, keeps=keeps), mode)
    x, w, m = START, np.ones((N, 1)), np.zeros_like(START)
    matrices = DIRECTED.matrices()
    for step, u in enumerate(UPDATES):
        matrix = matrices[step % len(matrices)]
        m = 0.9 * m + u
        x, m, w = matrix @ (x + w * m), matrix @ (w * m) / (matrix @ w), matrix @ w
    np.testing.assert_allclose(z, x / w, rtol=1e-12)
    np.testing.assert_allclose(state.kept("m"), m, rtol=1e-12)
    np.testing.assert_allclose(state.kept("one"), 1, rtol=1e-12)
    assert (state.kept("last") == len(UPDATES) - 1).all()


@pytest.mark.parametrize("mode", ["vmap", "shard_map"])
@pytest.mark.parametrize("schedule", [RING, DIRECTED], ids=["ring", "directed"])
def test_several_exchanges_in_a_step(schedule, mode):
    """Two rounds one after another; on a ring, Chebyshev's combination of them."""

    def combine(x, u, node):
        once = node.mix(optax.tree.add(x, u))
        twice = node.mix(once)
        if not schedule.is_doubly_stochastic:
            return twice
        return jax.tree.map(lambda a, b: 1.2 * a - 0.2 * b, twice, once)

    z, _ = run_steps(gx.gossip(schedule, combine), mode)
    x, w = START, np.ones((N, 1))
    matrices = schedule.matrices()
    for step, u in enumerate(UPDATES):
        matrix = matrices[step % len(matrices)]
        once = matrix @ (x + u)
        x = matrix @ once
        if schedule.is_doubly_stochastic:
            x = 1.2 * x - 0.2 * once
        else:
            w = matrix @ matrix @ w
    np.testing.assert_allclose(z, x / w, rtol=1e-12)
