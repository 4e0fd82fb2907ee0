"""Laws of the methods for uneven data: quadratics with other optima and curvatures on each node."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from modes import run
from promotion import apply_updates, promoting

import gossipjax as gx

N = 6
RATE = 0.2
RNG = np.random.default_rng(0)
CURVATURES = RNG.uniform(0.5, 2.0, N)
TARGETS = RNG.normal(size=N)
OPTIMUM = np.sum(CURVATURES * TARGETS) / np.sum(CURVATURES)
W = oracle.lazy_ring(N)
LAZY_RING = gx.topology.from_matrices(W)
IRREGULAR = gx.topology.from_matrices(oracle.column_stochastic(RNG, N))


def train(tx, steps=600, curvatures=CURVATURES, targets=TARGETS):
    """Every node's model after plain gradients of `a (x - b)^2 / 2`, `[N]`."""

    def train_one(x, a, b):
        def body(carry, _):
            x, state = carry
            updates, state = tx.update(a * (x - b), state, x)
            return (apply_updates(x, updates), state), None

        return jax.lax.scan(body, (x, tx.init(x)), None, steps)[0][0]

    start = jnp.zeros(len(targets))
    a = jnp.asarray(curvatures, jnp.float32)
    b = jnp.asarray(targets, jnp.float32)
    return np.asarray(run("vmap", train_one, len(targets))(start, a, b), np.float64)


@pytest.mark.parametrize(
    "gossip",
    [
        gx.gradient_tracking(LAZY_RING),
        gx.gradient_tracking(IRREGULAR),
        gx.gradient_tracking(gx.topology.directed_ring(N)),
    ],
    ids=["tracking", "push-sum tracking", "directed ring"],
)
def test_corrected_methods_reach_the_optimum(gossip):
    models = train(optax.chain(optax.sgd(0.25 * RATE), gossip), 2000)
    np.testing.assert_allclose(models, OPTIMUM, atol=1e-5)


class TestTheRate:
    X = jnp.asarray(RNG.normal(size=(N, 3)), jnp.float32)

    def take_steps(self, tx, steps=4):
        def run_steps(x):
            state = tx.init(x)
            for k in range(steps):
                updates, state = tx.update(x, state, x, step=k)
                x = x + updates
            return x, state

        return run("vmap", run_steps, N)(self.X)

    def test_injected(self):
        """As programs set it: a traced scalar, as all other numbers are then."""
        injected = promoting(optax.inject_hyperparams(gx.quasi_global)(LAZY_RING, rate=0.1))
        x, state = self.take_steps(injected)
        expected, _ = self.take_steps(gx.quasi_global(LAZY_RING, 0.1))
        np.testing.assert_allclose(x, expected, rtol=1e-5, atol=1e-5)
        gossip = gx.gossip_state(state)
        assert gossip is not None
        assert gossip.schedule == LAZY_RING

    def test_zero_in_a_warm_up_leaves_the_momentum_as_it_is(self):
        warm_up = optax.linear_schedule(0.0, 0.1, 1)
        _, state = self.take_steps(gx.quasi_global(LAZY_RING, warm_up), 1)
        np.testing.assert_array_equal(state.extra["momentum"].value, 0)
        x, state = self.take_steps(gx.quasi_global(LAZY_RING, warm_up), 2)
        assert np.abs(state.extra["momentum"].value).max() > 1e-3
        assert np.isfinite(x).all()
