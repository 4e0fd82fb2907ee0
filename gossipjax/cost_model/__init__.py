"""Models how long a step takes on a network that you do not have.

A `Method` says what an algorithm exchanges, and a `Workload` what a node computes. `predict_step`
takes both and a `Network`, and returns the seconds of a step. Nothing is measured.
docs/guides/cost_model.md explains the formulas and what they leave out; the section `cost-model` of
the report compares the predictions with published figures.
"""

from typing import Any

from gossipjax.cost_model import networks
from gossipjax.cost_model.exchange import Exchange, Workload
from gossipjax.cost_model.methods import Method, from_plan, from_transform
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
    "from_plan",
    "from_transform",
    "networks",
    "parse_slowness",
    "predict_step",
    "simulate",
]

_OUTER = "gx.outer(inner, outer_tx, every"
# A name of 0.4.0 -> the arguments of `from_transform`.
_WENT = {
    "adpsgd": 'gx.adpsgd(schedule, delays), "adpsgd", awaits="link"',
    "allreduce": 'gx.allreduce(), "allreduce"',
    "async_sgp": 'gx.sgp(schedule, order="combine-while-adapting"), "async-sgp", awaits="nobody"',
    "centralized": 'gx.allreduce(), "centralized", kind="server"',
    "diloco": f'{_OUTER}), "diloco"',
    "dpsgd": 'gx.dpsgd(schedule), "dpsgd"',
    "noloco": f'{_OUTER}, average=schedule, pull=pull), "noloco"',
    "osgp": 'gx.osgp(schedule), "osgp"',
    "sgp": 'gx.sgp(schedule), "sgp"',
    "slowmo": f'{_OUTER}), "slowmo"',
    "sparse_loco": f'{_OUTER}, wire=codec, error_feedback=1.0), "sparse-loco"',
    "streaming_diloco": f'{_OUTER}, fragments=fragments, delay=1), "streaming-diloco"',
}


def __getattr__(name: str) -> Any:
    if name in _WENT:
        raise AttributeError(
            f"cost_model.{name} went: use cost_model.from_transform({_WENT[name]})."
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
