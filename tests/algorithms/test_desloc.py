"""DES-LOC: which moments it finds, when they are averaged, and Local Adam as a special case."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from algorithms.problems import train
from modes import make_mesh
from promotion import promoting

import gossipjax as gx

N = 4
PARAMS = {"w": jnp.ones((3, 4)), "b": jnp.zeros(4)}
CHAINS = {
    "adamw, clipped": lambda: optax.chain(optax.clip(0.1), optax.adamw(0.1)),
    "nadam": lambda: optax.nadam(0.1),
    "lamb": lambda: optax.lamb(0.1),
    "masked": lambda: optax.masked(optax.adam(0.1), {"w": True, "b": False}),
    "hyperparameters": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
    "muon": lambda: optax.contrib.muon(0.1),
}


def find_moments(state, field):
    """By the names of the leaves, `[N, ...]`."""
    paths = jax.tree_util.tree_leaves_with_path(state)
    return [leaf for path, leaf in paths if f".{field}" in jax.tree_util.keystr(path)]


def spread(leaves):
    return max(float(np.ptp(np.asarray(leaf), axis=0).max()) for leaf in leaves)


@pytest.mark.parametrize("name", CHAINS)
def test_moments_are_found_in_any_chain(name):
    """And averaged in their turns, before the update; the mean over the nodes stays."""
    tx = gx.contrib.desloc(promoting(CHAINS[name]()), every=1, mu_every=2, nu_every=3)
    nodes = gx.Nodes(N)
    rng = np.random.default_rng(0)
    grads = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=(N, *x.shape)), x.dtype), PARAMS)
    params, state = nodes.init(tx, PARAMS)

    def average(grads, state, params, step):
        """The moments after an update of zeros, which only lets them decay."""
        zeros = jax.tree.map(jnp.zeros_like, grads)
        return tx.update(zeros, state, params, step=step)[1]

    update = nodes.spmd(lambda g, s, z: tx.update(g, s, z, step=1)[1])
    state = update(grads, state, params)
    assert min(spread(find_moments(state, field)) for field in ("mu", "nu")) > 5e-6
    means = {f: [np.mean(x, axis=0) for x in find_moments(state, f)] for f in ("mu", "nu")}
    for step, equal in ((2, {"mu"}), (3, {"nu"}), (5, set()), (6, {"mu", "nu"})):
        after = nodes.spmd(average, static_argnums=3)(grads, state, params, step)
        for field in ("mu", "nu"):
            moments = find_moments(after, field)
            assert (spread(moments) < 1e-7) == (field in equal), (step, field)
            for leaf, mean in zip(moments, means[field], strict=True):
                decayed = np.mean(leaf, axis=0)
                scale = np.linalg.norm(decayed) / np.linalg.norm(mean)
                np.testing.assert_allclose(decayed, scale * mean, rtol=1e-4, atol=1e-7)


def test_all_at_every_step_is_local_adam_with_everything_averaged():
    """Of quadratics from equal starts: the moments are those of all nodes' gradients."""
    adam = promoting(optax.adam(0.05, b1=0.8))
    by_desloc = train(gx.contrib.desloc(adam, 1, 1, 1), N, "vmap")
    targets = np.random.default_rng(0).normal(size=(N, 4))
    z = np.tile(np.random.default_rng(0).normal(size=(N + 1, 4))[-1:], (N, 1))
    m, v = np.zeros(4), np.zeros(4)
    for k in range(6):
        g = (z - targets) * np.arange(1.0, 5.0)
        each_m, each_v = 0.8 * m + 0.2 * g, 0.999 * v + 0.001 * g**2
        root = np.sqrt(each_v / (1 - 0.999 ** (k + 1))) + 1e-8
        z = z.mean(axis=0) - 0.05 * each_m / (1 - 0.8 ** (k + 1)) / root
        m, v = each_m.mean(axis=0), each_v.mean(axis=0)
        np.testing.assert_allclose(by_desloc[k], z, rtol=1e-5, atol=1e-5)


def test_canonical_steps_tell_apart_what_is_averaged():
    plan = gx.contrib.desloc(optax.adam(0.1), 4, 12, 24).init(PARAMS)
    assert gx.canonical_steps(plan) == [0, 1, 4, 12]
    assert [gx.canonical_step(plan, k) for k in (24, 36, 10**6, 10**6 + 1)] == [0, 12, 4, 1]
    rounds = gx.topology.one_peer_exponential(8)  # none, and 3 rounds of one, two, three
    plan = gx.contrib.desloc(optax.adam(0.1), 2, 4, 8, rounds).init(PARAMS)
    assert len(gx.canonical_steps(plan)) == 1 + 3 * 3
    assert gx.canonical_step(plan, 24) == 0
    long = gx.contrib.desloc(optax.adam(0.1), 251, 257, 263).init(PARAMS)
    assert gx.canonical_step(long, 10**6) == 10**6


@pytest.mark.parametrize(("step", "messages"), [(0, 3), (1, 0), (2, 1), (6, 2), (12, 3)])
def test_one_all_reduce_for_each_whose_turn_it_is(step, messages):
    tx = gx.contrib.desloc(promoting(optax.adam(0.1)), 2, 6, 12)
    nodes = gx.Nodes(mesh=make_mesh(N))
    params, state = nodes.init(tx, PARAMS)
    program = nodes.spmd(lambda z, s: tx.update(z, s, z, step=step))
    text = program.lower(params, state).as_text()
    assert text.count("stablehlo.all_reduce") == messages
