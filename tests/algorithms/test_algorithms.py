"""One matrix over all algorithms: each against the dense oracle, round by round, and its laws.

It knows no algorithm by name: a new one is a row in rows.py.
"""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from algorithms.problems import (
    flatten,
    make_problem,
    momentum_sgd,
    run_history,
    take_step,
    train,
    unflatten,
)
from algorithms.rows import NO_VARIANTS, ROWS, WITH_SCHEDULE, WITH_STATE
from modes import run

import gossipjax as gx

# vmap runs each algorithm at every size and in every style of step; a mesh adds what the mode
# changes. `init` is in the program and a scan goes over the steps, unless they are static: the
# state that `init` makes has the types that `update` returns.
STYLES = {
    ("vmap", 1): "counted",
    ("vmap", 2): "traced",
    ("vmap", 3): "static",
    ("vmap", 4): "counted",
    ("vmap", 8): "traced",
    ("shard_map_check_vma", 3): "counted",
    ("shard_map_check_vma", 8): "traced",
    ("shard_map", 3): "static",
    ("pmap", 3): "static",
}
LOW_PRECISION_STYLES = {("vmap", 3): "counted", ("shard_map_check_vma", 8): "traced"}


def list_cases(styles):
    """Size 3 of every algorithm on each backend is asked with every Python and JAX."""
    cases = []
    for name, row in ROWS.items():
        for mode, n in styles:
            if mode == "vmap" or not row.is_variant:
                is_smoke = n == 3 and name in NO_VARIANTS and mode != "shard_map_check_vma"
                marks = [pytest.mark.smoke] if is_smoke else []
                cases.append(pytest.param(name, mode, n, marks=marks))
    return cases


@pytest.mark.parametrize(("name", "mode", "n"), list_cases(STYLES))
def test_equals_the_oracle_round_by_round(name, mode, n):
    compare_with_the_oracle(ROWS[name], mode, n, jnp.float32, STYLES[mode, n])


@pytest.mark.parametrize(("name", "mode", "n"), list_cases(LOW_PRECISION_STYLES))
def test_equals_the_oracle_in_bfloat16(name, mode, n):
    compare_with_the_oracle(ROWS[name], mode, n, jnp.bfloat16, LOW_PRECISION_STYLES[mode, n])


def compare_with_the_oracle(row, mode, n, dtype, style):
    rng, starts, all_updates = make_problem(n, dtype, row.steps)
    schedule = gx.topology.from_matrices(row.matrices(rng, n))
    tx = row.transform(schedule)
    params = unflatten(starts, dtype)
    updates = unflatten(all_updates.swapaxes(0, 1))  # [N, S, ...]
    tolerance = 1e-5 if dtype == jnp.float32 else 2.0**-8
    drift = row.steps * tolerance if row.drifts_by_rounding else tolerance
    exact = drift if row.drifts_by_rounding and dtype != jnp.float32 else 1e-4
    total = starts.sum(axis=0) + row.extra_mass(starts)
    totals = total + np.cumsum(all_updates.sum(axis=1), axis=0)  # [S, D]
    expected = list(row.oracle(schedule.matrices(), starts, all_updates))
    if not row.conserves_mass:
        totals = np.stack([x.sum(axis=0) for _, x, _ in expected])
    start, models, states, mass, total_weight = run_history(mode, tx, style, params, updates)
    for new, old in ((models, params), (states, start)):
        jax.tree.map(lambda a, b: None, new, old)  # raises if the structures differ
        for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True):
            assert (a.dtype, a.shape) == (b.dtype, (n, row.steps, *b.shape[1:]))
    gossip = gx.gossip_state(states)
    assert (gossip is not None) == row.has_state
    if gossip is not None and dtype != jnp.float32:
        assert all(leaf.dtype == jnp.float32 for leaf in gossip.residual.values())
    for k, (z, x, w) in enumerate(expected):
        where = f"{style}, step {k}"
        # The update is rounded to the type of the parameters, as they are.
        change = np.abs(z - (expected[k - 1][0] if k else starts))
        errors = np.abs(flatten(models, 2)[:, k] - z)
        bound = row.noise + drift + tolerance * (np.abs(z) + change)
        assert (errors <= bound).all(), where
        if gossip is not None and gossip.weight is not None:
            np.testing.assert_allclose(gossip.weight[:, k], w, rtol=1e-5, err_msg=where)
        if gossip is not None and gossip.residual is not None:
            model = flatten(models, 2)[:, k] + flatten(gossip.residual, 2)[:, k]
            latest = x / w[:, None]  # to full precision, whatever z was rounded to
            atol = row.noise + 1e-5
            np.testing.assert_allclose(model, latest, rtol=1e-5, atol=atol, err_msg=where)
        np.testing.assert_allclose(
            flatten(mass, 2)[:, k],
            np.tile(totals[k], (n, 1)),
            rtol=1e-5,
            atol=n * exact,
            err_msg=where,
        )
        np.testing.assert_allclose(total_weight[:, k], n, rtol=1e-6, err_msg=where)


@pytest.mark.parametrize("name", NO_VARIANTS)
def test_jit_equals_eager(name):
    n = 3
    rng, starts, updates = make_problem(n, jnp.float32)
    tx = ROWS[name].transform(gx.topology.from_matrices(ROWS[name].matrices(rng, n)))
    params = unflatten(starts)["bias"]  # op by op, one leaf takes half as long

    def step(params, u):
        return take_step(tx, (params, tx.init(params)), u, 0)

    jitted, eager = (
        run("vmap", step, n, jit=jit)(params, unflatten(updates[0])["bias"])
        for jit in (True, False)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), jitted, eager)


