"""One matrix over all algorithms: each against the dense oracle, round by round, and its laws.

It knows no algorithm by name: a new one is a row in rows.py.
"""

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
from modes import MODES, run

import gossipjax as gx

SIZES = (1, 2, 3, 4, 8)
# shard_map is the same code with types and without, and pmap is it, too: there, two sizes do.
FEW_SIZES = {"shard_map": (3, 8), "pmap": (3, 8)}
CASES = [
    (name, mode, n)
    for name, row in ROWS.items()
    for mode in MODES
    for n in FEW_SIZES.get(mode, SIZES)
    if not row.is_variant or mode == "vmap" or (mode == "shard_map_check_vma" and n == 3)
]
LOW_PRECISION_CASES = [
    (name, mode, n)
    for name, mode, n in CASES
    if n == 3 or (n == 8 and mode == "shard_map_check_vma")
]
# Each mode, size and type meets one style of step or more; the largest size meets them all.
STYLES = {
    "float32": {1: ["counted"], 2: ["static"], 3: ["traced"], 4: ["counted"]},
    "bfloat16": {3: ["static"], 8: ["traced"]},
}
ALL_STYLES = ["static", "traced", "counted"]


def mark_smoke(name, mode, n):
    """One size of every algorithm on each backend is asked with every Python and JAX."""
    is_smoke = n == 3 and name in NO_VARIANTS and mode != "shard_map_check_vma"
    return pytest.param(name, mode, n, marks=[pytest.mark.smoke] if is_smoke else [])


@pytest.mark.parametrize(("name", "mode", "n"), [mark_smoke(*case) for case in CASES])
def test_equals_the_oracle_round_by_round(name, mode, n):
    compare_with_the_oracle(ROWS[name], mode, n, jnp.float32)


@pytest.mark.parametrize(("name", "mode", "n"), LOW_PRECISION_CASES)
def test_equals_the_oracle_in_bfloat16(name, mode, n):
    compare_with_the_oracle(ROWS[name], mode, n, jnp.bfloat16)


def compare_with_the_oracle(row, mode, n, dtype):
    rng, starts, all_updates = make_problem(n, dtype, row.steps)
    schedule = gx.topology.from_matrices(row.matrices(rng, n))
    tx = row.transform(schedule)
    params = unflatten(starts, dtype)
    state = run(mode, tx.init, n)(params)
    updates = unflatten(all_updates.swapaxes(0, 1))  # [N, S, ...]
    tolerance = 1e-5 if dtype == jnp.float32 else 2.0**-8
    drift = row.steps * tolerance if row.drifts_by_rounding else tolerance
    exact = drift if row.drifts_by_rounding and dtype != jnp.float32 else 1e-4
    total = starts.sum(axis=0) + row.extra_mass(starts)
    totals = total + np.cumsum(all_updates.sum(axis=1), axis=0)  # [S, D]
    expected = list(row.oracle(schedule.matrices(), starts, all_updates))
    if not row.conserves_mass:
        totals = np.stack([x.sum(axis=0) for _, x, _ in expected])
    for style in STYLES[jnp.dtype(dtype).name].get(n, ALL_STYLES):
        models, states, mass, total_weight = run_history(mode, tx, style, params, state, updates)
        for new, old in ((models, params), (states, state)):
            jax.tree.map(lambda a, b: None, new, old)  # raises if the structures differ
            for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True):
                assert (a.dtype, a.shape) == (b.dtype, (n, row.steps, *b.shape[1:]))
        gossip = gx.gossip_state(states)
        assert (gossip is not None) == row.has_state
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


@pytest.mark.parametrize("name", WITH_STATE)
def test_low_precision_parameters_keep_float32_residuals(name):
    state = ROWS[name].transform(gx.topology.ring(2)).init(jnp.ones(3, jnp.bfloat16))
    assert gx.gossip_state(state).residual.dtype == jnp.float32  # pyright: ignore


