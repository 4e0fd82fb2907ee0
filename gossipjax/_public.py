"""The names of `import gossipjax as gx`. The first use of a name imports this module and JAX."""

# ruff: noqa: F401

from gossipjax.algorithms.adpsgd import adpsgd, d1d_psgd, random_delays
from gossipjax.algorithms.allreduce import allreduce
from gossipjax.algorithms.choco import choco
from gossipjax.algorithms.dpsgd import dpsgd
from gossipjax.algorithms.easgd import easgd
from gossipjax.algorithms.gossip import gossip
from gossipjax.algorithms.gradient_tracking import gradient_tracking
from gossipjax.algorithms.osgp import osgp
from gossipjax.algorithms.outer.outer import outer
from gossipjax.algorithms.quasi_global import quasi_global
from gossipjax.algorithms.sgp import sgp
from gossipjax.batches import prefetch
from gossipjax.collectives import mix
from gossipjax.dirichlet import dirichlet_split
from gossipjax.exchanges.apply_if_finite import apply_if_finite
from gossipjax.exchanges.chain import canonical_step, canonical_steps, exchange, gossip_state
from gossipjax.exchanges.fragments import layer_fragments
from gossipjax.exchanges.refuse_outliers import refuse_outliers
from gossipjax.exchanges.sharded import sharded
from gossipjax.exchanges.state import GossipState
from gossipjax.exchanges.weighted import weighted
from gossipjax.models import average_model, latest_model, local_model
from gossipjax.nodes import Nodes, spmd
from gossipjax.sharding import fsdp_specs, state_specs
from gossipjax.step.batch_stats import average_batch_stats, mix_batch_stats
from gossipjax.step.bytes_per_step import Traffic, bytes_per_step
from gossipjax.step.closed import decentralize
from gossipjax.step.gradients import accumulate_gradients
from gossipjax.step.train_step import TrainStep
from gossipjax.topology.schedule import Schedule
from gossipjax.train_state import TrainState
