"""Overlap SGP: messages in flight, in pieces, over switches, and exchanged by another program."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from algorithms.problems import run_history

import gossipjax as gx

N = 8
GRAPHS = {
    "one peer": gx.topology.one_peer_exponential(N),
    "two peers": gx.topology.k_peer_exponential(N, 2),
    "complete": gx.topology.complete(N),
}


def in_halves(tx):
    """The transform, whose exchange is called for itself."""

    def update(updates, state, params=None, *, step: Any = None, **told):
        received = gx.exchange(state, step)
        return tx.update(updates, state, params, step=step, received=received, **told)

    return optax.GradientTransformationExtraArgs(tx.init, update)


HYBRIDS = {
    "all-reduce, then one peer": {0: "complete", 3: "one peer"},
    "two peers, then one peer": {0: "two peers", 4: "one peer"},
    "one peer, then all-reduce": {0: "one peer", 2: "complete"},
}


@pytest.mark.parametrize(
    ("hybrid", "overlap", "style", "mode"),
    [
        *((hybrid, 3, "traced", "vmap") for hybrid in HYBRIDS),
        ("one peer, then all-reduce", 1, "static", "shard_map_check_vma"),
    ],
)
def test_messages_are_delivered_over_a_switch(hybrid, overlap, style, mode):
    """A message of the last round before the switch arrives by that round's edges.

    Also by `gx.exchange`, which takes its schedule and its axis from the state.
    """
    parts = {start: GRAPHS[name] for start, name in HYBRIDS[hybrid].items()}
    schedule = gx.topology.piecewise(parts)
    steps = overlap * 10
    rng = np.random.default_rng(0)
    starts, updates = rng.normal(size=(N, 3)), rng.normal(size=(steps, N, 3))
    matrices = schedule.matrices(steps)  # of the rounds: one per `overlap` steps
    expected = [z for z, *_ in oracle.osgp(matrices, starts, updates, overlap)]
    tx = gx.osgp(schedule, overlap)
    tx = in_halves(tx) if style == "static" else tx
    arrays = jnp.asarray(starts, jnp.float32), jnp.asarray(updates.swapaxes(0, 1), jnp.float32)
    models = run_history(mode, tx, style, *arrays)[1]
    np.testing.assert_allclose(models.swapaxes(0, 1), expected, rtol=2e-4, atol=1e-4)


def test_the_halves_can_be_two_programs_and_the_second_exchanges_nothing():
    tx = optax.chain(optax.sgd(0.1, momentum=0.9), gx.osgp(GRAPHS["one peer"]))
    counts = []
    z = jnp.ones((N, 5))
    state = gx.spmd(tx.init)(z)
    first = gx.spmd(lambda s: gx.exchange(s, 1))
    second = gx.spmd(lambda g, s, z, r: tx.update(g, s, z, step=1, received=r))
    received = first(state)
    for program, args in ((first, (state,)), (second, (z, state, z, received))):
        text = program.lower(*args).compile().as_text()
        counts.append(sum(text.count(f" {c}(") for c in ("collective-permute", "all-reduce")))
    assert counts == [1, 0]


@pytest.mark.parametrize(("overlap", "sizes"), [(1, [601]), (2, [201, 400]), (4, [201, 200, 200])])
def test_a_message_travels_in_pieces_of_whole_leaves(overlap, sizes):
    """In a step about a tau-th; the weight is in the first."""
    tx = gx.osgp(GRAPHS["one peer"], overlap)
    params = [jnp.ones((10, 20)), jnp.ones(200), jnp.ones(200)]
    sent, _ = gx.bytes_per_step(tx, params, N, steps=range(1, 1 + len(sizes)))
    assert (sent / 4).tolist() == [[size] * N for size in sizes]
