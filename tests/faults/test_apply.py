"""Schedules with faults in them, and nodes that do not compute."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from algorithms.problems import flatten, make_problem, take_step, unflatten
from modes import run

import gossipjax as gx

N = 6
STEPS = 14
DEATH = 9
FAULTS = gx.faults.Faults(
    N,
    arrives=gx.faults.independent_drops(N, 4, seed=1, rate=0.3),
    active=gx.faults.markov_activity(N, 5, seed=2),
    deaths={2: DEATH},
)


def is_up(step, i, j, overlap=0):
    """Whether node `i` gets what `j` sends, read from the tables."""

    def active(k, node):
        return FAULTS.active[k % 5, node] and not (node == 2 and k >= DEATH)

    return FAULTS.arrives[step % 4, i, j] and active(step, j) and active(step + overlap, i)


@pytest.mark.parametrize(("keep", "overlap"), [("sender", 0), ("both", 0), ("sender", 2)])
def test_rounds_have_the_faults_of_their_step(keep, overlap):
    base = gx.topology.random_pairs(N, 3, 0)
    if keep == "sender":
        base = gx.topology.piecewise({0: gx.topology.exponential(N), 4: base})
    schedule = gx.faults.apply(base, FAULTS, keep=keep, overlap=overlap)
    for k in range(50):
        step = k * max(1, overlap)
        P = schedule.round_at(k).matrix
        B = base.round_at(k).matrix
        expected = np.array(
            [[B[i, j] * is_up(step, i, j, overlap) for j in range(N)] for i in range(N)]
        )
        if keep == "both":
            expected = np.where((expected > 0) & (expected.T > 0), expected, 0)
        np.fill_diagonal(expected, 0)
        np.testing.assert_array_equal(P - np.diag(np.diag(P)), expected)
        np.testing.assert_allclose(P.sum(axis=0), 1, rtol=1e-12)
        assert keep == "sender" or schedule.round_at(k).is_doubly_stochastic
    assert (schedule.round_at(10**6).matrix[2] == np.eye(N)[2]).all()


def test_a_schedule_with_deaths_is_one_like_others():
    schedule = gx.faults.apply(gx.topology.ring(N), FAULTS)
    copy = pickle.loads(pickle.dumps(schedule))
    assert copy == schedule
    assert copy.deaths == {2: DEATH}
    local = schedule.every(3, phase=1)
    assert local.round_at(3 * DEATH + 4) == schedule.round_at(DEATH + 1)
    assert len(schedule.canonical_steps()) <= len(schedule.rounds) <= 40  # 20 before and after
    together = gx.faults.Faults(N, active=FAULTS.active)
    twice = gx.faults.apply(
        gx.faults.apply(gx.topology.ring(N), together), gx.faults.Faults(N, arrives=FAULTS.arrives)
    )
    at_once = gx.faults.apply(
        gx.topology.ring(N), gx.faults.Faults(N, arrives=FAULTS.arrives, active=FAULTS.active)
    )
    assert twice == at_once


def make_chain(name):
    base = gx.topology.exponential(N)
    pairs = gx.topology.ring(N)
    overlap = 2 if name == "osgp 2" else 0
    directed = gx.faults.apply(base, FAULTS, overlap=overlap)
    undirected = gx.faults.apply(pairs, FAULTS, keep="both")
    delayed = gx.faults.Faults(
        N, arrives=FAULTS.arrives, active=FAULTS.active, deaths=FAULTS.deaths, delays=1
    )
    chains = {
        "sgp": lambda: gx.sgp(directed),
        "osgp 2": lambda: gx.osgp(directed, 2),
        "dpsgd": lambda: gx.dpsgd(undirected, order="adapt-then-combine"),
        "gradient_tracking": lambda: gx.gradient_tracking(directed),
        "faults.sgp": lambda: gx.faults.sgp(base, delayed),
    }
    gossip = chains[name]()
    trace = optax.trace(0.5) if name == "sgp" else optax.identity()
    return gx.faults.inactive(optax.chain(trace, gossip), FAULTS), directed, undirected


def track(matrices, x, updates, active):
    """Gradient tracking of those that are active; the others keep their correction."""
    w = np.ones(len(x))
    c = np.zeros_like(x)
    for P, u, on in zip(matrices, updates, active[..., None], strict=True):
        x = P @ (x + on * (u + c))
        w = P @ w
        c = P @ (c + on * u) - on * u
        assert abs(c.sum(axis=0)).max() < 1e-12
        yield x / w[:, None], x, w


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("sgp", "shard_map_check_vma"),
        ("osgp 2", "vmap"),
        ("dpsgd", "vmap"),
        ("gradient_tracking", "vmap"),
        ("faults.sgp", "vmap"),
    ],
)
def test_who_is_not_active_stays_as_it_is_and_nothing_is_lost(name, mode):
    _, starts, updates = make_problem(N, jnp.float32, STEPS)
    tx, directed, undirected = make_chain(name)
    active = np.array([FAULTS.active_at(k) for k in range(STEPS)])

    def history(params, updates):
        def body(carry, inputs):
            carry = take_step(tx, carry, *inputs)
            return carry, (*carry, gx.diagnostics.total_mass(*carry))

        return jax.lax.scan(body, (params, tx.init(params)), (updates, jnp.arange(STEPS)))[1]

    args = unflatten(starts), unflatten(updates.swapaxes(0, 1))
    params, state, (mass, weight) = run(mode, history, N)(*args)
    models = flatten(params, 2).swapaxes(0, 1)
    before = np.concatenate([flatten(args[0])[None], models[:-1]])
    assert (models == before)[~active].all()
    assert (models != before)[active].all()
    gossip = gx.gossip_state(state)
    assert gossip is not None
    assert (np.asarray(gossip.count) == np.arange(1, STEPS + 1)).all()
    applied = np.where(active[..., None], updates, 0)
    if name == "sgp":  # the momentum of an inactive node stands still
        trace = np.zeros_like(starts)
        applied = []
        for u, on in zip(updates, active, strict=True):
            trace = np.where(on[:, None], 0.5 * trace + u, trace)
            applied.append(np.where(on[:, None], trace, 0))
    if name != "gradient_tracking":
        total = starts.sum(axis=0) + np.sum(applied, axis=1).cumsum(axis=0)
        np.testing.assert_allclose(flatten(mass, 2)[0], total, rtol=1e-5, atol=3e-5)
    np.testing.assert_allclose(weight, np.full((N, STEPS), float(N)), rtol=1e-6)
    find = {
        "gradient_tracking": lambda: track(directed.matrices(STEPS), starts, updates, active),
        "sgp": lambda: oracle.sgp(directed.matrices(STEPS), starts, applied),
        "osgp 2": lambda: oracle.osgp(directed.matrices(STEPS), starts, applied, 2),
        "dpsgd": lambda: oracle.dpsgd(
            undirected.matrices(STEPS), starts, applied, adapt_first=True
        ),
    }.get(name)
    if find is not None:
        expected = np.stack([z for z, *_ in find()])
        np.testing.assert_allclose(models, expected, rtol=2e-5, atol=2e-5)


def test_inside_an_outer_optimizer_steps_are_left_out():
    inner = gx.faults.inactive(optax.sgd(1.0), FAULTS)
    tx = gx.outer(inner, optax.sgd(1.0), every=3)
    nodes = gx.Nodes(N)
    train_step = gx.TrainStep(lambda z, g: (g, ()), tx, nodes=nodes)
    params, state = nodes.init(tx, jnp.zeros(()))
    expected = np.zeros(N)
    for k in range(6):
        params, state, _ = train_step(k, params, state, jnp.ones(N))
        expected -= FAULTS.active_at(k)
        if k % 3 == 2:
            expected[:] = expected.mean()
        np.testing.assert_allclose(params, expected, rtol=1e-6)


def test_noise_of_messages_has_its_deviation_and_moves_no_sum():
    n = 8
    tx = gx.dpsgd(
        gx.topology.ring(n), order="adapt-then-combine", wire=gx.faults.noise(0.3, seed=2)
    )

    def update(x):
        return x + tx.update(jnp.zeros(4000), tx.init(x), x, step=0)[0]

    x = run("vmap", update, n)(jnp.ones((n, 4000)))
    change = np.asarray(x, np.float64) - 1
    assert np.abs(change.sum(axis=0)).max() < 1e-5
    assert change.std() == pytest.approx(0.3 * 2, rel=0.05)  # 2 get in, 2 stay behind: sqrt(4)
    assert gx.faults.noise(0.3) == gx.faults.noise(0.3)
    assert gx.faults.noise(0.3).count_bytes(10) == 40
