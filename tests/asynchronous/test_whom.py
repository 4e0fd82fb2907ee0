"""Whom a node sends to where links differ."""

from collections import Counter

import pytest
from fake_network import PATIENCE, Network
from test_protocol import deliver_all

import gossipjax as gx
from gossipjax.asynchronous._messages import Identity

PEERS = [Identity(place, f"life {place}", f"127.0.0.1:{place}") for place in range(1, 5)]
OWN = Identity(0, "own", "127.0.0.1:9")
RATE = gx.asynchronous.sgp(graph="rate")


def count_draws(seconds, algorithm=RATE, steps=4000):
    peers = (algorithm.choose(PEERS, OWN, step, seconds) for step in range(steps))
    return Counter(peer.place for peer in peers if peer is not None)


def test_links_that_take_longer_are_drawn_as_much_less():
    """One draw in 10 is uniform; a peer that was not measured counts as the fastest."""
    counts = count_draws({PEERS[0]: 8.0, PEERS[1]: 2.0, PEERS[2]: 1.0})
    whole = 1 / 8 + 1 / 2 + 1 + 1
    for place, part in {1: 1 / 8, 2: 1 / 2, 3: 1, 4: 1}.items():
        expected = 4000 * (0.1 / 4 + 0.9 * part / whole)
        assert counts[place] == pytest.approx(expected, abs=4 * expected**0.5)


def test_without_a_measurement_draws_are_uniform():
    assert all(count == pytest.approx(1000, abs=120) for count in count_draws({}).values())
    counts = count_draws({PEERS[0]: 8.0}, gx.asynchronous.sgp(graph="random"))
    assert counts[1] == pytest.approx(1000, abs=120)


def test_of_a_bipartite_graph_even_places_ask_odd_ones():
    algorithm = gx.asynchronous.adpsgd(graph="bipartite")
    assert count_draws({}, algorithm, steps=100).keys() == {1, 3}
    assert algorithm.choose(PEERS[1:], PEERS[0], 0, {}) is None


def test_a_node_measures_how_long_its_shares_take():
    """The newest counts by half; what a peer has not answered says nothing yet."""
    network = Network(2)
    for _ in range(3):
        network.advance(PATIENCE / 50)
        deliver_all(network)
    first = network.processes[0]

    def measure():
        """The seconds that the algorithm is told when it draws."""
        said = []
        first.node.choose(lambda peers, own, step, seconds: said.append(seconds), 0)
        return list(said[0].values())

    other = network.processes[1].node.members.identity
    for seconds, before, after in ((0.1, [], 0.1), (0.3, [pytest.approx(0.1)], 0.2)):
        first.make_step("sgp")
        network.collect()
        assert not first.node.may_send(other, is_share=True)
        assert measure() == before
        network.now += seconds
        deliver_all(network)
        assert measure() == [pytest.approx(after)]