@pytest.mark.parametrize("name", NO_VARIANTS)
def test_jit_equals_eager(name):
    n = 3
    rng, starts, updates = make_problem(n, jnp.float32)
    tx = ROWS[name].transform(gx.topology.from_matrices(ROWS[name].matrices(rng, n)))
    params = unflatten(starts)
    state = run("vmap", tx.init, n)(params)

    def step(params, state, u):
        params, state = take_step(tx, (params, state), u, 0)
        return params, state, gx.diagnostics.total_mass(params, state)

    jitted, eager = (
        run("vmap", step, n, jit=jit)(params, state, unflatten(updates[0])) for jit in (True, False)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), jitted, eager)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NO_VARIANTS)
def test_init_and_a_scan_over_steps_inside_one_program(name, mode):
    """The state that `init` makes has the types that `update` returns, check_vma included."""
    n = 4
    rng, starts, updates = make_problem(n, jnp.bfloat16)
    schedule = gx.topology.from_matrices(ROWS[name].matrices(rng, n))
    tx = ROWS[name].transform(schedule)

    def init_and_scan(params, updates):
        carry = (params, tx.init(params))
        return jax.lax.scan(lambda c, u: (take_step(tx, c, u, None), None), carry, updates)[0]

    params, _ = run(mode, init_and_scan, n)(
        unflatten(starts, jnp.bfloat16), unflatten(updates.swapaxes(0, 1))
    )
    *_, (z, _, _) = ROWS[name].oracle(schedule.matrices(), starts, updates)
    atol = ROWS[name].noise + 5 * 2.0**-8
    np.testing.assert_allclose(flatten(params), z, rtol=2.0**-8, atol=atol)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.is_inner_on_one_node])
def test_one_node_is_the_inner_optimizer(name, mode):
    tx = ROWS[name].chain(momentum_sgd(), gx.topology.complete(1))
    np.testing.assert_allclose(train(tx, 1, mode), train(momentum_sgd(), 1), rtol=1e-6)


@pytest.mark.parametrize(
    "name", [name for name, row in ROWS.items() if row.is_allreduce_on_complete]
)
@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("mode", MODES)
def test_on_the_complete_graph_with_equal_starts_it_is_allreduce(name, mode, n):
    tx = ROWS[name].chain(momentum_sgd(), gx.topology.complete(n))
    exact = optax.chain(gx.allreduce(), momentum_sgd())
    np.testing.assert_allclose(train(tx, n, mode), train(exact, n, mode), rtol=1e-5, atol=1e-6)


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


@pytest.mark.parametrize("name", ROWS)
def test_a_program_per_canonical_step_equals_the_oracle(name):
    """A training loop relies on it: over two cycles of rounds, with the state handed on."""
    n = 3
    row = ROWS[name]
    rng, starts, updates = make_problem(n, jnp.float32, 2 * row.steps)
    schedule = gx.topology.from_matrices(row.matrices(rng, n))
    tx = row.transform(schedule)
    params = unflatten(starts)
    state = run("vmap", tx.init, n)(params)
    program = gx.spmd(
        lambda params, state, u, step: take_step(tx, (params, state), u, step),
        nodes=n,
        static_argnums=3,
    )
    expected = row.oracle(schedule.matrices(), starts, updates)
    for k, (z, _, _) in enumerate(expected):
        step = gx.canonical_step(state, k)
        assert step in gx.canonical_steps(state)
        params, state = program(params, state, unflatten(updates[k]), step)
        atol = row.noise + 1e-4
        np.testing.assert_allclose(flatten(params), z, rtol=1e-4, atol=atol, err_msg=f"step {k}")


class TestBadInput:
    def make(self, name, **options):
        return ROWS[name].transform(gx.topology.ring(4), **options)

    @pytest.mark.parametrize("name", WITH_SCHEDULE)
    def test_axis_of_another_size(self, name):
        tx = self.make(name)
        with pytest.raises(ValueError, match="as many nodes as the schedule, 4, got 3"):
            gx.spmd(lambda p: tx.update(p, tx.init(p), p), nodes=3)(jnp.ones((3, 2)))

    @pytest.mark.parametrize("name", ROWS)
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
