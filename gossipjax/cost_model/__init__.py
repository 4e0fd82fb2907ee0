"""How long a step takes on a network that is not here: modelled, not measured. NumPy only.

A `Method` (what an algorithm exchanges), a `Workload` (the computation of a node) and a `Network`
give the seconds of a step, `predict_step`. README.md in this folder has the formulas, and what they
miss; `python -m experiments.report.published` sets published figures beside the model's.
"""

from gossipjax.cost_model import methods, networks
from gossipjax.cost_model.exchange import Exchange, Workload
from gossipjax.cost_model.fitting import Measurement, fit_compute, fit_network
from gossipjax.cost_model.methods import (
    WIRE_BITS,
    Method,
    adpsgd,
    allreduce,
    async_outer,
    async_sgp,
    centralized,
    d1d_psgd,
    desloc,
    diloco,
    dpsgd,
    easgd,
    from_plan,
    gradient_tracking,
    local_sgd,
    mixed_momentum,
    noloco,
    osgp,
    push_sum_outer,
    rand_psgd,
    relay,
    sgp,
    single,
    slowmo,
    sparse_loco,
    sparta,
    streaming_diloco,
)
from gossipjax.cost_model.network import Fabric, Islands, Network, Star, Torus
from gossipjax.cost_model.prediction import Prediction, predict_step
from gossipjax.cost_model.simulation import Simulation, simulate
from gossipjax.cost_model.slowness import Slowness, parse_slowness

__all__ = [
    "WIRE_BITS",
    "Exchange",
    "Fabric",
    "Islands",
    "Measurement",
    "Method",
    "Network",
    "Prediction",
    "Simulation",
    "Slowness",
    "Star",
    "Torus",
    "Workload",
    "adpsgd",
    "allreduce",
    "async_outer",
    "async_sgp",
    "centralized",
    "d1d_psgd",
    "desloc",
    "diloco",
    "dpsgd",
    "easgd",
    "fit_compute",
    "fit_network",
    "from_plan",
    "gradient_tracking",
    "local_sgd",
    "methods",
    "mixed_momentum",
    "networks",
    "noloco",
    "osgp",
    "parse_slowness",
    "predict_step",
    "push_sum_outer",
    "rand_psgd",
    "relay",
    "sgp",
    "simulate",
    "single",
    "slowmo",
    "sparse_loco",
    "sparta",
    "streaming_diloco",
]
