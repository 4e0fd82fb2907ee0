"""Outer steps by messages that leave values out: SparseLoCo, against the dense oracle."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from algorithms.problems import run_history, weigh_nodes
from modes import SERVERS

import gossipjax as gx
from gossipjax.exchanges.chain import find_exchange

N = 4
D = 40
EVERY = 2
RATE = 0.7
KEEP = 0.9
TOKENS = np.random.default_rng(1).uniform(1, 9, (8, N))
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
    return np.asarray(models, np.float64), find_exchange(states)


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


FRAGMENTS = {  # the two layers of both leaves, or the leaves: messages of one block each
    gx.layer_fragments(2, 0): np.split(np.arange(D).reshape(2, 2, 10), 2, axis=1),
    2: np.split(np.arange(D), 2),
}


@pytest.mark.parametrize(
    ("fragments", "weights"), [*zip(FRAGMENTS, ("counted", None), strict=True)], ids=str
)
def test_fragments_equal_the_oracle_step_by_step(fragments, weights):
    start, updates = make_data()

    def to_tree(flat):
        parts = jnp.asarray(flat).reshape(*flat.shape[:-1], 2, 2, 10)
        return {"a": parts[..., 0, :, :], "b": parts[..., 1, :, :]}

    def flatten(tree):
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
        return np.concatenate([x.reshape(*x.shape[:2], -1) for x in leaves], axis=-1)

    with jax.enable_x64(True):
        tx = weigh_nodes(make_outer(fragments=fragments, strength=0.75, weights=weights), TOKENS)
        args = to_tree(start), to_tree(updates.swapaxes(0, 1))
        _, models, states, _, _ = run_history("vmap", tx, "traced", *args)
    state = find_exchange(states)
    assert state is not None
    parts = [part.ravel() for part in FRAGMENTS[fragments]]
    expected = oracle.outer_with_feedback(
        start,
        updates,
        RATE,
        EVERY,
        KEEP,
        COMPRESS[BLOCK_TOP_K],
        parts=parts,
        mix=0.25,
        tokens=None if weights is None else TOKENS,
    )
    for k, (x, anchor, error) in enumerate(expected):
        results = [(models, x)]
        for f, part in enumerate(parts):
            results += [(state.anchor[f], np.tile(anchor[part], (N, 1)))]
            results += [(state.error[f], error[:, part])]
        for tree, result in results:
            np.testing.assert_allclose(flatten(tree)[:, k], result, atol=1e-12, err_msg=f"{k}")
