"""Decentralized data-parallel training in JAX: gossip as optax transforms."""

import importlib
from typing import TYPE_CHECKING, Any

from gossipjax import diagnostics as diagnostics
from gossipjax import topology as topology
from gossipjax.algorithms.adpsgd import adpsgd as adpsgd
from gossipjax.algorithms.adpsgd import d1d_psgd as d1d_psgd
from gossipjax.algorithms.adpsgd import random_delays as random_delays
from gossipjax.algorithms.allreduce import allreduce as allreduce
from gossipjax.algorithms.dpsgd import dpsgd as dpsgd
from gossipjax.algorithms.easgd import easgd as easgd
from gossipjax.algorithms.osgp import exchange as exchange
from gossipjax.algorithms.osgp import osgp as osgp
from gossipjax.algorithms.sgp import sgp as sgp
from gossipjax.diagnostics import average_model as average_model
from gossipjax.diagnostics import latest_model as latest_model
from gossipjax.loop import TrainStep as TrainStep
from gossipjax.mixing import mix as mix
from gossipjax.schedule import Schedule as Schedule
from gossipjax.spmd import Program as Program
from gossipjax.spmd import spmd as spmd
from gossipjax.state import GossipState as GossipState
from gossipjax.statistics import average_statistics as average_statistics
from gossipjax.statistics import mix_statistics as mix_statistics

if TYPE_CHECKING:
    from gossipjax import launch as launch

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # When it is first used: `python -m gossipjax.launch` would warn if it were imported already.
    if name == "launch":
        return importlib.import_module("gossipjax.launch")
    raise AttributeError(f"module 'gossipjax' has no attribute {name!r}")
