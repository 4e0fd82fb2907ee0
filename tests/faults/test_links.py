"""`gx.faults.sgp` and `dpsgd` against oracles that count messages, on every backend."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algorithms.problems import flatten, make_problem, take_step, unflatten
from faults.oracle_faults import push_sum, row_stochastic
from modes import run

import gossipjax as gx

N = 4
STEPS = 12
DEATHS = {3: 8}


def make_faults(n=N, max_delay=2, **options):
    """Drops, sleeps, delays and a death; tables of other lengths than the run's."""
    rng = np.random.default_rng(3)
    return gx.faults.Faults(
        n,
        arrives=rng.random((7, n, n)) < 0.6,
        active=rng.random((5, n)) < 0.7,
        deaths=DEATHS,
        delays=rng.integers(0, max_delay + 1, (11, n, n)),
        **options,
    )


def as_functions(faults):
    """The faults as an oracle takes them, read from the tables."""

    def is_active(k, i):
        return bool(faults.active[k % len(faults.active), i]) and k < DEATHS.get(i, STEPS)

    return (
        lambda k, i, j: bool(faults.arrives[k % len(faults.arrives), i, j]),
        lambda k, i, j: int(faults.delays[k % len(faults.delays), i, j]),
        is_active,
    )


def run_steps(mode, tx, style, starts, updates, has_account=True, first=0, state=None):
    """`(state, parameters, account)` after every step, `[N, S, ...]`."""

    def take(carry, u, step):
        carry = take_step(tx, carry, u, step)
        return carry, (carry[1], carry[0], gx.faults.account(*carry) if has_account else None)

    def history(params, state, updates):
        state = tx.init(params) if state is None else state
        steps = first + np.arange(jax.tree.leaves(updates)[0].shape[0])
        if style == "traced":
            return jax.lax.scan(
                lambda c, inputs: take(c, *inputs), (params, state), (updates, jnp.asarray(steps))
            )[1]
        carry = (params, state)
        results = []
        for k, step in enumerate(steps.tolist()):
            u = jax.tree.map(lambda leaf, k=k: leaf[k], updates)
            carry, result = take(carry, u, gx.canonical_step(state, step))
            results.append(result)
        return jax.tree.map(lambda *x: jnp.stack(x), *results)

    params = unflatten(starts)
    return run(mode, history, len(starts))(params, state, unflatten(updates.swapaxes(0, 1)))


def flat_mass(mass):
    """A `PushSum` of node 0, `[S, D + 1]`."""
    x = flatten(jax.tree.map(lambda leaf: leaf[0], mass.x))
    return np.concatenate([x, np.asarray(mass.weight[0], np.float64)[:, None]], axis=1)


@pytest.mark.parametrize(
    ("mode", "style", "running_sums", "max_delay"),
    [
        ("vmap", "traced", True, 2),
        ("vmap", "static", False, 2),
        ("shard_map", "traced", True, 2),
        ("shard_map_check_vma", "static", False, 0),
    ],
)
def test_sgp_equals_the_oracle_round_by_round(mode, style, running_sums, max_delay):
    steps = STEPS if style == "traced" else 5
    _, starts, updates = make_problem(N, jnp.float32, steps)
    schedule = gx.topology.random_peer(N, 3, seed=1)
    faults = make_faults(max_delay=max_delay)
    tx = gx.faults.sgp(schedule, faults, running_sums=running_sums)
    state, params, account = run_steps(mode, tx, style, starts, updates)
    expected = push_sum(schedule.matrices(), starts, updates, *as_functions(faults), running_sums)
    z, *masses = (np.stack(part) for part in zip(*expected, strict=True))
    np.testing.assert_allclose(flatten(params, 2).swapaxes(0, 1), z, rtol=2e-5, atol=2e-5)
    for part, mass in zip(account, masses, strict=True):
        np.testing.assert_allclose(flat_mass(part), mass, rtol=1e-5, atol=1e-5)
    # The laws, of the oracle as well: nothing is missing but what was counted as lost.
    given = np.concatenate([starts.sum(axis=0), [N]]) + np.pad(
        updates.sum(axis=1).cumsum(axis=0), [(0, 0), (0, 1)]
    )
    np.testing.assert_allclose(sum(masses), given, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(sum(map(flat_mass, account)), given, rtol=1e-5, atol=1e-5)
    assert (masses[2][-1, -1] > 0.3) == (not running_sums)
    assert (masses[1][:, -1].max() > 0) == (running_sums or max_delay > 0)
    assert (np.asarray(state.count) == np.arange(1, steps + 1)).all()


@pytest.mark.parametrize(
    ("mode", "style", "max_delay"),
    [("vmap", "traced", 2), ("shard_map", "static", 0), ("shard_map_check_vma", "traced", 2)],
)
def test_dpsgd_equals_the_oracle_round_by_round(mode, style, max_delay):
    _, starts, updates = make_problem(N, jnp.float32, STEPS if style == "traced" else 5)
    schedule = gx.topology.ring(N) if max_delay else gx.topology.bipartite_exponential(N)
    faults = make_faults(max_delay=max_delay)
    tx = gx.faults.dpsgd(schedule, faults)
    _, params, _ = run_steps(mode, tx, style, starts, updates, has_account=False)
    expected = row_stochastic(schedule.matrices(), starts, updates, *as_functions(faults))
    models = flatten(params, 2).swapaxes(0, 1)
    np.testing.assert_allclose(models, np.stack(list(expected)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["sgp", "dpsgd"])
def test_noise_has_its_deviation_and_the_account_has_the_noise(name):
    n, steps, std = 4, 3, 0.5
    starts = np.zeros((n, 11))
    updates = np.zeros((steps, n, 11))
    schedule = gx.topology.complete(n)
    tx = getattr(gx.faults, name)(schedule, gx.faults.Faults(n, noise=std, seed=5))
    is_sgp = name == "sgp"
    _, params, account = run_steps("vmap", tx, "traced", starts, updates, is_sgp)
    first = flatten(params, 2)[:, 0]
    scale = np.sqrt(n - 1) * std * (1 if is_sgp else 1 / n)
    assert first.std() == pytest.approx(scale, rel=0.25)
    if is_sgp:
        total = sum(map(flat_mass, account))
        np.testing.assert_allclose(total, np.tile([0.0] * 11 + [n], (steps, 1)), atol=1e-4)
        assert abs(flat_mass(account.lost)[:, :-1]).min() > 0


def test_a_run_that_goes_on_sees_the_same_faults():
    _, starts, updates = make_problem(N, jnp.float32, 8)
    tx = gx.faults.sgp(
        gx.topology.one_peer_exponential(N), make_faults(noise=0.1, seed=1), running_sums=False
    )
    state, params, _ = run_steps("vmap", tx, "traced", starts, updates)
    last = jax.tree.map(lambda leaf: leaf[:, 3], (state, params))
    rest = run_steps("vmap", tx, "traced", flatten(last[1]), updates[4:], first=4, state=last[0])
    for part, whole in zip(rest[:2], (state, params), strict=True):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b[:, 4:], rtol=1e-6, atol=1e-6), part, whole
        )
