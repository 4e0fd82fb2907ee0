"""Outer steps by messages that leave values out: SparseLoCo, against the dense oracle."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from algorithms.problems import run_history
from modes import SERVERS

import gossipjax as gx
from gossipjax.algorithms.steps import outer_state

N = 4
D = 40
EVERY = 2
RATE = 0.7
KEEP = 0.9
BLOCK_TOP_K = gx.wire.block_top_k(6, block=20)
COMPRESS = {
    BLOCK_TOP_K: partial(oracle.block_top_k, count=6, block=20),
    gx.wire.top_k(0.2): partial(oracle.largest, count=8),
}


def make_outer(codec=BLOCK_TOP_K, **options):
    return gx.outer(
        optax.identity(),
        optax.sgd(RATE),
        EVERY,
        **{"wire": codec, "error_feedback": KEEP, **options},
    )


def make_data(steps=8):
    rng = np.random.default_rng(0)
    start = np.tile(rng.normal(size=D), (N, 1)).astype(np.float32).astype(np.float64)
    return start, rng.normal(size=(steps, N, D)).astype(np.float32).astype(np.float64)


def run_outer(tx, mode, style, start, updates):
    inputs = jnp.asarray(updates.swapaxes(0, 1), jnp.float32)
    _, models, states, _, _ = run_history(mode, tx, style, jnp.asarray(start, jnp.float32), inputs)
    return np.asarray(models, np.float64), outer_state(states)


@pytest.mark.parametrize(
    ("codec", "mean_over", "mode", "style"),
    [
        (BLOCK_TOP_K, "nodes", "vmap", "traced"),
        (BLOCK_TOP_K, "senders", "shard_map_check_vma", "traced"),
        (gx.wire.top_k(0.2), "senders", "vmap", "counted"),
        (BLOCK_TOP_K, "nodes", SERVERS, "traced"),  # each device has the blocks of its half
    ],
    ids=str,
)
def test_equals_the_oracle_step_by_step(codec, mean_over, mode, style):
    start, updates = make_data()
    options = {"local_axis_name": "local"} if mode == SERVERS else {}
    tx = make_outer(codec, mean_over=mean_over, **options)
    models, states = run_outer(tx, mode, style, start, updates)
    assert states is not None
    expected = oracle.outer_with_feedback(
        start, updates, RATE, EVERY, KEEP, COMPRESS[codec], mean_over
    )
    for k, (x, anchor, error) in enumerate(expected):
        np.testing.assert_allclose(models[:, k], x, rtol=1e-5, atol=1e-5, err_msg=f"step {k}")
        np.testing.assert_allclose(states.anchor[0][:, k], np.tile(anchor, (N, 1)), atol=1e-5)
        np.testing.assert_allclose(states.error[0][:, k], error, rtol=1e-5, atol=1e-5)
    assert np.abs(states.error[0]).max() > 1
    anchors = np.asarray(states.anchor[0])
    np.testing.assert_array_equal(anchors, np.tile(anchors[:1], (N, 1, 1)))


def test_by_fragments_it_is_that_of_each_part():
    """The leaves are of blocks of their own, so that two fragments have the messages of one."""
    start, updates = make_data()
    halves = {"a": start[:, :20], "b": start[:, 20:40]}
    inputs = {"a": updates[..., :20].swapaxes(0, 1), "b": updates[..., 20:40].swapaxes(0, 1)}
    to_jax = partial(jax.tree.map, lambda x: jnp.asarray(x, jnp.float32))
    tx = make_outer(fragments=2, mix=0.25)
    result = run_history("vmap", tx, "traced", to_jax(halves), to_jax(inputs))
    states = outer_state(result[2])
    assert states is not None
    # The second is sent at the steps of a whole model; the local models do not follow fully.
    x, anchor, error = start[:, 20:40], start[0, 20:40], np.zeros((N, 20))
    for k, u in enumerate(updates[..., 20:40]):
        x = x + u
        if k % EVERY == EVERY - 1:
            error = KEEP * error + anchor - x
            sent = np.stack([COMPRESS[BLOCK_TOP_K](e) for e in error])
            error = error - sent
            anchor = anchor - RATE * sent.mean(axis=0)
            x = 0.25 * x + 0.75 * anchor
        np.testing.assert_allclose(result[1]["b"][:, k], x, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(states.error[1]["b"][:, k], error, rtol=1e-5, atol=1e-5)
