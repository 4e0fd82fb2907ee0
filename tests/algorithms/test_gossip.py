"""`gx.gossip`: what a `combine` of one's own is given, and what is noticed of it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from modes import MODES, run

import gossipjax as gx

N = 4
RNG = np.random.default_rng(0)
START = RNG.normal(size=(N, 3))
UPDATES = RNG.normal(size=(3, N, 3))
DIRECTED = gx.topology.from_matrices(oracle.column_stochastic(RNG, N))
RING = gx.topology.ring(N)


def run_steps(tx, mode):
    """The models, and the state, after all updates."""

    def run_node(z, updates):
        state = tx.init(z)
        for step in range(len(UPDATES)):
            change, state = tx.update(updates[step], state, z, step=step)
            z = optax.apply_updates(z, change)
        return z, gx.gossip_state(state)

    with jax.enable_x64(True):
        updates = jnp.asarray(UPDATES.swapaxes(0, 1))
        return jax.tree.map(np.asarray, run(mode, run_node, N)(jnp.asarray(START), updates))


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


def test_the_direction_is_asked_where_a_state_is_made_also_when_traced():
    def climb(x, u, node):
        return node.mix(optax.tree.add(x, u))

    def descend(x, u, node):
        return node.mix(optax.tree.sub(x, u))

    nodes = gx.Nodes(N)
    params = {"w": jnp.zeros((3, 2)), "b": jnp.zeros(2, jnp.bfloat16)}
    nodes.init(gx.gossip(RING, climb), params)
    nodes.init(gx.gossip(RING, descend, takes_gradients=True), params)
    for combine, takes_gradients in ((descend, False), (climb, True)):
        tx = gx.gossip(RING, combine, takes_gradients=takes_gradients)
        with pytest.raises(ValueError, match="combine of gossip must move the model"):
            nodes.init(tx, params)


def test_updates_that_come_later_are_updates():
    def combine(x, u, node):
        return node.mix(optax.tree.add(x, node.kept["last"])), {"last": u}

    z, _ = run_steps(gx.gossip(RING, combine, keeps={"last": "restart"}), "vmap")
    assert np.isfinite(z).all()
