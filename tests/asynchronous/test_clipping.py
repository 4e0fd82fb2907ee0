"""`join(clip=)`: a model that is too far is pulled nearer, and its weight stays."""

import functools
import json
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from real_nodes import gradients

import gossipjax.asynchronous as ga
from gossipjax.asynchronous import _clipping as clipping
from gossipjax.asynchronous._messages import CHUNK, Mass
from tests.asynchronous.test_replay import require_same_replay, run_job

RANDOM = np.random.default_rng(0)
RANDOM_PEERS = ga.sgp(graph="random")
SIZES = (3, CHUNK + 5)  # of two buffers


def make_mass(w, models, dtypes=("float32", "bfloat16"), exponent=0):
    buffers = [
        jnp.asarray(w * RANDOM.normal(size=size), dtype)
        for _ in range(models)
        for size, dtype in zip(SIZES, dtypes, strict=True)
    ]
    return Mass(tuple(map(np.asarray, buffers)), w, exponent)


def split(mass, models):
    """The model, and the momentum if there is one, in float64, each as one array."""
    whole = np.concatenate([np.asarray(x, np.float64) for x in mass.x]) / mass.w
    return np.split(whole, models)


@pytest.mark.parametrize("models", [1, 2])
def test_a_pulled_mass_is_that_of_the_formula(models):
    mass, own = make_mass(0.25, models, exponent=-9), make_mass(1.5, models)
    distances = clipping.measure(mass, own, models)
    limits = (distances[0] / 3, *(2 * distance for distance in distances[1:]))
    pulled, parts = clipping.pull(mass, own, distances, limits)
    assert parts == (pytest.approx(1 / 3), 1.0)[:models]
    assert (pulled.w, pulled.exponent) == (mass.w, mass.exponent)
    groups = zip(split(mass, models), split(own, models), split(pulled, models), strict=True)
    for (model, z, got), d, limit in zip(groups, distances, limits, strict=True):
        norm = np.linalg.norm(model - z)
        assert d == pytest.approx(norm, rel=1e-5)
        expected = z + (model - z) * min(1, limit / norm)
        np.testing.assert_allclose(got, expected, rtol=1e-2, atol=1e-2)  # bfloat16
        np.testing.assert_allclose(got[: SIZES[0]], expected[: SIZES[0]], rtol=1e-5, atol=1e-6)
    assert [x.dtype for x in pulled.x] == [x.dtype for x in mass.x]
    assert clipping.pull(mass, own, distances, distances)[0] is mass  # which is near enough


@pytest.mark.parametrize(("huge", "w"), [(1e30, 1.0), (1e300, 1.0), (1e8, 1e-300)])
def test_however_far_a_model_is_the_pulled_one_is_near(huge, w):
    dtype = np.float32 if huge == 1e30 else np.float64
    mass, own = Mass((np.full(9, huge, dtype),), w), Mass((np.full(9, 1, dtype),), 1.0)
    pulled, _ = clipping.pull(mass, own, clipping.measure(mass, own, 1), (0.5,))
    assert np.linalg.norm(pulled.x[0] / w - own.x[0]) < 0.51


def test_the_running_norm_is_moved_neither_by_one_share_nor_by_one_node():
    honest = [(1.0, 3.0), (2.0, 4.0), (1.0, 3.0)]
    liar = [(1e9, 1e9)] * 9
    find = functools.partial(clipping.find_limits, clip=2.0, num_models=2)
    assert find([]) == find([honest[:1], []]) == find([liar[:1]]) == (0.0, 0.0)
    assert find([honest]) == find([[*honest, *liar[:1]]]) == (2.0, 6.0)
    assert find([honest[:1], liar]) == find([honest, honest, liar]) == (2.0, 6.0)


@pytest.mark.parametrize("algorithm", [ga.sgp(), ga.outer(4, learning_rate=0.5, momentum=0.8)])
def test_clipped_shares_keep_the_weight_and_are_replayed(tmp_path, algorithm):
    journals, seen = run_job(tmp_path, algorithm, 4, clip=1.0)
    lines = [json.loads(line) for path in journals for line in path.read_text().splitlines()]
    parts = [line["part"] for line in lines if line["event"] == "receive" and "part" in line]
    assert len(parts) > 5
    assert {len(part) for part in parts} == {algorithm.models}
    require_same_replay(journals, seen)
    assert abs(ga.account(journals).difference) < 1e-12


def shout(params, goal):
    return 1000 * (params - goal - 1), None


@pytest.mark.parametrize(
    ("algorithm", "clip"),
    [(RANDOM_PEERS, None), (RANDOM_PEERS, 3.0), (ga.outer(2, momentum=0.5), 3.0)],
)
def test_a_node_that_shouts_does_not_move_the_others_far(algorithm, clip):
    """Nor the average at the end, in which each node says what it holds."""
    nodes = []
    for place in range(5):
        addresses = [node.address for node in nodes]
        options = {"place": place, "is_founder": True, "patience": 3.0, "clip": clip}
        tx = optax.sgd(0.05)
        nodes.append(ga.join(tx, jnp.zeros(6), address=addresses, algorithm=algorithm, **options))
    # Its model grows by 50 a step; one that overflows would not be sent.
    for step in range(40):
        for node in nodes:
            shouts = node.place == 4 and step % 20 >= 16
            node.step(shout if shouts else gradients, np.float32(1.0))
    far = max(abs(node.params - 1).max() for node in nodes[:4])
    counts = [node.statistics.dropped for node in nodes[:4]]
    with ThreadPoolExecutor(len(nodes)) as pool:
        averages = list(pool.map(lambda node: node.average(), nodes))
    for node in nodes:
        node.leave()
    assert all((average == averages[0]).all() for average in averages)
    error = abs(averages[0] - 1).max()
    clipped = sum(n for count in counts for text, n in count.items() if "place 4" in text)
    if clip is None:
        assert min(far, error) > 10
        assert not clipped
    else:
        assert max(far, error) < 2
        assert clipped > 2


def test_final_models_are_pulled_to_their_middle():
    rows = RANDOM.normal(size=(5, 7))
    rows[2] = -1e4
    masses = [Mass((w * row,), w) for w, row in zip((0.5, 1, 2, 0.25, 1), rows, strict=True)]
    middle = np.median(rows, axis=0)
    distances = np.linalg.norm(rows - middle, axis=1)
    limit = 2 * np.sort(distances)[2]
    pulled = clipping.pull_finals(masses, 2.0, 1)
    for mass, row, distance, before in zip(pulled, rows, distances, masses, strict=True):
        expected = middle + (row - middle) * min(1, limit / distance)
        np.testing.assert_allclose(mass.x[0] / mass.w, expected, rtol=1e-5)
        assert (mass is before) == (distance <= limit)
