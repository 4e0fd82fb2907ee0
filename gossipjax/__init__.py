"""Decentralized data-parallel training in JAX: gossip as optax transforms."""

from gossipjax import diagnostics as diagnostics
from gossipjax import topology as topology
from gossipjax.algorithms.allreduce import allreduce as allreduce
from gossipjax.algorithms.dpsgd import dpsgd as dpsgd
from gossipjax.algorithms.sgp import sgp as sgp
from gossipjax.collectives import mix as mix
from gossipjax.diagnostics import average_model as average_model
from gossipjax.schedule import Schedule as Schedule
from gossipjax.spmd import Program as Program
from gossipjax.spmd import spmd as spmd
from gossipjax.state import GossipState as GossipState

__version__ = "0.1.0"
