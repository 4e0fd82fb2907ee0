"""EASGD: the center, its stability and its mass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from modes import MODES, run

import gossipjax as gx

N = 4


@pytest.mark.parametrize("mode", MODES)
def test_every_node_has_the_same_center_from_the_start(mode):
    starts = jnp.asarray(np.random.default_rng(0).normal(size=(N, 3)), jnp.float32)
    center = np.asarray(run(mode, gx.easgd(0.1).init, N)(starts).center)
    np.testing.assert_allclose(center, np.tile(starts.mean(axis=0), (N, 1)), rtol=1e-5)
    assert (center == center[0]).all()


def test_init_outside_of_the_axis_takes_the_parameters_themselves():
    state = gx.easgd(0.1).init(jnp.arange(3.0))
    np.testing.assert_array_equal(state.center, np.arange(3.0))  # pyright: ignore


@pytest.mark.parametrize("alpha", [0.05, 0.2, 0.39])
def test_the_gap_to_the_center_shrinks_as_the_docstring_says(alpha):
    tx = gx.easgd(alpha, period=2)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(N, 3)), jnp.float32)
    state = gx.spmd(tx.init, nodes=N)(x)
    state = state._replace(center=state.center + 1)
    mass = np.asarray(x).sum(axis=0) + np.asarray(state.center[0])
    gap = np.asarray(x.mean(axis=0) - state.center[0])
    for k in range(6):
        step = gx.spmd(lambda x, s, k=k: tx.update(jnp.zeros_like(x), s, x, step=k), nodes=N)
        updates, state = step(x, state)
        x = x + updates
        gap = gap * (1 - alpha * (N + 1) if k % 2 == 0 else 1)
        np.testing.assert_allclose(x.mean(axis=0) - state.center[0], gap, atol=1e-5)
        found, weight = gx.spmd(gx.diagnostics.total_mass, nodes=N)(x, state)
        np.testing.assert_allclose(found[1], mass, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(weight, N)
        average = gx.spmd(gx.average_model, nodes=N)(x, state)
        np.testing.assert_allclose(average[2], x.mean(axis=0), rtol=1e-5, atol=1e-6)


def test_steps_without_an_exchange_have_no_collective():
    tx, x = gx.easgd(0.1, period=3), jnp.ones((8, 5))
    state = gx.spmd(tx.init)(x)
    counts = []
    for k in range(4):
        program = gx.spmd(lambda x, s, k=k: tx.update(x, s, x, step=k))
        counts.append(program.lower(x, state).compile().as_text().count(" all-reduce("))
    assert counts == [1, 0, 0, 1]


@pytest.mark.parametrize(("nodes", "alpha"), [(3, 0.5), (7, 0.25), (1, 1.0)])
def test_unstable(nodes, alpha):
    tx = gx.easgd(alpha)
    with pytest.raises(ValueError, match=rf"unstable over {nodes} nodes: .* = -1 at each"):
        gx.spmd(lambda x: tx.update(x, tx.init(x), x), nodes=nodes)(jnp.ones(nodes))


@pytest.mark.parametrize("alpha", [0, -0.1, float("nan"), float("inf"), "0.1", None])
def test_alphas(alpha):
    with pytest.raises(ValueError, match="alpha of easgd is a number above 0"):
        gx.easgd(alpha)


@pytest.mark.parametrize("period", [0, 1.5])
def test_periods(period):
    with pytest.raises(ValueError, match="period of easgd is a whole number of at least 1"):
        gx.easgd(0.1, period)


def test_an_alpha_of_numpy_does_not_widen():
    tx = gx.easgd(np.float64(0.1), period=1)
    with jax.enable_x64(True):
        state = gx.spmd(tx.init, nodes=2)(jnp.ones((2, 3), jnp.float32))
        _, state = gx.spmd(tx.update, nodes=2)(
            jnp.ones((2, 3), jnp.float32), state, jnp.ones((2, 3), jnp.float32)
        )
        assert state.center.dtype == jnp.float32
