"""Simulated nodes: against the closed prediction, closed forms, and a recursion by hand."""

import math
from typing import Literal

import numpy as np
import pytest

import gossipjax as gx
from gossipjax.cost_model import (
    Exchange,
    Method,
    Network,
    Slowness,
    Workload,
    from_transform,
    predict_step,
    simulate,
)

WORKLOAD = Workload(parameters=25e6, compute_seconds=0.2, examples=256)
HOSTS = Network(bandwidth=1e9, latency=1e-4, host_copy=1.1e9)
SLOW = Network(bandwidth=25e6, latency=1e-3)
FREE = Network(bandwidth=1e15)


def make_free(schedule: gx.Schedule, awaits: Literal["link", "nobody"] = "nobody") -> Method:
    return Method("asynchronous", (Exchange(schedule, is_early=True, awaits=awaits),))


def test_a_slow_node_slows_all_that_wait_for_it_and_no_others():
    nodes = 8
    factors = Slowness("constant", 4.0)
    peer = gx.topology.one_peer_exponential(nodes)

    def find_ratio(method: Method) -> float:
        slow = simulate(method, WORKLOAD, FREE, nodes, factors, steps=200)
        return WORKLOAD.compute_seconds / slow.seconds

    assert find_ratio(from_transform(gx.allreduce(), "allreduce")) == pytest.approx(1 / 4)
    assert find_ratio(from_transform(gx.sgp(peer), "sgp")) == pytest.approx(1 / 4, rel=0.02)
    adpsgd = gx.dpsgd(gx.topology.bipartite_exponential(nodes))
    pairs = from_transform(adpsgd, "adpsgd", awaits="link", is_half_duplex=True)
    for method in (make_free(peer), make_free(peer, "link"), pairs):
        assert find_ratio(method) == pytest.approx((nodes - 1 + 1 / 4) / nodes, rel=0.01)
        table = np.array([[4.0] + [1.0] * (nodes - 1)])  # one row, for all steps
        by_table = simulate(method, WORKLOAD, FREE, nodes, table, steps=200)
        ratio = WORKLOAD.compute_seconds / by_table.seconds
        assert ratio == pytest.approx((nodes - 1 + 1 / 4) / nodes, rel=0.01)


def test_a_fragment_is_awaited_when_the_forward_pass_reaches_its_first_layer():
    """Two nodes, one fragment a step, of one of 8 layers; the other figures are by hand.

    A part takes 0.4 s. Layer 7 leaves the backward pass first, and the next forward pass needs it
    last: `c (1 - 2/3 / 8 - 1/3 / 8)` later. Layer 0 is needed at once, when the step has ended.
    """
    workload = Workload(parameters=8e6, compute_seconds=0.1)
    network = Network(1e7)
    for layer, hidden in ((7, 0.1 * (1 - 1 / 8)), (0, 0.0)):
        exchange = Exchange(None, 1 / 8, layers=8, fragment=layer)
        method = Method("fragment", (exchange,))
        expected = 0.1 + 0.4 - hidden
        assert predict_step(method, workload, network, 2).seconds == pytest.approx(expected)
        assert simulate(method, workload, network, 2).seconds == pytest.approx(expected)


def run_directed_ring(factors: np.ndarray, seconds: float, overlap: int) -> np.ndarray:
    """Ends of the steps, `[T, N]`, of SGP on a directed ring by its recursion.

    A message leaves when its computation has ended and the link is free of the one before; the
    step waits for the message that left `overlap` steps ago, its own and that of the node before.
    """
    steps, nodes = factors.shape
    ends = np.zeros((steps, nodes))
    arrived = np.zeros((steps, nodes))
    for step in range(steps):
        begun = ends[step - 1] if step else np.zeros(nodes)
        computed = begun + factors[step] * WORKLOAD.compute_seconds
        free = arrived[step - 1] if step else np.zeros(nodes)
        arrived[step] = np.maximum(computed, free) + seconds
        ends[step] = computed
        if step >= overlap:
            own = arrived[step - overlap]
            ends[step] = np.maximum(computed, np.maximum(own, np.roll(own, 1)))
    return ends


@pytest.mark.parametrize("overlap", [0, 1])
def test_random_slowness_on_a_directed_ring_equals_the_recursion(overlap: int):
    nodes = 5
    steps = 40
    factors = Slowness("random").draw(nodes, steps, seed=3)
    for network in (HOSTS, Network(2e8)):
        size = WORKLOAD.model_bytes
        seconds = size / network.bandwidth + network.latency + size / network.host_copy
        ends = run_directed_ring(factors, seconds, overlap)
        method = Method("osgp", (Exchange(gx.topology.directed_ring(nodes), late=overlap),))
        run = simulate(method, WORKLOAD, network, nodes, factors, steps=steps, warm_up=0)
        assert run.seconds == pytest.approx(nodes / (steps / ends[-1]).sum())


def test_a_busy_link_keeps_shares_and_makes_messages_old():
    """Steps take 0.2 s and messages 1.9 s: each tenth step sends, and messages are 10 steps old."""
    network = Network(bandwidth=100e6 / 1.9)
    method = make_free(gx.topology.directed_ring(4))
    run = simulate(method, WORKLOAD, network, 4, steps=100)
    assert run.kept == pytest.approx(0.9, abs=0.02)
    assert run.staleness == pytest.approx(10, abs=0.5)
    assert run.seconds == pytest.approx(WORKLOAD.compute_seconds)


def test_messages_that_meet_at_a_receiver_share_its_link():
    """Nodes 1 and 2 send to node 0, and then node 0 to them; a message takes t = 0.1 s.

    Node 0 has both after 2 t, and has sent both after 2 t more. Node 1, which hears first, sends
    its next message meanwhile: two steps take 3 t instead of the 4 t of nodes that begin together.
    """
    gather = [[1, 0.5, 0.5], [0, 0.5, 0], [0, 0, 0.5]]
    scatter = [[1 / 3, 0, 0], [1 / 3, 1, 0], [1 / 3, 0, 1]]
    method = Method("sgp", (Exchange(gx.topology.from_matrices([gather, scatter])),))
    run = simulate(method, WORKLOAD, Network(1e9), 3)
    assert run.seconds == pytest.approx(0.2 + 1.5 * 0.1)
    # At first both begin together: nodes 0 and 2 end after 0.2 s and 2 t, node 1 after 0.2 s and t.
    first = simulate(method, WORKLOAD, Network(1e9), 3, steps=1, warm_up=0)
    assert first.seconds == pytest.approx(3 / (2 / 0.4 + 1 / 0.3))


def test_factors_depend_on_the_seed_alone():
    """Other processes draw the same: these are NumPy's own streams."""
    drawn = Slowness("random").draw(nodes=3, steps=7, seed=5)
    np.testing.assert_array_equal(drawn, np.random.default_rng(5).choice((1, 2, 4), (7, 3)))
    drawn = Slowness("lognormal").draw(nodes=3, steps=7, seed=5)
    np.testing.assert_array_equal(drawn, np.random.default_rng(5).lognormal(0, 0.5, (7, 3)))


def test_no_computation_and_no_exchange_take_no_time():
    run = simulate(Method("single"), Workload(compute_seconds=0), HOSTS, 2)
    assert (run.seconds, run.examples_per_second) == (0, math.inf)
