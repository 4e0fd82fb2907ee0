"""SPARTA: every value in its turn, nothing else, and only the slice in a message."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from modes import make_mesh

import gossipjax as gx
from gossipjax.contrib.sparta import draw_slice

N = 4
SHAPES = {"a": (7, 5), "b": (3,), "c": ()}
STEPS = 24


def run_zeros(fraction, seed=0, tx=None):
    """The models after every update of zeros, `[N, 1 + S, D]`."""
    rng = np.random.default_rng(0)
    start = {k: jnp.asarray(rng.normal(size=(N, *s)), jnp.float32) for k, s in SHAPES.items()}
    tx = gx.contrib.sparta(fraction, seed) if tx is None else tx

    def run(z):
        def step(carry, k):
            z, state = carry
            zeros = jax.tree.map(jnp.zeros_like, z)
            updates, state = tx.update(zeros, state, z, step=0)
            z = optax.apply_updates(z, updates)
            return (z, state), z

        return jax.lax.scan(step, (z, tx.init(z)), jnp.arange(STEPS))[1]

    history = gx.spmd(run, nodes=N)(start)
    trees = [jax.tree.map(lambda x, y: jnp.concatenate([x[:, None], y], axis=1), start, history)]
    return np.concatenate([np.reshape(x, (N, 1 + STEPS, -1)) for x in trees[0].values()], axis=-1)


@pytest.mark.parametrize(("fraction", "period"), [(1.0, 1), (0.3, 4), (0.1, 10)])
def test_every_value_is_averaged_once_in_each_period(fraction, period):
    """Of updates, also where a loop gives each the number of a canonical step, 0."""
    models = run_zeros(fraction)
    mean = models[:, 0].mean(axis=0)
    np.testing.assert_allclose(models.mean(axis=0), np.tile(mean, (1 + STEPS, 1)), atol=1e-6)
    is_mean = np.abs(models - mean).max(axis=0) < 1e-6
    first = is_mean.argmax(axis=0)  # the number of updates after which it is averaged
    assert (is_mean[-1] & (first >= 1) & (first <= period)).all()
    # What is not averaged does not move, to the bit; so nothing is averaged before its turn.
    for step in range(1, period + 1):
        later = first > step
        np.testing.assert_array_equal(models[:, step, later], models[:, 0, later])
    share = (first == 1).mean()
    assert abs(share - 1 / period) <= 0.1 if period > 1 else share == 1


def test_slices_differ_by_period_leaf_and_seed():
    def draw(seed=0, leaf=0, count=0):
        return draw_slice(1000, 10, seed, leaf, jnp.int32(count))

    slices = [np.asarray(draw(count=k)) for k in range(20)]
    assert sorted(np.concatenate(slices[:10])) == list(range(1000))
    assert sorted(np.concatenate(slices[10:])) == list(range(1000))
    for other in (slices[10], draw(seed=1), draw(leaf=1)):
        shared = set(slices[0].tolist()) & set(np.asarray(other).tolist())
        assert len(shared) < 30  # of 100, 10 by chance
    assert np.abs(np.bincount(slices[0] % 10, minlength=10) - 10).max() < 12  # uniform in a group


def test_only_the_slice_travels():
    tx = gx.contrib.sparta(0.1)
    nodes = gx.Nodes(mesh=make_mesh(N))
    params, state = nodes.init(tx, {"a": jnp.ones(995), "b": jnp.ones(20)})
    text = nodes.spmd(lambda z, s: tx.update(z, s, z)).lower(params, state).compile().as_text()
    assert re.findall(r" = (\S+)\{0\} all-reduce\(", text) == [f"f32[{100 + 2}]"]


def test_inside_an_outer_optimizer():
    """The outer steps reach all of the model, and the slices in between come on."""
    inner = optax.chain(optax.sgd(0.1), gx.contrib.sparta(0.25))
    models = run_zeros(0.25, tx=gx.outer(inner, optax.sgd(1.0), 1000))
    alone = run_zeros(0.25)
    np.testing.assert_allclose(models[:, 1:], alone[:, 1:], atol=1e-6)
    whole = run_zeros(0.01, tx=gx.outer(gx.contrib.sparta(0.01), optax.sgd(1.0), 1))
    np.testing.assert_allclose(np.ptp(whole[:, 1], axis=0), 0, atol=1e-6)
