"""AllReduce of gradients: its types, and what it refuses."""

import jax.numpy as jnp
import numpy as np
import pytest
from modes import run

import gossipjax as gx


@pytest.mark.parametrize("mode", ["vmap", "shard_map_check_vma"])
def test_low_precision_gradients_are_summed_in_float32_and_keep_their_type(mode):
    """256 + 1 is 256 in bfloat16: summed there, seven nodes would not count."""
    gradients = {"a": jnp.asarray([256.0] + [1.0] * 7, jnp.bfloat16), "b": jnp.ones((8, 2))}
    tx = gx.allreduce()
    averaged = run(mode, lambda g: tx.update(g, tx.init(g))[0], 8)(gradients)
    assert averaged["a"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(averaged["a"], jnp.full(8, 263 / 8, jnp.bfloat16))
    np.testing.assert_array_equal(averaged["b"], np.ones((8, 2)))


@pytest.mark.parametrize("mode", ["vmap", "shard_map_check_vma"])
def test_gradients_that_are_constants(mode):
    """Under vmap they have no axis of nodes, of which JAX makes another shape in an exchange."""
    tx = gx.allreduce(wire=jnp.bfloat16)

    def averaged(x):
        g = jnp.zeros_like(x) + jnp.arange(33.0)
        return tx.update(g, tx.init(g))[0]

    actual = run(mode, averaged, 4)(jnp.ones((4, 1)) * jnp.ones((1, 33)))
    np.testing.assert_array_equal(actual, np.tile(np.arange(33.0), (4, 1)))
