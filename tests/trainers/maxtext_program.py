"""MaxText 0.2.5: its own pre-training step on nodes that gossip, over its mesh axis "diloco".

    python maxtext_program.py sgp base.yml run_name=... ici_diloco_parallelism=4 \
        ici_fsdp_parallelism=2

The program of one node is this one without the lines that end in `# gossip`. After a colon stands
the line of one node that such a line replaces.
"""
# pyright: reportMissingImports=false

import datetime

import jax
import optax
from absl import app
from flax import nnx
from flax.core.spmd import logical_axis_rules
from maxtext.common import checkpointing
from maxtext.common.metric_logger import MetricLogger
from maxtext.trainers.pre_train import train
from maxtext.utils import maxtext_utils, train_utils
from maxtext.utils.sharding import get_input_data_sharding

import gossipjax as gx  # gossip
from gossipjax.checkpoint import Checkpoints  # gossip


def params_of(state):  # gossip
    return nnx.filter_state(state, nnx.Param)  # gossip


def make_gossip(method, nodes, specs):  # gossip
    outer_tx = optax.sgd(0.7, momentum=0.9, nesterov=True)  # gossip
    options = {"every": 8, "axis_name": "diloco"}  # gossip
    if method == "streaming":  # gossip
        options["fragments"] = gx.layer_fragments(2, "layers")  # gossip
    tx = gx.outer(optax.identity(), outer_tx, **options)  # gossip
    if method == "sgp":  # gossip
        tx = gx.sgp(gx.topology.one_peer_exponential(nodes), axis_name="diloco")  # gossip
    return gx.sharded(tx, specs, axis_name="diloco")  # gossip


def train_loop(config, recorder, method):
    setup = train_utils.setup_train_loop(config, recorder)
    _, manager, shardings, _, mesh, rate, iterator, loader, _, _, state = setup
    graph, state = nnx.split(state)
    place = get_input_data_sharding(config, mesh)
    train_step, *_ = maxtext_utils.get_functional_train_with_signature(
        train.train_step, place, shardings, graph, config
    )
    specs = jax.tree.map(lambda sharding: sharding.spec, params_of(shardings))  # gossip
    nodes = gx.Nodes(mesh=mesh, axis_name="diloco")  # gossip
    tx = make_gossip(method, nodes.size, specs)  # gossip
    step = gx.decentralize(train_step, tx, nodes, params=params_of)  # gossip: step = jax.jit(...)
    folder = f"{config.checkpoint_dir}/../nodes"  # gossip
    saves = Checkpoints(folder, every=config.checkpoint_period)  # gossip
    with logical_axis_rules(config.logical_axis_rules), saves:  # gossip: and jax.set_mesh(mesh)
        state = saves.resume(  # gossip
            step.init(state), nodes, lambda saved: make_gossip(method, saved["nodes"], specs)
        )
        first = state.step  # gossip: first = train.get_first_step(None, state)
        logger = MetricLogger(config=config, learning_rate_schedule=rate, start_step=first)
        logger.write_setup_info_to_tensorboard(state.params)  # gossip: (state.model)
        last = datetime.datetime.now()
        for k in range(first, config.steps):
            batch = loader.load_next_batch()
            state, metrics = step(state, nodes.split(batch, place.spec))  # gossip: (state, batch)
            metrics = jax.tree.map(lambda x: x.mean(0), metrics)  # gossip
            saves.after(state, last=k + 1 == config.steps)  # gossip
            if (k + 1) % config.checkpoint_period == 0:
                model = step.average(state)  # gossip
                checkpointing.save_checkpoint(manager, k, model, config, iterator, force=True)
            now = datetime.datetime.now()
            logger.buffer_and_write_metrics(metrics, k, now - last)
            last = now
    logger.flush_metrics_and_cleanup()
    checkpointing.wait_until_finished(manager)
    return step, state


def main(argv):
    config, recorder = train.initialize(argv[1:])
    train_loop(config, recorder, argv[1])


if __name__ == "__main__":
    app.run(main)
