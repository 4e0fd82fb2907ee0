"""EASGD: the center, its stability, its mass, and which steps exchange."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from modes import run

import gossipjax as gx

N = 4


def center_of(opt_state) -> Any:
    state = gx.gossip_state(opt_state)
    assert state is not None
    assert state.extra is not None
    return state.extra["center"].value


@pytest.mark.parametrize("mode", ["vmap", "shard_map_check_vma"])
def test_every_node_has_the_same_center_from_the_start(mode):
    starts = jnp.asarray(np.random.default_rng(0).normal(size=(N, 3)), jnp.float32)
    center = np.asarray(center_of(run(mode, gx.easgd(0.1).init, N)(starts)))
    np.testing.assert_allclose(center, np.tile(starts.mean(axis=0), (N, 1)), rtol=1e-5)
    assert (center == center[0]).all()


def test_steps_without_an_exchange_have_no_collective():
    tx = gx.easgd(0.1, period=3)
    x = jnp.ones((8, 5))
    state = gx.spmd(tx.init)(x)
    counts = []
    for k in range(4):
        program = gx.spmd(lambda x, s, k=k: tx.update(x, s, x, step=k))
        counts.append(program.lower(x, state).compile().as_text().count(" all-reduce("))
    assert counts == [1, 0, 0, 1]


@pytest.mark.parametrize("static", [True, False], ids=["static", "traced"])
def test_statistics_are_averaged_when_the_models_are(static):
    tx = gx.easgd(0.1, period=2)
    argnums: Any = {"static_argnums": 1} if static else {"shared_argnums": 1}
    program = gx.spmd(lambda s, k: gx.mix_batch_stats(s, tx.init(s), k), nodes=N, **argnums)
    stats = {"mean": jnp.asarray(np.random.default_rng(0).normal(size=(N, 3)), jnp.float32)}
    for k in range(4):
        mixed = program(stats, k if static else jnp.int32(k))["mean"]
        mean = np.tile(stats["mean"].mean(axis=0), (N, 1))
        np.testing.assert_allclose(mixed, stats["mean"] if k % 2 else mean, rtol=1e-5, atol=1e-6)
