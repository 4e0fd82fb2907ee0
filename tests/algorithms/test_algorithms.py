"""One matrix over all algorithms: each against the dense oracle, round by round.

It knows no algorithm by name: a new one is a row in rows.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algorithms.problems import flatten, make_problem, run_history, unflatten
from algorithms.rows import NO_VARIANTS, ROWS, WITH_STATE
from modes import SERVERS

import gossipjax as gx

# A mesh adds what the mode changes: types that say what varies ask the most of an algorithm. `init`
# is in the program and a scan goes over the steps, or over cycles of static ones: the state that
# `init` makes has the types that `update` returns.
STYLES = {
    ("vmap", 1): "counted",  # the inner optimizer
    ("vmap", 3): "static",
    ("vmap", 8): "counted",
    ("shard_map_check_vma", 3): "traced",
    ("pmap", 3): "traced",
}
FIRST_ROWS = ("allreduce", "dpsgd", "sgp", "osgp 2", "adpsgd")
MORE_STYLES = {
    ("vmap", 2): "traced",
    ("shard_map", 8): "counted",
}


def list_cases():
    """Size 3 of every algorithm on each backend is asked with every Python and JAX."""
    cases = []
    for name, row in ROWS.items():
        styles = {**STYLES, **(MORE_STYLES if name in FIRST_ROWS else {})}
        if row.is_variant:  # of narrow messages with rounds that are data
            styles = {("vmap", 3): "counted" if row.noise else "static"}
        if name in WITH_STATE and not row.chooses:
            styles |= {(SERVERS, 4): "traced"}
        for (mode, n), style in styles.items():
            marks = [pytest.mark.smoke] if n == 3 and not row.is_variant else []
            cases.append(pytest.param(name, mode, n, style, marks=marks))
    return cases


@pytest.mark.parametrize(("name", "mode", "n", "style"), list_cases())
def test_equals_the_oracle_round_by_round(name, mode, n, style):
    compare_with_the_oracle(ROWS[name], mode, n, jnp.float32, style)


@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, "vmap") for name in NO_VARIANTS]
    + [(name, "shard_map_check_vma") for name in ("allreduce", "osgp 2", "adpsgd")],
)
def test_equals_the_oracle_in_bfloat16(name, mode):
    compare_with_the_oracle(ROWS[name], mode, 3, jnp.bfloat16, "counted")


def compare_with_the_oracle(row, mode, n, dtype, style):
    rng, starts, all_updates = make_problem(n, dtype, row.steps)
    schedule = gx.topology.from_matrices(row.matrices(rng, n))
    # Each device of a server sends its share of a message; their replicas stay equal.
    tx = row.transform(schedule, **({"local_axis_name": "local"} if mode == SERVERS else {}))
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
    for part in (gossip.extra or {}).values() if gossip is not None else ():
        if part.is_mass:  # as a center, which all nodes have from the start
            center = np.asarray(part.value["kernel"])
            assert (center == center[0]).all()
    if gossip is not None and dtype != jnp.float32:
        assert all(leaf.dtype == jnp.float32 for leaf in gossip.residual.values())
    final = np.abs(flatten(models, 2)[:, -1] - expected[-1][0])
    assert final.max() >= row.noise / 1000, "messages must be rounded"
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
