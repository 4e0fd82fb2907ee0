"""Overlap SGP: messages in flight, in pieces, over switches, and exchanged by another program."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from modes import run

import gossipjax as gx

N = 8
GRAPHS = {
    "one peer": gx.topology.one_peer_exponential(N),
    "two peers": gx.topology.k_peer_exponential(N, 2),
    "complete": gx.topology.complete(N),
}


def run_steps(tx, updates, starts, mode, static, split):
    """z after every step, `[S, N, D]`, by one program.

    Args:
      updates: `[S, N, D]`.
      static: whether the step is static, and canonical, or traced.
      split: whether the exchange is called for itself.
    """
    count = len(updates)

    def take(carry, inputs):
        u, step = inputs
        z, state = carry
        received = {"received": gx.exchange(state, step)} if split else {}
        change, state = tx.update(u, state, z, step=step, **received)
        return (z + change, state), z + change

    def run_node(z, updates):
        carry = (z, tx.init(z))
        if not static:
            return jax.lax.scan(take, carry, (updates, jnp.arange(count)))[1]
        history = []
        for k in range(count):
            carry, z = take(carry, (updates[k], gx.canonical_step(carry[1], k)))
            history.append(z)
        return jnp.stack(history)

    arrays = jnp.asarray(starts, jnp.float32), jnp.asarray(updates.swapaxes(0, 1), jnp.float32)
    return np.asarray(run(mode, run_node, N)(*arrays)).swapaxes(0, 1)


def make_problem(steps):
    rng = np.random.default_rng(0)
    return rng.normal(size=(N, 3)), rng.normal(size=(steps, N, 3))


HYBRIDS = {
    "all-reduce, then one peer": {0: "complete", 3: "one peer"},
    "two peers, then one peer": {0: "two peers", 4: "one peer"},
    "one peer, then all-reduce": {0: "one peer", 2: "complete"},
}


@pytest.mark.parametrize(
    ("overlap", "static", "mode", "split"),
    [(1, True, "shard_map_check_vma", True), (3, False, "vmap", False)],
)
@pytest.mark.parametrize("hybrid", HYBRIDS)
def test_messages_are_delivered_over_a_switch(hybrid, overlap, static, mode, split):
    """A message of the last round before the switch arrives by that round's edges.

    Also by `gx.exchange`, which takes its schedule and its axis from the state.
    """
    parts = {start: GRAPHS[name] for start, name in HYBRIDS[hybrid].items()}
    schedule = gx.topology.piecewise(parts)
    steps = overlap * 10
    starts, updates = make_problem(steps)
    matrices = schedule.matrices(steps)  # of the rounds: one per `overlap` steps
    expected = [z for z, *_ in oracle.osgp(matrices, starts, updates, overlap)]
    tx = gx.osgp(schedule, overlap)
    history = run_steps(tx, updates, starts, mode, static, split)
    np.testing.assert_allclose(history, expected, rtol=2e-4, atol=1e-4)


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


def test_ten_thousand_random_rounds_lose_no_mass():
    """On `random_peer`, in float32: weights and messages add up to N, and z is the oracle's."""
    schedule = gx.topology.random_peer(N, 20, seed=0)
    tx = gx.osgp(schedule)
    starts = np.random.default_rng(0).normal(size=(N, 3))

    def rounds(z):
        def body(k, carry):
            z, state = carry
            change, state = tx.update(jnp.zeros_like(z), state, z, step=k)
            return z + change, state

        z, state = jax.lax.fori_loop(0, 10_000, body, (z, tx.init(z)))
        return z, state, gx.diagnostics.total_mass(z, state)[1]

    z, state, weight = jax.jit(jax.vmap(rounds, axis_name="nodes"))(
        jnp.asarray(starts, jnp.float32)
    )
    assert abs(float(weight[0]) - N) < 1e-5 * N
    *_, (expected, _, w) = oracle.osgp(schedule.matrices(), starts, np.zeros((10_000, N, 3)), 1)
    np.testing.assert_allclose(z, expected, atol=1e-4)
    np.testing.assert_allclose(state.weight, w, rtol=1e-4)
    assert np.ptp(w) > 0.5, "the weights must differ for this to mean anything"
