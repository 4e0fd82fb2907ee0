"""Settings in which nodes drift apart without gradients are refused; the others come to agree."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest

import gossipjax as gx

N = 16
ROUNDS = 1500
topology = gx.topology
SCHEDULES = {
    "directed ring": topology.directed_ring(N),
    "ring": topology.ring(N),
    "one peer": topology.one_peer_exponential(N),
    "pairs": topology.random_pairs(N, 16, seed=0),
    "random peer": topology.random_peer(N, 64, seed=1),
}
NESTEROV = {"momentum": 0.9, "nesterov": True}
SLOWMO = {"momentum": 0.5}
# The schedule, the outer rate, its momentum, pull, mix -> whether nodes drift apart.
OUTER = {
    ("directed ring", 0.7, "nesterov", 1.0, 0.0): True,
    ("directed ring", 0.7, "slowmo", 1 / 0.7, 0.0): True,  # NoLoCo
    ("directed ring", 1.0, "slowmo", 1.0, 0.25): True,
    ("directed ring", 1.0, "slowmo", 1.0, 0.5): False,
    ("ring", 0.7, "nesterov", 1.0, 0.0): False,
    ("ring", 2.5, "none", 1.0, 0.0): True,
    ("one peer", 0.7, "nesterov", 1.0, 0.0): True,
    ("pairs", 0.7, "slowmo", 1 / 0.7, 0.0): False,  # NoLoCo's own
}
# The gossip, its schedule, the outer rate with Nesterov's 0.9 -> whether nodes diverge. By a NumPy
# simulation, tracking on the cycle of hops is stable up to 0.25 for 16 nodes.
OVER_GOSSIP = {
    ("tracking", "one peer", 0.25): False,
    ("tracking", "one peer", 0.36): True,
    ("tracking", "directed ring", 0.01): True,
    ("tracking, damped", "random peer", 0.7): False,
    ("sgp", "one peer", 0.7): False,
    ("sgp", "random peer", 0.7): True,
    ("sgp, damped", "random peer", 0.7): False,
    ("sgp", "ring", 0.7): True,
}
MOMENTUM = {"nesterov": NESTEROV, "slowmo": SLOWMO, "none": {}}
REFUSED = "must be stable, so that nodes come to agree"


def is_refused(make):
    try:
        make()
    except ValueError as error:
        if "must be stable" in str(error):
            return True
        raise
    return False


def simulate(results):
    """Whether the nodes of the oracle, `[N, 1]` after every step, differ more at the end."""
    with np.errstate(all="ignore"):
        spreads = [np.ptp(z) for z, *_ in results]
    return not spreads[-1] <= spreads[0]


@pytest.mark.parametrize("case", OUTER, ids=str)
def test_an_outer_optimizer_is_refused_where_its_oracle_diverges(case):
    name, rate, momentum, pull, mix = case
    optimizer = MOMENTUM[momentum]
    schedule = SCHEDULES[name]
    matrices: Any = schedule.matrices()
    starts = np.random.default_rng(0).normal(size=(N, 1))
    results = oracle.outer(
        matrices,
        starts,
        np.zeros((ROUNDS, N, 1)),
        oracle.sgd(rate, **optimizer),
        every=1,
        average=matrices,
        mix=mix,
        pull=pull,
    )
    assert simulate(results) == OUTER[case]
    assert OUTER[case] == is_refused(
        lambda: gx.outer(
            optax.sgd(0.1),
            optax.sgd(rate, **optimizer),
            50,
            average=schedule,
            strength=1 - mix,
            anchor_strength=pull,
        )
    )


@pytest.mark.parametrize("case", OVER_GOSSIP, ids=str)
def test_over_gossip_it_is_refused_where_its_oracle_diverges(case):
    """All local steps go to 0 for a part p of their way: the worst of p decides."""
    form, name, rate = case
    schedule = SCHEDULES[name]
    is_tracked, is_damped = form.startswith("tracking"), form.endswith("damped")
    gossip = (gx.gradient_tracking if is_tracked else gx.sgp)(schedule, damped=is_damped)
    parts = 2.0 ** -np.arange(0, 3.5, 0.25)
    start = np.random.default_rng(0).normal(size=(schedule.size, 1))
    with np.errstate(all="ignore"):
        results = oracle.push_sum_outer(
            schedule.matrices(),
            np.tile(start, (1, len(parts))),
            range(2 * ROUNDS),
            oracle.sgd(rate, **NESTEROV),
            1,
            is_tracked,
            is_damped,
            move=lambda y, k: -parts * y,
        )
        sizes = [np.abs(r["x"]).max() for r in results]
    assert OVER_GOSSIP[case] == (not sizes[-1] <= 10 * max(sizes[:100]))
    assert OVER_GOSSIP[case] == is_refused(
        lambda: gx.outer(optax.sgd(0.1), optax.sgd(rate, **NESTEROV), 50, average=gossip)
    )


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("name", ["directed ring", "one peer", "pairs"])
def test_quasi_global_momentum_is_refused_where_its_oracle_diverges(name, nesterov):
    schedule = SCHEDULES[name]
    starts = np.random.default_rng(0).normal(size=(N, 1))
    zeros = np.zeros((ROUNDS, N, 1))
    results = oracle.quasi_global(
        schedule.matrices(), starts, zeros, lambda k: 0.1, 0.9, 0.9, nesterov
    )
    drifts = simulate(results)
    assert drifts == (name == "directed ring")
    assert drifts == is_refused(lambda: gx.quasi_global(schedule, 0.1, nesterov=nesterov))


@pytest.mark.parametrize(
    "outer_tx",
    [
        optax.inject_hyperparams(optax.sgd)(0.7, 0.9),
        optax.sgd(optax.linear_schedule(0.0, 0.7, 100), 0.9),
        optax.sgd(optax.cosine_decay_schedule(0.7, 100), 0.9),
        optax.chain(optax.trace(0.9, accumulator_dtype=jnp.bfloat16), optax.scale(-0.7)),
    ],
    ids=["injected", "warm-up", "decay", "bfloat16"],
)
def test_the_rate_is_found_wherever_it_stands(outer_tx):
    with pytest.raises(ValueError, match=REFUSED):
        gx.outer(optax.sgd(0.1), outer_tx, 5, average=SCHEDULES["directed ring"])


def test_every_part_of_a_piecewise_schedule_counts():
    parts = {0: topology.complete(N), 300: SCHEDULES["directed ring"]}
    with pytest.raises(ValueError, match=REFUSED):
        gx.outer(optax.sgd(0.1), optax.sgd(0.7, 0.9), 5, average=topology.piecewise(parts))
