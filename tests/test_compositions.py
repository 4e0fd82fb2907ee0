"""Random compositions of all that can be composed, against the float64 oracle.

Each is run by calls with static steps, by calls with traced steps, and by `scan`.
`COMPOSITIONS=300 pytest -n 2 -m lab tests/test_compositions.py` asks 300 of them.
"""

import os
import random
from typing import Any

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import optax
import oracle
import pytest
from jax.sharding import Mesh

import gossipjax as gx

COUNT = int(os.environ.get("COMPOSITIONS", "8"))
N = 4
STEPS = 8
SIZES = {"a": 5, "b": 6}  # of the leaves
T = gx.topology
SCHEDULES = {
    "one peer": T.one_peer_exponential(N),
    "ring": T.ring(N),
    "random pairs": T.random_pairs(N, 3, seed=1),
    "every second step": T.exponential(N).every(2),
    "directed ring": T.directed_ring(N),
    "a graph": T.from_graph(nx.path_graph(N)),
    "random peer": T.random_peer(N, rounds=3, seed=0),
    "star": T.star(N),
}
WIRES = {None: 0.0, "bfloat16": 0.05, "int8": 0.1}
PLACES = {
    "simulated": lambda: gx.Nodes(N),
    "a mesh": lambda: gx.Nodes(mesh=Mesh(np.array(jax.devices()[:N]), ("nodes",))),
    "two per device": lambda: gx.Nodes(N, mesh=Mesh(np.array(jax.devices()[:2]), ("nodes",))),
}


def outer(matrices, x, updates, parts, delay, mix):
    optimizer = oracle.sgd(0.7, 0.5)
    options: Any = {"parts": parts, "delay": delay, "mix": mix}
    return [r[0] for r in oracle.outer(matrices, x, updates, optimizer, 3, **options)]


def draw_algorithm(rng, schedule, codec):
    """A gossip, or an outer optimizer, and `(matrices, x, updates) -> models` of the oracle."""
    early = rng.choice(["combine-while-adapting", "adapt-then-combine"])
    overlap = rng.choice([1, 2])
    damped = rng.random() < 0.5
    algorithms = {
        "allreduce": (gx.allreduce(wire=codec), oracle.allreduce),
        "sgp": (
            gx.sgp(schedule, damped=damped, wire=codec),
            lambda P, x, u: oracle.sgp(P, x, u, damped and not schedule.is_doubly_stochastic),
        ),
        "osgp": (
            gx.osgp(schedule, overlap, wire=codec),
            lambda P, x, u: oracle.osgp(P, x, u, overlap),
        ),
        "gradient_tracking": (
            gx.gradient_tracking(schedule, wire=codec),
            oracle.gradient_tracking,
        ),
    }
    if schedule.is_doubly_stochastic:
        algorithms["dpsgd"] = (
            gx.dpsgd(schedule, order=early, wire=codec),
            lambda P, x, u: oracle.dpsgd(P, x, u, adapt_first=early == "adapt-then-combine"),
        )
    fragments = rng.choice([1, 2])
    delay = rng.choice([0, 1])
    strength = rng.choice([1.0, 0.5])
    ends = np.cumsum([0, *SIZES.values()])
    parts = [slice(*ends[[0, -1]])] if fragments == 1 else [slice(*ends[i : i + 2]) for i in (0, 1)]
    algorithms["outer"] = (
        gx.outer(
            optax.identity(),
            optax.sgd(0.7, momentum=0.5),
            3,
            fragments=fragments,
            delay=delay,
            strength=strength,
            wire=codec,
        ),
        lambda P, x, u: outer(P, x, u, parts, delay, 1 - strength),
    )
    return rng.choice(sorted(algorithms.items()))


def to_tree(flat):
    """`[..., D]` -> a tree."""
    cut = SIZES["a"]
    return {
        "a": jnp.asarray(flat[..., :cut]),
        "b": jnp.asarray(flat[..., cut:].reshape(*flat.shape[:-1], 3, 2)),
    }


def to_flat(tree):
    return np.concatenate([np.asarray(tree[k]).reshape(N, -1) for k in SIZES], axis=1)


@pytest.mark.lab
@pytest.mark.parametrize("seed", range(COUNT))
def test_a_composition_equals_the_oracle_in_all_three_ways(seed):
    rng = random.Random(seed)
    numbers = np.random.default_rng(seed)
    wire, noise = rng.choice(list(WIRES.items()))
    graph, schedule = rng.choice(sorted(SCHEDULES.items()))
    codec = None if wire is None else getattr(gx.wire, wire)()
    place = rng.choice(sorted(PLACES))
    every = rng.choice([1, 1, 2])
    shares = numbers.uniform(0.5, 2, N) if rng.random() < 0.3 else None
    name, (gossip, expect) = draw_algorithm(rng, schedule, codec)
    is_masked = rng.random() < 0.3 and name != "outer"  # one leaf has no two fragments
    where = f"{name}, {graph}, {wire}, {place}, {every=}, {shares=}, {is_masked=}"

    starts = np.tile(numbers.normal(size=sum(SIZES.values())), (N, 1))
    gradients = numbers.normal(size=(STEPS, N, every, sum(SIZES.values())))
    updates = gradients.mean(axis=2)
    if shares is not None:
        updates = updates * (shares / shares.mean())[:, None]
    exchanged = slice(0, SIZES["a"]) if is_masked else slice(None)
    expected = starts + np.cumsum(updates, axis=0)  # of what is masked
    results = expect(schedule.matrices(), starts[:, exchanged], updates[..., exchanged])
    models = [result if name == "outer" else result[0] for result in results]

    with jax.enable_x64(True):
        parts = [gossip] if shares is None else [gx.weighted(shares), gossip]
        inner = gossip if len(parts) == 1 else optax.chain(*parts)
        tx = optax.masked(inner, {"a": True, "b": False}) if is_masked else inner
        if is_masked and shares is not None:  # what is masked is not weighted either
            unweighted = gradients.mean(axis=2)
            expected = starts + np.cumsum(unweighted, axis=0)
        for k, model in enumerate(models):
            expected[k][:, exchanged] = model

        def one(params, batch):
            del params
            return jax.tree.map(lambda x: x[0], batch), ()

        taken = gx.accumulate_gradients(one, every)
        nodes = PLACES[place]()
        ends = []
        inputs = to_tree(gradients)
        for limit in (None, 1):
            step = gx.TrainStep(taken, tx, nodes, max_programs=limit, check_mass=1)
            params, state = nodes.init(tx, to_tree(starts[0]))
            for k in range(STEPS):
                params, state, _ = step(k, params, state, jax.tree.map(lambda x, k=k: x[k], inputs))
                errors = np.abs(to_flat(params) - expected[k])
                assert errors.max() <= noise * np.abs(expected[k]).max() + 1e-9, f"{where}, {k}"
            ends.append(to_flat(params))
        step = gx.TrainStep(taken, tx, nodes, check_mass=3)
        params, _, _ = step.scan(0, *nodes.init(tx, to_tree(starts[0])), inputs)
        ends.append(to_flat(params))
    for end in ends[1:]:
        np.testing.assert_allclose(end, ends[0], rtol=0, atol=1e-11, err_msg=where)
