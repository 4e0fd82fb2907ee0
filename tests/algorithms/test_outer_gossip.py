"""Outer optimizers over push-sum rounds: their steps, statistics, and another number of nodes."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gossipjax as gx
from gossipjax.checkpoint import change_nodes
from gossipjax.exchanges.chain import find_exchange

N = 8
topology = gx.topology
RANDOM_PEER = topology.random_peer(N, 16, seed=1)
TRACKING = gx.gradient_tracking(RANDOM_PEER, damped=True)
STARTS = {"a": jnp.zeros(3), "b": jnp.ones((2, 2))}
TARGETS = jnp.asarray(np.random.default_rng(3).normal(size=N), jnp.float32)


def gradients(z, target):
    return jax.tree.map(lambda x: x - target, z), jnp.sum(target)


@functools.cache
def make_step(average, nodes):
    tx = gx.outer(optax.sgd(0.1, momentum=0.9), optax.sgd(0.5, momentum=0.5), 2, average=average)
    return tx, gx.TrainStep(gradients, tx, nodes=nodes)


def train(average, steps, nodes, state=None, first=0):
    tx, step = make_step(average, nodes)
    params, opt_state = nodes.init(tx, STARTS) if state is None else state
    for k in range(first, steps):
        params, opt_state, _ = step(k, params, opt_state, TARGETS[: nodes.size])
    return params, opt_state


def flat(tree):
    return np.concatenate(
        [np.asarray(leaf).reshape(leaf.shape[0], -1) for leaf in jax.tree.leaves(tree)], axis=1
    )


def test_canonical_steps_count_rounds_by_outer_steps():
    schedule = topology.one_peer_exponential(N)  # 3 rounds
    tx = gx.outer(optax.sgd(0.1), optax.sgd(0.7), 5, average=gx.sgp(schedule))
    state = tx.init(STARTS)
    assert gx.canonical_steps(state) == [0, 4, 9, 14]
    assert [gx.canonical_step(state, k) for k in (3, 19, 24, 29, 30)] == [0, 4, 9, 14, 0]
    gossip: Any = gx.gossip_state(state)
    assert gossip.schedule == schedule
    with pytest.raises(ValueError, match="the exchange must need nothing of its step"):
        gx.exchange(state, 4, params=STARTS)


def test_statistics_are_mixed_by_the_round_of_an_outer_step_with_its_weights():
    tx = gx.outer(optax.sgd(0.1), optax.sgd(0.7), 2, average=TRACKING)
    weight = np.linspace(0.2, 1.8, N)
    matrices = RANDOM_PEER.matrices()
    stats = jnp.arange(float(N))

    def mix(s, w, step):
        state: Any = tx.init(s)
        state = state._replace(local=state.local._replace(weight=w))
        moved = gx.local_model(s, state, jnp.ones_like(s))
        return gx.mix_batch_stats(s, state, step), moved

    for step, P in ((2, np.eye(N)), (3, matrices[1])):
        on_nodes: Any = jax.vmap(mix, (0, 0, None), axis_name="nodes")
        mixed, moved = on_nodes(stats, jnp.asarray(weight, jnp.float32), step)
        expected = P @ (weight * stats) / (P @ weight)
        np.testing.assert_allclose(mixed, expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(moved, stats + 1)  # local steps do not count weights


@pytest.mark.parametrize(("nodes", "steps"), [(5, 6), (N, 7)])
def test_a_change_of_nodes_goes_on_from_the_average_model(nodes, steps):
    """At the end of an outer step nothing has moved, so that the new nodes have no `D`."""
    params, state = train(TRACKING, steps, gx.Nodes(N))
    old: Any = gx.gossip_state(state)
    average = gx.average_model(params, state, nodes=gx.Nodes(N))
    anchors = np.average(flat(find_exchange(state).anchor), axis=0, weights=old.weight)
    gossip = gx.gradient_tracking(topology.random_peer(nodes, 16, seed=2), damped=True)
    tx, _ = make_step(gossip, gx.Nodes(nodes))
    arrays = jax.tree.map(np.asarray, (params, state))
    changed: Any = change_nodes(arrays[0], arrays[1], tx, nodes)
    new_params, new_state, report = changed
    assert report.weight == pytest.approx(N, rel=1e-6)
    expected = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(average)])
    np.testing.assert_allclose(flat(new_params), [expected] * nodes, rtol=1e-5, atol=1e-6)
    outer: Any = find_exchange(new_state)
    np.testing.assert_allclose(flat(outer.anchor), [anchors] * nodes, rtol=1e-5, atol=1e-6)
    new: Any = gx.gossip_state(new_state)
    assert new.weight.tolist() == [1.0] * nodes
    assert not np.any(flat(new.extra["correction"].value))
    assert np.ptp(np.asarray(old.weight)) > 0.1
    gaps = flat(outer.anchor) - flat(new_params)
    assert np.abs(gaps).max() < 1e-6 if steps == 6 else np.abs(gaps).max() > 1e-3
    final, _ = train(gossip, 8, gx.Nodes(nodes), state=(new_params, new_state), first=steps)
    assert np.isfinite(flat(final)).all()
