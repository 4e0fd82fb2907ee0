"""Builders of a `Schedule`, which says who sends to whom with which weights. NumPy only.

There are N nodes, and a cycle has T rounds. In a round of K slots a node sends at most K messages.
In the matrix P of a round, `P[i, j]` is the weight that receiver `i` gives to the model of sender
`j`. Every column sums to 1, and every `P[i, i] > 0`.

Unless a docstring says otherwise, a sender gives equal weights to itself and to each node that it
sends to, and sends to a node at most once in a round. A graph of one node is the identity.

>>> import gossipjax as gx
>>> gx.topology.one_peer_exponential(8)
one_peer_exponential(8): 8 nodes, period 3
"""

from gossipjax.renamed import old_names
from gossipjax.topology._cycles import (
    bipartite_exponential,
    complete_cycle,
    erdos_renyi,
    k_peer_exponential,
    one_peer_exponential,
    periodic,
    piecewise,
    random_pairs,
    random_peer,
    random_ring,
    random_rounds,
)
from gossipjax.topology._finite_time import base_graph
from gossipjax.topology._static import (
    complete,
    directed_ring,
    exponential,
    from_graph,
    from_matrices,
    hypercube,
    ring,
    star,
    torus,
)
from gossipjax.topology._weights import optimal_weights
from gossipjax.topology.schedule import Round, Segment
from gossipjax.topology.spectra import (
    rounds_to_exact_average,
    second_singular_value,
    spectral_gap,
)

__all__ = [
    "Round",
    "Segment",
    "base_graph",
    "bipartite_exponential",
    "complete",
    "complete_cycle",
    "directed_ring",
    "erdos_renyi",
    "exponential",
    "from_graph",
    "from_matrices",
    "hypercube",
    "k_peer_exponential",
    "one_peer_exponential",
    "optimal_weights",
    "periodic",
    "piecewise",
    "random_pairs",
    "random_peer",
    "random_ring",
    "random_rounds",
    "ring",
    "rounds_to_exact_average",
    "second_singular_value",
    "spectral_gap",
    "star",
    "torus",
]

__getattr__ = old_names("topology")
