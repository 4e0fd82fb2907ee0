"""Simulated AD-PSGD: the history that it keeps, and the delays that are drawn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gossipjax as gx


@pytest.mark.parametrize("max_delay", [1, 2, 4])
def test_the_history_is_as_long_as_it_must_be(max_delay):
    state = gx.adpsgd(gx.topology.ring(2), max_delay).init({"a": jnp.ones(3, jnp.bfloat16)})
    extra = gx.gossip_state(state).extra  # pyright: ignore[reportOptionalMemberAccess]
    shapes = [] if extra is None else [x.shape for x in jax.tree.leaves(extra["history"].value)]
    assert shapes == ([(max_delay - 1, 3)] if max_delay > 1 else [])


def test_random_delays_have_the_requested_mean():
    delays = gx.random_delays(50, 200, seed=0, mean_delay=1.5, max_delay=100)
    assert delays.shape == (200, 50)
    assert abs(delays.mean() - 1.5) < 0.05
    assert gx.random_delays(50, 200, seed=0, mean_delay=3.0, max_delay=2).max() == 2
    assert not gx.random_delays(2, 3, seed=0, mean_delay=0).any()
    np.testing.assert_array_equal(
        delays, gx.random_delays(50, 200, 0, mean_delay=1.5, max_delay=100)
    )
    assert (delays != gx.random_delays(50, 200, 1, mean_delay=1.5, max_delay=100)).any()
