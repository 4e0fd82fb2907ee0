"""What a schedule, a round and a state print: what a person needs, without numbers of arrays."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gossipjax as gx

topology = gx.topology
MODEL = {"w": jnp.zeros((10, 5), jnp.bfloat16)}
OSGP = gx.osgp(topology.ring(4), overlap=2).init(MODEL)
IN_FLIGHT = "404 bytes in 3 other arrays, overlap 2, ring(4): 4 nodes, period 1"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (topology.one_peer_exponential(8), "one_peer_exponential(8): 8 nodes, period 3"),
        (topology.complete(1), "complete(1): 1 node, period 1"),
        (topology.ring(4).every(3, 2), "ring(4).every(3, 2): 4 nodes, period 3"),
        (
            topology.piecewise({0: topology.complete(4), 9: topology.ring(4)}),
            "piecewise({0: complete(4), 9: ring(4)}): 4 nodes, 2 segments",
        ),
        (
            topology.random_peer(8, 16, seed=0, graph="complete"),
            "random_peer(8, 16, seed=0, graph='complete'): 8 nodes, period 16",
        ),
        (topology.from_matrices(np.eye(1)), "from_matrices(ndarray): 1 node, period 1"),
        (gx.Schedule(topology.ring(5).rounds), "Schedule: 5 nodes, period 1"),
        (topology.one_peer_exponential(8).round_at(0), "Round(8 nodes, 1 peer each)"),
        (topology.star(8).round_at(0), "Round(8 nodes, up to 7 peers)"),
        (topology.ring(4).every(2).round_at(1), "Round(4 nodes, no messages)"),
        (OSGP, f"GossipState(count [], weight [], {IN_FLIGHT})"),
        (gx.Nodes(4), "Nodes(4)"),
        (gx.Nodes(2, mesh=jax.make_mesh((1,), ("nodes",))), "Nodes(2, mesh={'nodes': 1})"),
        (
            jax.tree.map(lambda leaf: "x", OSGP),
            "GossipState(count 'x', weight 'x', overlap 2, ring(4): 4 nodes, period 1)",
        ),
    ],
    ids=str,
)
def test_a_repr_says_what_it_is(value, text):
    assert repr(value) == text


def test_a_name_is_kept_and_makes_no_schedule_another():
    ring = topology.ring(4)
    same = topology.from_matrices(ring.matrices())
    assert (ring == same, hash(ring) == hash(same)) == (True, True)
    assert repr(ring) != repr(same)
    for other in (pickle.loads(pickle.dumps(ring)), copy.deepcopy(ring)):
        assert (repr(other), other) == (repr(ring), ring)


def test_a_traced_state_prints_as_its_arrays():
    seen = []
    jax.jit(lambda state: seen.append(repr(state)))(OSGP)
    assert seen == [repr(OSGP)]
