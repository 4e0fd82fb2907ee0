"""The state knows its schedule, overlap and wire: nobody is told them twice, or told others."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gossipjax as gx
from gossipjax.exchanges.model import as_update, predict, residuals
from gossipjax.wire import round_to

N = 6
SCHEDULES = {
    "one peer": gx.topology.one_peer_exponential(N),
    "a partner that repeats": gx.topology.bipartite_exponential(N),
    "base graph": gx.topology.base_graph(N),
    "every third step": gx.topology.one_peer_exponential(N).every(3),
    "piecewise": gx.topology.piecewise(
        {0: gx.topology.complete(N), 4: gx.topology.one_peer_exponential(N)}
    ),
    "piecewise, every second step": gx.topology.piecewise(
        {0: gx.topology.ring(N), 3: gx.topology.bipartite_exponential(N)}
    ).every(2),
}
OVERLAPS = {"sgp": 0, "osgp 1": 1, "osgp 2": 2, "osgp 3": 3}


def make_gossip(name, schedule):
    return gx.osgp(schedule, OVERLAPS[name]) if OVERLAPS[name] else gx.sgp(schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", OVERLAPS)
def test_canonical_steps_are_those_of_the_schedule_as_the_overlap_spreads_it(name, schedule):
    schedule = SCHEDULES[schedule]
    overlap = OVERLAPS[name]
    tx = optax.chain(optax.sgd(0.1, momentum=0.9), make_gossip(name, schedule))
    spread = schedule.every(max(1, overlap))
    opt_state = tx.init(jnp.ones(3))
    steps = [gx.canonical_step(opt_state, k) for k in range(40)]
    assert steps == [spread.canonical_step(k, lookback=overlap) for k in range(40)]
    assert gx.canonical_steps(opt_state) == sorted(set(steps))


def test_without_gossip_all_steps_share_a_program():
    tx = optax.chain(gx.allreduce(), optax.sgd(0.1, momentum=0.9))
    _, opt_state = gx.Nodes(4).init(tx, jnp.ones(3))
    assert [gx.canonical_step(opt_state, k) for k in range(5)] == [0] * 5
    assert gx.canonical_steps(opt_state) == [0]


def test_the_plan_is_static():
    """It is part of the structure: a jitted step knows it, and another one is another program."""
    state: Any = gx.osgp(gx.topology.ring(4)).init(jnp.ones(3))
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
    other: Any = gx.osgp(gx.topology.directed_ring(4)).init(jnp.ones(3))
    assert jax.tree.structure(state) != jax.tree.structure(other)
    again: Any = gx.osgp(gx.topology.ring(4)).init(jnp.ones(3))
    assert jax.tree.structure(state) == jax.tree.structure(again)


@pytest.mark.parametrize("max_delay", [1, 2, 4])
def test_the_history_is_as_long_as_it_must_be(max_delay):
    state = gx.adpsgd(gx.topology.ring(2), max_delay).init({"a": jnp.ones(3, jnp.bfloat16)})
    extra = gx.gossip_state(state).extra  # pyright: ignore[reportOptionalMemberAccess]
    shapes = [] if extra is None else [x.shape for x in jax.tree.leaves(extra["history"].value)]
    assert shapes == ([(max_delay - 1, 3)] if max_delay > 1 else [])


@pytest.mark.parametrize("start", [0.5, 1.0, 1.5, 2.0])
def test_the_update_of_low_precision_parameters_ends_on_the_rounded_value(start):
    """Just above the middle of two bfloat16 values: an update that is cut off would fall short."""
    z = jnp.asarray(start, jnp.bfloat16)
    target = jnp.float32(1 + 2**-8 + 2**-20)
    for make_update in (as_update, jax.jit(as_update)):
        updated: Any = optax.apply_updates(z, make_update(z, target))
        assert updated.dtype == jnp.bfloat16
        assert updated == jnp.asarray(1 + 2**-7, jnp.bfloat16) == target.astype(jnp.bfloat16)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_residual_is_what_rounding_to_parameters_left_over(dtype):
    """Also where the update cancels more than its type has, and where values are subnormal."""
    rng = np.random.default_rng(0)
    z, target = rng.normal(size=(2, 10_000)) * 10.0 ** rng.uniform(-8, 4, (2, 10_000))
    z = jnp.asarray(z, dtype)
    target = jnp.asarray(target, jnp.float32)

    def step(z, target):
        updates = as_update(z, target)
        return optax.apply_updates(z, updates), residuals(target, predict(z, updates))

    for run in (step, jax.jit(step)):
        after: Any
        after, residual = run(z, target)
        assert after.dtype == dtype
        model = np.asarray(after, np.float64) + np.asarray(residual, np.float64)
        largest = np.maximum(np.abs(np.asarray(after, np.float64)), np.abs(target))
        assert (np.abs(model - target) <= 2.0**-24 * largest).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_rounding_is_that_of_the_type_and_survives_the_compiler(dtype):
    """XLA may drop a conversion to a narrow type and back, and flushes subnormal values."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=50_000) * 10.0 ** rng.uniform(-9, 5, 50_000), jnp.float32)
    expected = x.astype(dtype)  # by itself: a conversion that is kept
    for round_ in (round_to, jax.jit(round_to, static_argnums=1)):
        rounded = round_(x, dtype)
        np.testing.assert_array_equal(rounded, np.asarray(expected, np.float32))


class TestLocalModel:
    """The model after the local half of a step: the one whose distance the paper plots."""

    def test_it_is_the_numerator_with_the_update_over_the_weight(self):
        state: Any = gx.sgp(gx.topology.ring(2)).init({"a": jnp.ones(3)})
        state = state._replace(weight=jnp.float32(0.5))
        updates = {"a": jnp.array([0.0, 1.0, -1.0])}
        model: Any = gx.local_model({"a": jnp.full(3, 2.0)}, state, updates)
        # x = w z = 1; (1 + u) / 0.5
        np.testing.assert_allclose(model["a"], [2.0, 4.0, 0.0])

    def test_of_stale_parameters_it_is_that_of_the_latest_model(self):
        tx = gx.d1d_psgd(2)
        x = jnp.array([0.0, 2.0])

        def steps(x):
            state = tx.init(x)
            updates, state = tx.update(jnp.float32(0.0), state, x, step=0)
            return gx.local_model(x + updates, state, jnp.float32(0.5))

        np.testing.assert_allclose(gx.spmd(steps, nodes=2)(x), [1.5, 1.5])
