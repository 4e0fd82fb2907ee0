"""States of others are refused; the frame keeps residuals."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from algorithms.rows import NO_VARIANTS, ROWS, WITH_STATE

import gossipjax as gx

N = 4
RING = gx.topology.ring(N)


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
    """Each row of the matrix is given the state of each other one: equal, or a `ValueError`."""
    n = 4
    schedule = gx.topology.from_matrices(oracle.lazy_ring(n))  # that of d2's row
    transforms = {name: ROWS[name].transform(schedule) for name in NO_VARIANTS}
    z = jnp.ones(3)
    states = {name: tx.init(z) for name, tx in transforms.items()}
    results = {}
    for name, tx in transforms.items():
        for other, state in states.items():

            def update(x, tx=tx, state=state):
                return tx.update(x, state, x, step=0)[0]

            try:
                jax.eval_shape(jax.vmap(update, axis_name="nodes"), jnp.ones((n, 3)))
                results[name, other] = "accepted"
            except ValueError as error:
                results[name, other] = str(error)
    accepted = [pair for pair, result in results.items() if result == "accepted"]
    assert accepted == [(name, name) for name in transforms]
    assert all("the state of " in results[pair] for pair in results.keys() - set(accepted))
