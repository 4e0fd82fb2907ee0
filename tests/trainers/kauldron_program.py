"""The program of `kauldron_plain` on N nodes that gossip: the same config, and two hooks.

python -m kauldron.main --cfg=tests/trainers/kauldron_program.py --cfg.workdir=/tmp/gossip
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from kauldron import kd
from kauldron.train.checkpoint_state import CheckpointState

import gossipjax
from gossipjax.checkpoint import average_nodes, change_nodes
from tests.trainers import kauldron_plain

with kd.konfig.imports():
    import optax

    import gossipjax as gx
    from tests.trainers import kauldron_program as program

STATES = "loss_states", "metric_states", "summary_states"


def get_config(nodes=4, gossip=None):
    cfg = kauldron_plain.get_config()
    gossip = gossip or gx.sgp(gx.topology.one_peer_exponential(nodes))
    cfg.optimizer = optax.chain(cfg.optimizer, gx.sharded(gossip, program.fsdp_specs))
    cfg.trainstep = program.GossipStep(nodes=program.make_nodes(nodes))
    cfg.sharding.params = None  # as gx.sharded leaves them
    cfg.evals["eval"].init_transform = program.Average(nodes=program.make_nodes(nodes))
    return cfg


def get_outer_config(nodes=4):
    outer_tx = optax.sgd(0.7, momentum=0.9, nesterov=True)
    axes = {"Embed_0": None, "blocks": 0, "Dense_0": None}  # of the layers
    layers = gx.layer_fragments(5, axes)
    gossip = gx.outer(optax.identity(), outer_tx, every=5, fragments=layers)
    return get_config(nodes, gossip)


def make_nodes(size):
    devices = kd.sharding.DEVICES_MESH.devices.reshape(size, -1)
    return gossipjax.Nodes(mesh=jax.sharding.Mesh(devices, ("nodes", "devices")))


def fsdp_specs(params):  # Kauldron's rule, inside a node
    rule = kd.sharding.FSDPSharding(min_size_to_shard_mb=0)
    return jax.tree.map(lambda sharding: sharding.spec, rule(params))


@dataclasses.dataclass(kw_only=True, eq=False, frozen=True)
class GossipStep(kd.train.TrainStep):
    nodes: gossipjax.Nodes

    def init(self, elem_spec, **options):
        make_state = functools.partial(super().init, elem_spec, **options)
        state = self.nodes.replicate(make_state)
        return state.replace(step=state.step[0])

    def _step(self, state, batch):
        size, one_step = self.nodes.size, super()._step

        def node_step(state, batch):
            state, context = one_step(state, batch)
            return state, {name: getattr(context, name) for name in STATES}

        parts = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), batch)
        rows = state.replace(step=jnp.broadcast_to(state.step, size))
        new, stacked = self.nodes.spmd(node_step)(rows, parts)
        each = [jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(size)]
        each = [kd.train.AuxiliariesState(**row) for row in each]
        merged = functools.reduce(kd.train.AuxiliariesState.merge, each)
        context = kd.train.Context.from_state_and_batch(state=state, batch=batch)
        context = context.replace(**{name: getattr(merged, name) for name in STATES})
        return new.replace(step=state.step + 1), context


@dataclasses.dataclass(frozen=True, kw_only=True)
class Average(kd.ckpts.InitTransform):
    nodes: gossipjax.Nodes

    def transform(self, state):
        params, opt_state, stats = state.params, state.opt_state, state.collections
        params = gossipjax.average_model(params, opt_state, nodes=self.nodes)
        stats = gossipjax.average_batch_stats(stats, nodes=self.nodes)
        return state.replace(params=params, collections=stats, opt_state=None)


def continue_as(old, new, size=None):
    """The last checkpoint of a trainer becomes the first of another, of `size` nodes, or plain."""
    last = CheckpointState(old.init_state(), old._chrono, iter(old.train_ds))
    state, timer, data = old.checkpointer.restore(last)
    if size is None:  # an ordinary state: the first part of the chain is Kauldron's
        nodes = old.trainstep.nodes
        params = gossipjax.average_model(state.params, state.opt_state, nodes=nodes)
        rest = average_nodes((state.opt_state[0], state.collections), 1)
        opt_state, stats = jax.tree.map(lambda x: x[0], rest)
    else:
        params, opt_state, _ = change_nodes(state.params, state.opt_state, new.optimizer, size)
        stats = average_nodes(state.collections, size)
    state = state.replace(params=params, opt_state=opt_state, collections=stats)
    new.checkpointer.save(CheckpointState(state, timer, data), step=int(state.step))
    new.checkpointer.wait_until_finished()
