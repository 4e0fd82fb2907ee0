"""Statistics of normalization layers: mixed with the parameters, or averaged."""

import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from modes import MODES, run

import gossipjax as gx

N = 4


@pytest.mark.parametrize("mode", MODES)
def test_mixed_as_the_parameters_are(mode):
    """Statistics that start as the parameters do and change as they do stay equal to them."""
    rng = np.random.default_rng(0)
    schedule = gx.topology.from_matrices(oracle.column_stochastic(rng, N))
    tx = optax.chain(optax.identity(), gx.sgp(schedule))
    start = jnp.asarray(rng.normal(size=(N, 3)), jnp.float32)

    def steps(z):
        state, statistics, seen = tx.init(z), {"mean": z.astype(jnp.float32)}, []
        for k in range(5):
            statistics = gx.mix_statistics(statistics, state, schedule, k)
            updates, state = tx.update(jnp.zeros_like(z), state, z, step=k)
            z = z + updates
            seen.append((z, statistics["mean"]))
        return seen

    seen = run(mode, steps, N)(start)
    for z, mean in seen:
        np.testing.assert_allclose(mean, z, rtol=1e-4, atol=1e-5)
    moved = np.asarray(seen[-1][0]).mean(axis=0) - start.mean(axis=0)
    assert np.abs(moved).max() > 1e-3, "weights other than 1"


@pytest.mark.parametrize("mode", MODES)
def test_averaged(mode):
    values = jnp.asarray(np.random.default_rng(0).normal(size=(N, 3)), jnp.bfloat16)
    averaged = run(mode, gx.average_statistics, N)({"var": values})["var"]
    assert averaged.dtype == jnp.bfloat16
    expected = np.asarray(values, np.float32).mean(axis=0)
    np.testing.assert_allclose(averaged.astype(jnp.float32)[2], expected, rtol=2**-7)


def test_integers_are_refused():
    for measure in (
        gx.average_statistics,
        lambda s: gx.mix_statistics(s, (), gx.topology.ring(2), 0),
    ):
        with pytest.raises(ValueError, match=r"statistics\['count'\] is int32"):
            gx.spmd(lambda n, m=measure: m({"count": n}), nodes=2)(jnp.arange(2))
