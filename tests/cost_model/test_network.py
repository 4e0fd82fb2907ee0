"""Fabrics, against a walk of every message hop by hop; slowness, against many draws."""

import itertools

import numpy as np
import pytest

from gossipjax.cost_model import Islands, Network, Slowness, Torus, parse_slowness


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


def test_a_hop_on_a_torus_pays_its_distance():
    network = Network(45e9, latency=1e-6, fabric=Torus((16, 16)))
    for hop in (1, 2, 4, 8):
        receivers = np.roll(np.arange(256).reshape(16, 16), -hop, axis=1).ravel()
        assert network.congestion(receivers) == hop
        seconds = network.message_seconds(receivers, size=45e6)
        np.testing.assert_allclose(seconds, hop * (1e-3 + 1e-6))


def test_nodes_that_send_nothing_take_no_time():
    network = Network(1e9, latency=1.0, fabric=Torus((4,)))
    assert network.message_seconds([0, 2, 1, 3], 1e9).tolist() == [0, 2, 2, 0]


def test_islands_have_two_bandwidths():
    network = Network(1e9, latency=0.1, fabric=Islands(4, bandwidth=1e10, latency=0.01))
    inside = network.message_seconds([1, 0, 3, 2, 5, 4, 7, 6], size=1e9)
    np.testing.assert_allclose(inside, 0.11)
    outside = (np.arange(8) + 4) % 8
    np.testing.assert_allclose(network.message_seconds(outside, size=1e9), 1.1)
    assert network.congestion(outside) == 1
    assert Islands(4, 1.0).count(2) == 1


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


@pytest.mark.parametrize("name", ["none", "2x", "4x", "random", "lognormal"])
def test_expectations_are_means_of_many_draws(name):
    slowness = parse_slowness(name)
    for nodes in (1, 2, 8):
        factors = slowness.draw(nodes, steps=40_000)  # [T, N]
        slowest = factors.max(axis=1).mean()
        assert slowness.expect_slowest(nodes) == pytest.approx(slowest, rel=0.02)
        pace = (1 / factors.mean(axis=0)).mean()
        assert slowness.expect_pace(nodes) == pytest.approx(pace, rel=0.02)


def test_a_fast_node_does_not_slow_others():
    assert Slowness("constant", 0.5).expect_slowest(4) == 1
    assert Slowness("constant", 0.5).expect_slowest(1) == 0.5
