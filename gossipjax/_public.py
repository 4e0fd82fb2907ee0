"""The names of `import gossipjax as gx`. The first use of a name imports this module and JAX."""

# ruff: noqa: F401

from gossipjax.algorithms.adpsgd import adpsgd, d1d_psgd, random_delays
from gossipjax.algorithms.allreduce import allreduce
from gossipjax.algorithms.apply_if_finite import apply_if_finite
from gossipjax.algorithms.choco import choco
from gossipjax.algorithms.dpsgd import dpsgd
from gossipjax.algorithms.easgd import easgd
from gossipjax.algorithms.exchange import exchange
from gossipjax.algorithms.fragments import layer_fragments
from gossipjax.algorithms.gossip import gossip
from gossipjax.algorithms.gradient_tracking import gradient_tracking
from gossipjax.algorithms.osgp import osgp
from gossipjax.algorithms.outer import outer
from gossipjax.algorithms.quasi_global import quasi_global
from gossipjax.algorithms.sgp import sgp
from gossipjax.algorithms.sharded import sharded
from gossipjax.algorithms.state import GossipState
from gossipjax.algorithms.steps import canonical_step, canonical_steps, gossip_state
from gossipjax.algorithms.weighted import weighted
from gossipjax.batch_stats import average_batch_stats, mix_batch_stats
from gossipjax.batches import prefetch
from gossipjax.collectives import mix
from gossipjax.decentralized_step import decentralize
from gossipjax.diagnostics import average_model, latest_model, local_model
from gossipjax.dirichlet import dirichlet_split
from gossipjax.sharding import fsdp_specs, state_specs
from gossipjax.spmd import Nodes, Program, donate_on_accelerators, spmd
from gossipjax.topology import Schedule
from gossipjax.traffic import Traffic, bytes_per_step
from gossipjax.train_step import MAX_PROGRAMS, TrainStep, accumulate_gradients
