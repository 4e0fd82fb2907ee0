"""Fabrics, against a walk of every message hop by hop; the draws of slowness."""

import itertools
import subprocess
import sys

import numpy as np
import pytest

import gossipjax as gx
from gossipjax.cost_model import (
    Method,
    Network,
    Torus,
    Workload,
    networks,
    parse_slowness,
    predict_step,
)


def walk(start: tuple[int, ...], end: tuple[int, ...], shape: tuple[int, ...]) -> list[object]:
    """Links of the route: (place, axis, direction), the shorter way round, forward if equal."""
    at = list(start)
    links = []
    for axis, extent in enumerate(shape):
        forward = (end[axis] - at[axis]) % extent
        direction = 1 if forward <= extent - forward else -1
        while at[axis] != end[axis]:
            links.append((tuple(at), axis, direction))
            at[axis] = (at[axis] + direction) % extent
    return links


@pytest.mark.parametrize("shape", [(8,), (3, 4), (4, 4), (2, 3, 2)])
def test_a_torus_is_a_walk_along_its_dimensions(shape):
    places = list(itertools.product(*map(range, shape)))
    rng = np.random.default_rng(0)
    for _ in range(5):
        receivers = rng.permutation(len(places))
        routes = [walk(places[j], places[receivers[j]], shape) for j in range(len(places))]
        loads: dict[object, int] = {}
        for link in itertools.chain(*routes):
            loads[link] = loads.get(link, 0) + 1
        expected = [max((loads[link] for link in route), default=1) for route in routes]
        per_byte, latency = Torus(shape).find_costs(receivers, bandwidth=2.0, latency=0.5)
        np.testing.assert_allclose(per_byte, np.array(expected) / 2)
        np.testing.assert_allclose(latency, [0.5 * len(route) for route in routes])


def test_nodes_that_send_nothing_take_no_time():
    network = Network(1e9, latency=1.0, fabric=Torus((4,)))
    assert network.message_seconds([0, 2, 1, 3], 1e9).tolist() == [0, 2, 2, 0]


def test_gossip_may_get_less_of_a_link():
    network = Network(4e9, gossip_bandwidth=1e9)
    assert network.message_seconds([1, 0], 1e9).tolist() == [1, 1]
    assert network.message_seconds([1, 0], 1e9, is_gossip=False).tolist() == [0.25, 0.25]


def test_factors_depend_on_the_seed_alone():
    """Other processes draw the same: these are NumPy's own streams."""
    drawn = parse_slowness("random").draw(nodes=3, steps=7, seed=5)
    np.testing.assert_array_equal(drawn, np.random.default_rng(5).choice((1, 2, 4), (7, 3)))
    drawn = parse_slowness("lognormal").draw(nodes=3, steps=7, seed=5)
    np.testing.assert_array_equal(drawn, np.random.default_rng(5).lognormal(0, 0.5, (7, 3)))


def test_networks_have_names():
    for network in networks.ALL.values():
        assert network.name
        assert predict_step(Method("single"), Workload(), network, 256).seconds == 0.228


def test_the_model_needs_numpy_alone():
    """Of what it imports; the package around it needs JAX."""
    code = (
        "import sys, types; package = types.ModuleType('gossipjax'); "
        f"package.__path__ = {list(gx.__path__)!r}; sys.modules['gossipjax'] = package; "
        "from gossipjax import cost_model; print('jax' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.strip() == "False", run.stderr
