"""How long a step takes on a network that is not here: modelled, not measured. NumPy only.

A `Method` (what an algorithm exchanges), a `Workload` (the computation of a node) and a `Network`
give the seconds of a step, `predict_step`. docs/guides/cost_model.md has the formulas, and what
they miss; the section `cost-model` of the report sets published figures beside the model's.
"""

from gossipjax.cost_model import methods, networks
from gossipjax.cost_model.exchange import Exchange, Workload
from gossipjax.cost_model.methods import (
    Method,
    adpsgd,
    allreduce,
    async_sgp,
    centralized,
    diloco,
    dpsgd,
    from_plan,
    noloco,
    osgp,
    sgp,
    slowmo,
    sparse_loco,
    streaming_diloco,
)
from gossipjax.cost_model.network import Network
from gossipjax.cost_model.prediction import Prediction, predict_step
from gossipjax.cost_model.simulation import Simulation, simulate
from gossipjax.cost_model.slowness import Slowness, parse_slowness

__all__ = [
    "Exchange",
    "Method",
    "Network",
    "Prediction",
    "Simulation",
    "Slowness",
    "Workload",
    "adpsgd",
    "allreduce",
    "async_sgp",
    "centralized",
    "diloco",
    "dpsgd",
    "from_plan",
    "methods",
    "networks",
    "noloco",
    "osgp",
    "parse_slowness",
    "predict_step",
    "sgp",
    "simulate",
    "slowmo",
    "sparse_loco",
    "streaming_diloco",
]
