"""What `init` and `update` are given: parameters, states of others, and rates."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from algorithms.rows import NO_VARIANTS, ROWS, WITH_STATE
from modes import run
from promotion import promoting

import gossipjax as gx

N = 4
RING = gx.topology.ring(N)
LAZY_RING = gx.topology.from_matrices(oracle.lazy_ring(N))


def update_with(tx, state_params, params, updates):
    """`tx.update` with the state of other parameters."""
    state = gx.spmd(tx.init, nodes=N)(state_params)
    return gx.spmd(tx.update, nodes=N)(updates, state, params)


def make_tree(**shapes):
    return {name: jnp.ones((N, *shape)) for name, shape in shapes.items()}


@pytest.mark.parametrize("name", ["sgp", "osgp 2", "dpsgd", "easgd"])
def test_a_state_of_parameters_of_another_type(name):
    """Without residuals, each step would lose what rounding leaves over."""
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), make_tree(a=(3,)))
    tx = ROWS[name].transform(RING)
    with pytest.raises(ValueError, match=r"residual float32 \[3\], got None"):
        update_with(tx, make_tree(a=(3,)), params, params)


@pytest.mark.parametrize("name", WITH_STATE)
def test_init_of_shapes(name):
    """As `init` of optax's own transforms takes them."""
    tx = ROWS[name].transform(RING)
    params = {"a": jnp.zeros(3), "b": jnp.zeros((2, 2), jnp.bfloat16)}
    from_shapes = tx.init(jax.eval_shape(lambda: params))
    jax.tree.map(np.testing.assert_array_equal, from_shapes, tx.init(params))


def test_the_state_of_every_other_algorithm_is_refused_by_name():
    """Each row of the matrix is given the state of each row after it."""
    transforms = {name: ROWS[name].transform(LAZY_RING) for name in NO_VARIANTS}
    states = {name: tx.init(jnp.ones(3)) for name, tx in transforms.items()}
    for name, other in itertools.combinations(NO_VARIANTS, 2):

        def update(x, tx=transforms[name], state=states[other]):
            return tx.update(x, state, x, step=0)[0]

        with pytest.raises(ValueError, match="the state of "):
            jax.eval_shape(jax.vmap(update, axis_name="nodes"), jnp.ones((N, 3)))


class TestTheRate:
    def take_steps(self, tx, steps):
        def run_steps(x):
            state = tx.init(x)
            for k in range(steps):
                updates, state = tx.update(x, state, x, step=k)
                x = x + updates
            return x, state

        x = jnp.asarray(np.random.default_rng(0).normal(size=(N, 3)), jnp.float32)
        return run("vmap", run_steps, N)(x)

    def test_injected(self):
        """As programs set it: a traced scalar, as all other numbers are then."""
        injected = promoting(optax.inject_hyperparams(gx.quasi_global)(LAZY_RING, rate=0.1))
        x, state = self.take_steps(injected, 2)
        expected, _ = self.take_steps(gx.quasi_global(LAZY_RING, 0.1), 2)
        np.testing.assert_allclose(x, expected, rtol=1e-5, atol=1e-5)
        gossip = gx.gossip_state(state)
        assert gossip is not None
        assert gossip.schedule == LAZY_RING

    def test_zero_in_a_warm_up_leaves_the_momentum_as_it_is(self):
        warm_up = optax.linear_schedule(0.0, 0.1, 1)
        momenta = []
        for steps in (1, 2):
            x, state = self.take_steps(gx.quasi_global(LAZY_RING, warm_up), steps)
            assert np.isfinite(x).all()
            momenta.append(np.abs(state.extra["momentum"].value).max())
        assert momenta[0] == 0 < 1e-3 < momenta[1]