@functools.cache
def train_reference(n):
    """The models of AllReduce with momentum: with one node, those of the optimizer."""
    tx = momentum_sgd() if n == 1 else optax.chain(gx.allreduce(), momentum_sgd())
    return train(tx, n)


@pytest.mark.parametrize("mode", ["vmap", "shard_map_check_vma"])
@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.is_inner_on_one_node])
def test_one_node_is_the_inner_optimizer(name, mode):
    tx = ROWS[name].chain(momentum_sgd(), gx.topology.complete(1))
    np.testing.assert_allclose(train(tx, 1, mode), train_reference(1), rtol=1e-6)


@pytest.mark.parametrize(
    "name", [name for name, row in ROWS.items() if row.is_allreduce_on_complete]
)
@pytest.mark.parametrize(
    ("mode", "n"), [("vmap", 2), ("vmap", 8), ("shard_map_check_vma", 3), ("shard_map", 8)]
)
def test_on_the_complete_graph_with_equal_starts_it_is_allreduce(name, mode, n):
    tx = ROWS[name].chain(momentum_sgd(), gx.topology.complete(n))
    np.testing.assert_allclose(train(tx, n, mode), train_reference(n), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", WITH_STATE)
def test_state_holds_no_array_of_the_caller(name):
    """Both can be donated: `init` copies what it keeps."""
    tx = ROWS[name].transform(gx.topology.complete(1))
    params = {"a": jnp.ones(3, jnp.bfloat16), "b": jnp.ones(3)}
    leaves = jax.tree.leaves(tx.init(params))
    assert not any(x is leaf for x in leaves for leaf in jax.tree.leaves(params))
    init = gx.spmd(tx.init, nodes=1)
    update = gx.spmd(lambda p, s: tx.update(p, s, p), nodes=1, donate_argnums=(0, 1))
    stacked = jax.tree.map(lambda x: x[None], params)
    jax.block_until_ready(update(stacked, init(stacked)))


class TestBadInput:
    def make(self, name, **options):
        return ROWS[name].transform(gx.topology.ring(4), **options)

    @pytest.mark.parametrize("name", WITH_SCHEDULE)
    def test_axis_of_another_size(self, name):
        tx = self.make(name)
        with pytest.raises(ValueError, match="as many nodes as the schedule, 4, got 3"):
            gx.spmd(lambda p: tx.update(p, tx.init(p), p), nodes=3)(jnp.ones((3, 2)))

    @pytest.mark.parametrize("name", NO_VARIANTS)
    def test_missing_axis(self, name):
        tx = self.make(name)
        with pytest.raises(ValueError, match=r"mapped axis, got 'nodes'.*shard_map, pmap or vmap"):
            tx.update(jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2), step=0)

    @pytest.mark.parametrize("name", WITH_STATE)
    def test_missing_params(self, name):
        tx = self.make(name)
        with pytest.raises(ValueError, match=r"params of .* must be given, .* got None: call tx.u"):
            gx.spmd(lambda p: tx.update(p, tx.init(p)), nodes=4)(jnp.ones((4, 2)))

    @pytest.mark.parametrize("name", WITH_STATE)
    def test_leaves_that_are_not_floats(self, name):
        with pytest.raises(ValueError, match=r"params\['steps'\] must be floating-.*, got int32"):
            self.make(name).init({"steps": jnp.ones(2, jnp.int32)})

    @pytest.mark.parametrize("name", WITH_STATE)
    def test_a_state_of_another_transform(self, name):
        tx = self.make(name)
        with pytest.raises(ValueError, match=r"must be a gx\.GossipState, got EmptyState"):
            gx.spmd(lambda p: tx.update(p, optax.EmptyState(), p), nodes=4)(jnp.ones((4, 2)))

    @pytest.mark.parametrize("name", WITH_SCHEDULE)
    def test_no_schedule(self, name):
        with pytest.raises(ValueError, match=r"must be a gx\.Schedule, got ndarray"):
            ROWS[name].transform(np.eye(3))

    @pytest.mark.parametrize("name", WITH_SCHEDULE)
    def test_a_state_of_another_schedule(self, name):
        """Both are named: the messages in it would be delivered by other rounds."""
        ring = gx.topology.ring(4)
        other = gx.topology.directed_ring(4)
        state = ROWS[name].transform(other).init(jnp.ones(2))
        tx = self.make(name)
        with pytest.raises(ValueError, match=f"schedule, {both(ring, other)}") as error:
            gx.spmd(lambda p: tx.update(p, state, p), nodes=4)(jnp.ones((4, 2)))
        assert "piecewise" in str(error.value)  # the way out

    @pytest.mark.parametrize("name", WITH_STATE)
    @pytest.mark.parametrize("option", ["axis_name", "local_axis_name"])
    def test_a_state_of_another_wire(self, name, option):
        other = self.make(name, **{option: "others"})
        state = other.init(jnp.ones(2))
        tx = self.make(name)
        states: Any = [gx.gossip_state(tx.init(jnp.ones(2))) for tx in (tx, other)]
        wires = [state.wire for state in states]
        with pytest.raises(ValueError, match=f"wire, {both(*wires)}"):
            gx.spmd(lambda p: tx.update(p, state, p), nodes=4)(jnp.ones((4, 2)))


def both(expected, actual):
    """The part of an error message that names both."""
    return f"{re.escape(str(expected))}, got one of {re.escape(str(actual))}"
