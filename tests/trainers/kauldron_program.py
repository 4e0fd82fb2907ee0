"""The program of `kauldron_plain` on N nodes that gossip: the same config, and two hooks.

python -m kauldron.main --cfg=tests/trainers/kauldron_program.py --cfg.workdir=/tmp/gossip
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from kauldron import kd
from kauldron.train.checkpoint_state import CheckpointState

import gossipjax
from gossipjax.checkpoint import average_nodes, change_nodes
from tests.trainers import kauldron_plain

with kd.konfig.imports():
    import optax

    import gossipjax as gx
    from tests.trainers import kauldron_program as program


def get_config(nodes=4, gossip=None):
    cfg = kauldron_plain.get_config()
    gossip = gossip or gx.sgp(gx.topology.one_peer_exponential(nodes))
    cfg.optimizer = optax.chain(cfg.optimizer, gx.sharded(gossip, program.fsdp_specs))
    cfg.trainstep = program.GossipStep(nodes=program.make_nodes(nodes))
    cfg.sharding = program.make_sharding(nodes)
    cfg.evals["eval"].init_transform = program.Average(nodes=program.make_nodes(nodes))
    return cfg


def get_outer_config(nodes=4):
    outer_tx = optax.sgd(0.7, momentum=0.9, nesterov=True)
    axes = {"Embed_0": None, "blocks": 0, "Dense_0": None}  # of the layers
    layers = gx.layer_fragments(5, axes)
    return get_config(nodes, gx.outer(optax.identity(), outer_tx, every=5, fragments=layers))


def make_nodes(size):
    shape = (size, jax.device_count() // size)
    return gossipjax.Nodes(mesh=jax.make_mesh(shape, ("nodes", "devices")))


def make_sharding(size):  # of parameters: as the states of nodes come out of a step
    batch = NamedSharding(make_nodes(size).mesh, P(("nodes", "devices")))
    return kd.sharding.ShardingStrategy(batch=batch, params=None)


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
            state, c = one_step(state, batch)
            return state, (c.loss_states, c.metric_states, c.summary_states)

        parts = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), batch)
        rows = state.replace(step=jnp.broadcast_to(state.step, size))
        new, stacked = self.nodes.spmd(node_step)(rows, parts)
        each = [jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(size)]
        merged = functools.reduce(
            kd.train.AuxiliariesState.merge,
            [kd.train.AuxiliariesState(*states) for states in each],
        )
        context = kd.train.Context.from_state_and_batch(state=state, batch=batch)
        return new.replace(step=state.step + 1), context.replace(
            loss_states=merged.loss_states,
            metric_states=merged.metric_states,
            summary_states=merged.summary_states,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Average(kd.ckpts.InitTransform):
    nodes: gossipjax.Nodes

    def transform(self, state):
        with jax.transfer_guard("allow"):
            model = gossipjax.average_model(state.params, state.opt_state, nodes=self.nodes)
            stats = gossipjax.average_batch_stats(state.collections, nodes=self.nodes)
            return state.replace(params=model, collections=stats, opt_state=None)


def continue_as(old, new, size=None):
    """The last checkpoint of a trainer becomes the first of another, of `size` nodes, or plain."""
    last = CheckpointState(old.init_state(), old._chrono, iter(old.train_ds))
    state, timer, data = old.checkpointer.restore(last)
    tx, rows = new.optimizer, size or 1
    params, opt_state, _ = change_nodes(state.params, state.opt_state, tx, rows)
    stats = average_nodes(state.collections, rows)
    new_state = state.replace(params=params, opt_state=opt_state, collections=stats)
    if size is None:
        new_state = jax.tree.map(lambda x: x[0], new_state.replace(step=state.step[None]))
    new.checkpointer.save(CheckpointState(new_state, timer, data), step=int(state.step))
    new.checkpointer.wait_until_finished()
