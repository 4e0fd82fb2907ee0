"""The program of `tunix_plain` on N nodes that gossip: a subclass of the trainer, and its mesh."""

# pyright: reportMissingImports=false

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax import nnx
from tunix.models.dummy_model_creator import create_dummy_model
from tunix.models.llama3.model import Llama3
from tunix.sft.metrics_logger import MetricsLoggerOptions
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

import gossipjax as gx
from gossipjax.checkpoint import Checkpoints
from tests.trainers.tunix_plain import LLAMA, gen_model_input, make_batches


class GossipTrainer(PeftTrainer):
    """When the trainer uses its model and optimizer, they are the nodes' average."""

    def with_gossip(self, make_tx, nodes, checkpoints, every):
        graph, state = nnx.split((self.model, self.optimizer))

        def train_step(state, batch):
            model, optimizer = nnx.merge(graph, state)
            metrics = self._train_step(model, optimizer, batch)
            return nnx.state((model, optimizer)), metrics

        def pick(state):
            return nnx.filter_state(state[0], nnx.Param)

        tx = make_tx({"nodes": nodes.size})
        self.step = gx.decentralize(train_step, tx, nodes, params=pick)
        state = self.step.init(state)._replace(step=self.train_steps)
        self.state = checkpoints.resume(state, nodes, make_tx)
        self.checkpoints, self.every = checkpoints, every
        return self

    def jit_train_and_eval_step(self, *_):
        def train_step(batch):
            self.state, metrics = self.step(self.state, batch)
            return metrics

        def eval_step(batch):
            self.average()
            return evaluate(self.model, jax.tree.map(jnp.concatenate, batch))

        evaluate = nnx.jit(self._eval_step)
        return train_step, eval_step

    def average(self):
        nnx.update((self.model, self.optimizer), self.step.average(self.state))

    def _prepare_inputs(self, input_data):
        return self.step.nodes.split(input_data)

    def _post_process_train_step(self, aux):
        self.checkpoints.after(self.state)
        if self.state.step % self.every == 0:  # the trainer saves it next
            self.average()

    def close(self):
        self.average()
        super().close()


def make_sgp(saved):
    schedule = gx.topology.one_peer_exponential(saved["nodes"])
    return gx.sharded(gx.sgp(schedule))


def make_outer(_):
    nesterov = optax.sgd(0.7, momentum=0.9, nesterov=True)
    layers = gx.layer_fragments(3, None)  # Tunix's layers are in a list
    return gx.sharded(gx.outer(optax.identity(), nesterov, every=6, fragments=layers))


def main(folder, steps, every=20, size=4, make_tx=make_sgp):
    mesh = gx.launch.mesh(size, fsdp=2, tp=1)
    config = TrainingConfig(
        max_steps=steps,
        eval_every_n_steps=every,
        data_sharding_axis=("nodes", "fsdp"),
        checkpoint_root_directory=f"{folder}/checkpoints",
        checkpointing_options=ocp.CheckpointManagerOptions(
            save_decision_policy=ocp.checkpoint_managers.FixedIntervalPolicy(every)
        ),
        metrics_logging_options=MetricsLoggerOptions(log_dir=f"{folder}/metrics"),
    )
    with mesh, Checkpoints(f"{folder}/nodes", every=every) as checkpoints:
        model = create_dummy_model(Llama3, LLAMA, mesh)
        trainer = GossipTrainer(model, optax.adamw(3e-3), config)
        trainer = trainer.with_gen_model_input_fn(gen_model_input)
        trainer = trainer.with_gossip(make_tx, gx.Nodes(mesh=mesh), checkpoints, every)
        evaluated = list(make_batches(4, seed=1))
        trainer.train(make_batches(steps), evaluated, skip_jit=True)
    return trainer
