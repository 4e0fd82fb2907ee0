"""The algorithms of contrib against the dense float64 oracle, under vmap and on a mesh of 4."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import optax
import oracle
import pytest
from algorithms.problems import SHAPES, flatten, make_problem, take_step, unflatten
from modes import run
from promotion import promoting

import gossipjax as gx
from gossipjax.contrib.sparta import draw_slice

N = 4
STEPS = 7
RATE = 0.3
ADAM: dict[str, Any] = {"b1": 0.8, "b2": 0.9, "eps": 1e-3}
PERIODS = (2, 3, 4)  # of desloc
SLICES = 3  # of sparta
LAZY_RING = gx.topology.from_matrices(oracle.lazy_ring(N))


def mark_slice(step):
    """The slice of the tree that `sparta` averages; its leaves are in the order of JAX."""
    marks = []
    for name, shape in SHAPES.items():
        size = int(np.prod(shape))
        leaf = sorted(SHAPES).index(name)
        with jax.enable_x64(False):
            places = draw_slice(size, SLICES, 5, leaf, jnp.int32(step))
        marks.append(np.isin(np.arange(size), places))
    return np.concatenate(marks)


RULES = [
    (gx.contrib.ClippedGossip(0.7), partial(oracle.clipped_gossip, radius=0.7)),
    (gx.contrib.ClippedGossip(liar_weight=0.2), partial(oracle.clipped_gossip, liar_weight=0.2)),
    (gx.contrib.ClippedSum(0.2), partial(oracle.clipped_sum, liar_weight=0.2)),
    (gx.contrib.NearestNeighbors(0.2), partial(oracle.nearest_neighbors, liar_weight=0.2)),
    (gx.contrib.TrimmedMean(1), partial(oracle.trimmed_mean, liars=1)),
    (gx.contrib.CoordinateMedian(), oracle.coordinate_median),
]

# Name -> the transform of a doubly stochastic schedule, and its oracle.
ROWS = {
    "d2": (
        lambda schedule: gx.contrib.d2(LAZY_RING),
        lambda matrices, x, u: oracle.d2(oracle.lazy_ring(N), x, u),
    ),
    "deepsqueeze": (
        lambda schedule: gx.contrib.deepsqueeze(schedule, gx.wire.top_k(0.3), 0.4),
        partial(oracle.deepsqueeze, gamma=0.4, compress=lambda v, *_: oracle.largest(v, 3)),
    ),
    "desloc": (
        lambda schedule: gx.contrib.desloc(
            promoting(optax.adam(RATE, *ADAM.values())), schedule, *PERIODS
        ),
        partial(oracle.desloc, rate=RATE, **ADAM, periods=PERIODS),
    ),
    "mixed_momentum": (
        lambda schedule: gx.contrib.mixed_momentum(schedule, RATE, momentum=0.8, nesterov=True),
        partial(oracle.mixed_momentum, rate=RATE, momentum=0.8, nesterov=True),
    ),
    "quasi_global_adam": (
        lambda schedule: gx.contrib.quasi_global_adam(schedule, RATE, **ADAM),
        partial(oracle.quasi_global_adam, rate=RATE, **ADAM),
    ),
    "relay": (
        lambda schedule: gx.contrib.relay(nx.full_rary_tree(2, N)),
        lambda matrices, x, u: oracle.relay(oracle.binary_tree_distances(N), x, u),
    ),
    **{
        type(rule).__name__ + ("" if number != 1 else " of a weight"): (
            lambda schedule, rule=rule: gx.contrib.robust_gossip(schedule, rule),
            partial(oracle.robust, rule=expected),
        )
        for number, (rule, expected) in enumerate(RULES)
    },
    "sparta": (
        lambda schedule: gx.contrib.sparta(schedule, 1 / SLICES, seed=5),
        partial(oracle.sparta, draw=mark_slice),
    ),
}


CASES = [(name, "vmap") for name in ROWS]
CASES += [(name, "shard_map") for name in {*ROWS} - {type(rule).__name__ for rule, _ in RULES[1:]}]


@pytest.mark.parametrize(("name", "mode"), sorted(CASES))
def test_equals_the_oracle_round_by_round(name, mode):
    make, expect = ROWS[name]
    rng, starts, all_updates = make_problem(N, jnp.float32, STEPS)
    schedule = gx.topology.from_matrices(oracle.doubly_stochastic(rng, N))
    tx = make(schedule)

    def history(params, updates):
        def body(carry, inputs):
            carry = take_step(tx, carry, *inputs)
            return carry, carry[0]

        return jax.lax.scan(body, (params, tx.init(params)), (updates, jnp.arange(STEPS)))[1]

    models = run(mode, history, N)(unflatten(starts), unflatten(all_updates.swapaxes(0, 1)))
    expected = np.stack([z for z, *_ in expect(schedule.matrices(), starts, all_updates)], 1)
    np.testing.assert_allclose(flatten(models, 2), expected, rtol=1e-5, atol=2e-5)


def test_every_algorithm_has_a_row():
    others = {"adaptive_consensus", "robust_gossip"}  # a rate, asked below; what the rules are for
    assert set(ROWS) - {"ClippedGossip of a weight"} == set(gx.contrib.__all__) - others


def test_adaptive_consensus_follows_the_rate_from_the_end_of_its_warm_up():
    with jax.numpy_dtype_promotion("standard"):
        rate = optax.warmup_cosine_decay_schedule(0.0, 0.4, 3, 11)
        strength = gx.contrib.adaptive_consensus(rate, start=3, power=2.0, minimum=0.25)
        k = np.arange(12)
        share = (1 + np.cos(np.pi * (k - 3) / 8)) / 2
        expected = np.where(k < 3, 1.0, 0.75 * share**2 + 0.25)
        np.testing.assert_allclose(jax.vmap(strength)(k), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "argument", "message"),
    [
        (gx.contrib.d2, gx.topology.ring(4), "eigenvalues above -1/3"),
        (gx.contrib.d2, gx.topology.one_peer_exponential(4), "one round"),
        (
            lambda rule: gx.contrib.robust_gossip(gx.topology.ring(4), rule),
            gx.faults.Lying(gx.contrib.ClippedSum(0.2), (3,), "alie"),
            "0.333333 and more in this schedule, got 0.2",
        ),
        (lambda liars: gx.faults.Lying(max, liars, "alie"), 3, r"numbers of nodes, \(3,\), got 3"),
        (gx.contrib.relay, nx.cycle_graph(3), "undirected tree"),
        (gx.contrib.relay, nx.Graph([(0, 1), (2, 3)]), "undirected tree"),
        (gx.contrib.relay, nx.path_graph("abc"), "nodes 0, ..., 2"),
    ],
)
def test_refused(make, argument, message):
    with pytest.raises(ValueError, match=message):
        make(argument)


@pytest.mark.parametrize("name", ["d2", "accumulate"])
def test_a_name_that_went_says_where_it_is(name):
    place = {"d2": "contrib.d2", "accumulate": "accumulate_gradients"}[name]
    with pytest.raises(AttributeError, match=rf"gx\.{name} went: use gx\.{place}\."):
        getattr(gx, name)


LIES = {
    "sign flip": lambda own, honest, weights, truth: -2 * truth,
    "alie": lambda own, honest, weights, truth: (
        np.vstack([own, honest]).mean(0) - 2 * np.vstack([own, honest]).std(0)
    ),
    "inner product": lambda own, honest, weights, truth: -2 * np.vstack([own, honest]).mean(0),
    "dissensus": lambda own, honest, weights, truth: own - 2 * weights @ (honest - own),
}


@pytest.mark.parametrize("attack", LIES)
def test_lies_are_as_their_papers_say_and_rules_hold_against_one_that_is_not_finite(attack):
    """Node 2 of 5 lies to all; the plain sum and the median get the same lies."""
    n = 5
    x = np.random.default_rng(0).normal(size=(n, 3)).astype(np.float32)
    schedule = gx.topology.complete(n)

    def after(rule, x=x):
        tx = gx.contrib.robust_gossip(schedule, gx.faults.Lying(rule, (2,), attack, 2.0))
        program = gx.spmd(lambda x: x + tx.update(jnp.zeros(3), tx.init(x), x, step=0)[0], nodes=n)
        return np.asarray(program(x))

    plain, median = after(gx.contrib.ClippedGossip(np.inf)), after(gx.contrib.CoordinateMedian())
    for i in (0, 1, 3, 4):
        others = [j for j in range(n) if j not in (i, 2)]
        weights = np.full(len(others), 1.0)  # those of one liar, 1 / n, are left in the ratio
        lie = LIES[attack](x[i], x[others], weights, x[2])
        heard = np.vstack([x[i], x[others], lie])
        np.testing.assert_allclose(plain[i], heard.mean(0), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(median[i], np.median(heard, 0), rtol=1e-4, atol=1e-5)
    if attack == "sign flip":
        for rule, _ in RULES:
            bad = x.copy()
            bad[2] = np.nan
            assert np.isfinite(after(rule, bad)[[0, 1, 3, 4]]).all(), rule


@pytest.mark.parametrize("rule", [gx.contrib.TrimmedMean(0), gx.contrib.CoordinateMedian()])
def test_where_messages_have_all_weight_the_own_value_counts_only_without_any(rule):
    """As in `gx.outer`, also if one of the messages is not finite."""
    weights = jnp.full(3, 1 / 3)
    senders = jnp.arange(3, dtype=jnp.int32)
    own = jnp.float32(9.0)
    assert float(rule(own, jnp.array([jnp.nan, 2.0, 4.0]), weights, senders)) == 3
    assert float(rule(own, jnp.full(3, jnp.nan), weights, senders)) == 9
