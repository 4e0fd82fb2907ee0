"""Networks, and the draws of slowness."""

import numpy as np

from gossipjax.cost_model import (
    Method,
    Network,
    Workload,
    networks,
    parse_slowness,
    predict_step,
)


def test_gossip_may_get_less_of_a_link():
    network = Network(4e9, gossip_bandwidth=1e9)
    assert network.message_seconds(1e9) == 1
    assert network.message_seconds(1e9, is_gossip=False) == 0.25


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
