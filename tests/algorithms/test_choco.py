"""CHOCO: consensus that no rounding stops, beside the floors of the others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gossipjax as gx

N = 8
D = 512
RING = gx.topology.ring(N)
GAMMA = {
    gx.wire.int4(): 0.5,
    gx.wire.top_k(0.1): 0.2,
    gx.wire.random_k(0.1): 0.1,
    gx.wire.block_top_k(16, block=128): 0.2,
}


def relative_distances(tx, steps):
    """The largest consensus distance over the norm of the mean model, after gossip alone.

    After so many steps, and after twice as many.
    """
    x = jnp.asarray(np.random.default_rng(0).normal(size=(N, D)) + 1, jnp.float32)

    def gossip(x):
        def body(k, carry):
            x, state = carry
            updates, state = tx.update(jnp.zeros_like(x), state, x, step=k)
            return x + updates, state

        def go_on(carry, start):
            carry = jax.lax.fori_loop(start, start + steps, body, carry)
            return carry, gx.diagnostics.consensus_distance(carry[0])

        (x, _), distances = jax.lax.scan(go_on, (x, tx.init(x)), jnp.array([0, steps]))
        return x, distances

    mixed, distances = jax.jit(jax.vmap(gossip, axis_name="nodes"))(x)
    np.testing.assert_allclose(mixed.mean(axis=0), x.mean(axis=0), atol=5e-5)
    return np.max(distances, axis=0) / np.linalg.norm(x.mean(axis=0))


@pytest.mark.parametrize("codec", GAMMA, ids=str)
def test_any_codec_reaches_consensus(codec):
    steps = 1500 if codec.is_sparse else 300  # with some to spare
    assert relative_distances(gx.choco(RING, codec, GAMMA[codec]), steps // 2)[1] < 1e-5


def test_a_step_that_is_too_large_is_refused():
    codec = gx.wire.random_k(0.1)
    with pytest.raises(ValueError, match=r"strength of choco must be small enough for random_k"):
        gx.Nodes(N).init(gx.choco(RING, codec, 1.0), jnp.zeros(200))
    gx.Nodes(N).init(gx.choco(RING, codec, 0.1), jnp.zeros(200))


@pytest.mark.parametrize(
    ("codec", "floor"), [(gx.wire.bfloat16(), 1.5e-3), (gx.wire.int4(), 0.09)], ids=str
)
def test_whole_models_end_at_the_floor_of_their_rounding(codec, floor):
    """As the docstring of `gx.wire` says, within a factor of two; more steps do not help."""
    for distance in relative_distances(gx.sgp(RING, wire=codec), 300):
        assert floor / 2 < distance < 2 * floor


def test_local_steps_between_the_exchanges():
    """A round of no exchange is one step of the inner optimizer, and does not gossip."""
    tx = gx.choco(RING.every(2), gx.wire.top_k(0.5), 0.4)
    x = jnp.arange(16.0).reshape(N, 2)
    state = gx.spmd(tx.init, nodes=N)(x)
    program = gx.spmd(lambda x, s, k: tx.update(0 * x, s, x, step=k), nodes=N, static_argnums=2)
    assert gx.canonical_steps(state) == [0, 1]
    moved = [float(jnp.abs(program(x, state, k)[0]).max()) > 0 for k in (0, 1)]
    assert sorted(moved) == [False, True]
