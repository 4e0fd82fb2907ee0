"""Who sends to whom, and with which weights: builders of a `Schedule`. NumPy only.

N nodes, T rounds in one cycle, K slots (messages that a node sends) in a round. `P[i, j]` is the
weight that receiver `i` gives to what sender `j` sends; every column sums to 1 and every
`P[i, i] > 0`.

Conventions of all builders, unless a docstring says otherwise: the weights of a sender are uniform
over its out-neighbours and itself, neighbours are distinct, and every graph of one node is the
identity.

>>> import gossipjax as gx
>>> gx.topology.one_peer_exponential(8)
Schedule(size=8, {0: rounds [0, 1, 2]}, peers by round [1, 1, 1])
"""

from gossipjax.topology._cycles import (
    bipartite_exponential,
    complete_cycle,
    k_peer_exponential,
    one_peer_exponential,
    periodic,
    piecewise,
    random_pairs,
    random_peer,
    random_ring,
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
from gossipjax.topology.schedule import Round, Schedule, Segment
from gossipjax.topology.spectra import (
    rounds_to_exact_average,
    second_singular_value,
    spectral_gap,
)

__all__ = [
    "Round",
    "Schedule",
    "Segment",
    "base_graph",
    "bipartite_exponential",
    "complete",
    "complete_cycle",
    "directed_ring",
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
    "ring",
    "rounds_to_exact_average",
    "second_singular_value",
    "spectral_gap",
    "star",
    "torus",
]
