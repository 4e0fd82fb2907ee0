"""Values that a narrow type cannot hold: non-finite ones are seen, finite ones are not lost."""

import jax.numpy as jnp
import numpy as np
import pytest
from modes import run

import gossipjax as gx

NARROW = ["bfloat16", "float16"]
RELATIVE_ERROR = {"bfloat16": 2**-8, "float16": 2**-11}
ONE_PEER = gx.topology.one_peer_exponential(4)
COMPLETE = gx.topology.complete(4)


def average(mode, g, wire):
    tx = gx.allreduce(wire=wire)
    return np.asarray(run(mode, lambda g: tx.update(g, tx.init(g))[0], len(g))(g))


def mix(mode, x, schedule, step, wire):
    def once(x, w):
        return gx.mix(x, w, schedule, step, wire=wire)

    return run(mode, once, len(x))(x, jnp.ones(len(x)))


@pytest.mark.parametrize(
    ("mode", "value"),
    [("shard_map_check_vma", np.inf), ("vmap", -np.inf), ("vmap", np.nan)],
)
@pytest.mark.parametrize("wire", NARROW)
def test_allreduce_keeps_what_is_not_finite(mode, wire, value):
    g = jnp.asarray(np.random.default_rng(0).normal(size=(4, 33)), jnp.float32).at[2, 5].set(value)
    averaged = average(mode, g, wire)
    np.testing.assert_array_equal(averaged[:, 5], np.full(4, value))
    finite = np.delete(averaged, 5, axis=1)
    np.testing.assert_allclose(
        finite, np.delete(g.mean(axis=0)[None].repeat(4, 0), 5, 1), atol=0.02
    )


@pytest.mark.parametrize("wire", NARROW)
def test_allreduce_of_any_size_of_values(wire):
    tx = gx.allreduce(wire=wire)
    average = run("vmap", lambda g: tx.update(g, tx.init(g))[0], 4)
    for size in (1e-30, 1e-7, 1.0, 1e6, 1e30):
        g = size * np.random.default_rng(0).normal(size=(4, 33)).astype(np.float32)
        error = np.abs(np.asarray(average(g)) - g.mean(axis=0))
        assert error.max() <= 2 * RELATIVE_ERROR[wire] * np.abs(g).max(), size


@pytest.mark.parametrize("wire", NARROW)
@pytest.mark.parametrize("schedule", [ONE_PEER, COMPLETE], ids=["one peer", "complete"])
def test_gossip_delivers_what_is_not_finite(wire, schedule):
    x = jnp.ones((4, 33)).at[2, 5].set(jnp.inf)
    mixed, weight = mix("vmap", x, schedule, 0, wire)
    full, _ = mix("vmap", x, schedule, 0, None)
    np.testing.assert_array_equal(np.isfinite(mixed), np.isfinite(full))
    np.testing.assert_allclose(weight, 1, rtol=1e-6)


@pytest.mark.parametrize("wire", NARROW)
@pytest.mark.parametrize("schedule", [ONE_PEER, COMPLETE], ids=["one peer", "complete"])
def test_nodes_that_agree_on_any_value_still_do(wire, schedule):
    """A clipped numerator with its whole weight would pull their estimates apart."""

    def mix_twice(x):
        z, weight = x, jnp.ones(())
        for step in range(2):
            z, weight = gx.mix(z, weight, schedule, step, wire=wire)
        return z, weight

    program = run("vmap", mix_twice, 4)
    for size in (1e-30, 1e-7, 1e6, 1e30):
        x = size * (1 + np.random.default_rng(0).random(33, np.float32))
        z, weights = map(np.asarray, program(np.tile(x, (4, 1))))
        error = np.abs(z / weights[:, None] - x).max() / size
        assert error <= 8 * RELATIVE_ERROR[wire], size
        np.testing.assert_allclose(z.sum(axis=0), 4 * x, rtol=1e-6)
