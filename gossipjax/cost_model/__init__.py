"""Models how long a step takes on a network that you do not have.

A `Method` says what an algorithm exchanges, and a `Workload` what a node computes. `predict_step`
takes both and a `Network`, and returns the seconds of a step. Nothing is measured.
docs/guides/cost_model.md explains the formulas and what they leave out; the section `cost-model` of
the report compares the predictions with published figures.
"""

from gossipjax.cost_model import networks
from gossipjax.cost_model.exchange import Exchange, Workload
from gossipjax.cost_model.methods import Method, from_transform
from gossipjax.cost_model.networks import Network
from gossipjax.cost_model.prediction import Prediction, predict_step
from gossipjax.cost_model.simulation import Simulation, simulate
from gossipjax.cost_model.slowness import Slowness, parse_slowness
from gossipjax.renamed import old_names

__all__ = [
    "Exchange",
    "Method",
    "Network",
    "Prediction",
    "Simulation",
    "Slowness",
    "Workload",
    "from_transform",
    "networks",
    "parse_slowness",
    "predict_step",
    "simulate",
]

__getattr__ = old_names("cost_model")
