"""Real nodes on loopback: each model, at each step, is the one that the journals tell."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import real_nodes

import gossipjax as gx
import gossipjax.asynchronous as ga
from experiments.fault_injection.replay import replay

RATE, MOMENTUM = 0.05, 0.9
PULL_TX = optax.sgd(0.05)
START = {"a": jnp.arange(5.0), "b": jnp.ones((2, 3))}
TX = optax.chain(optax.trace(MOMENTUM), optax.scale(-RATE))


def gradients(params, goal):
    return jax.tree.map(lambda x: 0.1 * jnp.sin(x) + x - goal, params), params


def inputs(place, step):
    return (place + np.sin(step),)


def run_job(folder, algorithm, size, steps=30, **more):
    """Nodes of which the last joins the others; each makes its steps when chance says so."""
    nodes, seen = [], {}
    for place in range(size):
        node = ga.join(
            TX,
            START,
            address=[node.address for node in nodes],
            algorithm=algorithm,
            place=place,
            is_founder=place < size - 1,
            node_weight=1 + place,
            **more,
            journal=folder / f"{place}.jsonl",
        )
        nodes.append(node)
    rng = random.Random(size)
    for _ in range(steps * size):
        node = rng.choice(nodes)
        step = node.statistics.steps
        aux = node.step(gradients, *inputs(node.place, step))
        seen[node.place, step] = jax.tree.map(np.asarray, aux)
    for node in reversed(nodes):
        node.leave()
    return sorted(folder.glob("*.jsonl")), seen


def require_same_replay(journals, seen):
    steps = {(s.place, s.step): s.params for s in replay(journals, TX, START, gradients, inputs)}
    assert steps.keys() == seen.keys()
    for key, params in steps.items():
        for name, value in seen[key].items():
            np.testing.assert_allclose(params[name], value, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("algorithm", "size"),
    [
        (ga.sgp(), 5),
        (ga.adpsgd(), 3),
        (ga.outer(4, learning_rate=0.5, momentum=0.8), 4),
        (ga.outer(3, learning_rate=0.7, momentum=0.0, graph="exponential"), 3),
    ],
)
def test_models_are_those_of_the_oracle(tmp_path, algorithm, size):
    require_same_replay(*run_job(tmp_path, algorithm, size))


def test_halves_that_go_back_are_replayed(tmp_path):
    """Each node gives half of all that it holds for most of the shares that come."""
    journals, seen = run_job(tmp_path, ga.sgp(graph="random"), 4, max_received=1)
    assert sum(path.read_text().count('"grant"') for path in journals) > 10
    require_same_replay(journals, seen)
    assert abs(ga.account(journals).difference) < 1e-12


def stay(params):
    return 0 * params, None


def test_narrow_messages_keep_the_average():
    """The sender keeps what rounding leaves over."""
    options = {"algorithm": ga.sgp(), "wire": gx.wire.int8(block=8), "is_founder": True}
    starts = [jnp.linspace(0.1, 3.0, 20), jnp.linspace(7.0, -1.0, 20)]
    with ga.join(PULL_TX, starts[0], **options) as a:
        with ga.join(PULL_TX, starts[1], place=1, address=a.address, **options) as b:
            for _ in range(20):
                for node in (a, b):
                    node.step(stay)
            assert min(node.statistics.sent for node in (a, b)) > 0
        np.testing.assert_allclose(a.params, sum(starts) / 2, rtol=1e-5)


@pytest.mark.parametrize("algorithm", [ga.sgp(), ga.outer(2, learning_rate=1.0, momentum=0.5)])
def test_a_slow_node_counts_as_the_others_do(algorithm):
    """Each node draws the model to an axis of its own; the first makes a quarter of the steps."""
    size = 4
    goals = jnp.eye(size)
    nodes = []
    for place in range(size):
        addresses = [node.address for node in nodes]
        options = {"algorithm": algorithm, "place": place, "is_founder": True}
        nodes.append(ga.join(PULL_TX, jnp.zeros(size), address=addresses, **options))

    turns = 80
    models = []
    for turn in range(turns):
        for node in nodes * 4:
            if node.place or not turn % 4:
                node.step(real_nodes.gradients, goals[node.place])
        models.append(np.mean([node.params for node in nodes], axis=0))
    for node in nodes:
        node.leave()
    share = np.mean(models[turns // 2 :], axis=0)
    assert share.sum() == pytest.approx(1, abs=0.05)
    assert 0.15 < share[0] < 0.35  # of a quarter; 0.08 if every step counted alike
