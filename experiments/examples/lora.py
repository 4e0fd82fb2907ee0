"""LoRA on several desktops, by Tunix and qwix: only the adapters gossip.

    python -m experiments.examples.lora
    python -m gossipjax.launch --processes 2 -- \\
        python -m experiments.examples.lora --algorithm outer
    python -m gossipjax.launch --asynchronous --processes 2 -- \\
        python -m experiments.examples.lora --algorithm asynchronous

A node is a process with all its devices; one process alone simulates two. Even nodes read English.
"""

# pyright: reportMissingImports=false
import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Literal

import jax
import numpy as np
import optax
import qwix
from flax import nnx
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

import gossipjax as gx
from experiments.examples.tiny_qwen import load_base, loss_inputs, read, save
from experiments.options import PositiveInt, check_fields, parse_arguments

DOMAINS = ("English", "C")
LORA = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": r".*_proj"}


@dataclasses.dataclass(frozen=True)
class Options:
    """Trains adapters on the base in FOLDER/base; puts the average adapters into FOLDER."""

    algorithm: Literal["sgp", "outer", "asynchronous"] = "sgp"
    folder: Path = Path("runs/lora")
    steps: PositiveInt = 300
    every: PositiveInt = 50  # local steps between outer steps

    def __post_init__(self):
        check_fields(self)


class Trainer(PeftTrainer):
    """Tunix's, whose steps `take(step, rows) -> loss` makes, without its optimizer."""

    def create_train_step_fn(self):
        return lambda rows: (self.take(self.iter_steps, rows), None, np.zeros(()))


def connect():
    """The nodes, which connect before they compile, as Gloo waits for 30 s only."""
    gx.launch.initialize()
    if jax.process_count() == 1:
        return gx.Nodes(2)
    nodes = gx.Nodes(mesh=gx.launch.mesh(fsdp=jax.local_device_count(), tp=1))
    gx.average_batch_stats(nodes.replicate(np.zeros(8)), nodes=nodes)
    return nodes


def main(options):
    """Trains; returns the model with the average adapters, and its loss on English and on C."""
    nodes = None if options.algorithm == "asynchronous" else connect()
    model = load_base(options.folder / "base")
    lora = qwix.LoraProvider(module_path=".*_proj", rank=LORA["r"], alpha=LORA["lora_alpha"])
    model = qwix.apply_lora_to_model(model, lora, rngs=nnx.Rngs(0), **model.get_model_input())
    graph, adapters, base = nnx.split(model, nnx.LoRAParam, ...)
    trainer = Trainer(model, optax.identity(), TrainingConfig(eval_every_n_steps=1))
    adam = optax.adamw(2e-3)

    def gradients(adapters, base, rows):
        loss_fn = nnx.value_and_grad(trainer.loss_fn, argnums=nnx.DiffState(0, nnx.LoRAParam))
        loss, grads = loss_fn(nnx.merge(graph, adapters, base), **loss_inputs(rows))
        return grads, loss

    if nodes is None:
        algorithm = gx.asynchronous.outer(options.every)
        with gx.asynchronous.join(adam, adapters, algorithm=algorithm) as node:
            trainer.take = lambda step, rows: node.step(gradients, base, rows)
            read_own = partial(read, DOMAINS[node.place % 2], node.place)
            trainer.train(map(read_own, range(options.steps)), skip_jit=True)
            average = node.average()
        is_main = node.place == 0
    else:
        tx = optax.chain(adam, gx.sgp(gx.topology.one_peer_exponential(nodes.size)))
        if options.algorithm == "outer":
            tx = gx.outer(adam, optax.sgd(0.7, 0.9, nesterov=True), every=options.every)
        tx = gx.sharded(tx, gx.fsdp_specs(adapters, nodes.mesh) if nodes.mesh else None)
        train_step = gx.TrainStep(gradients, tx, nodes=nodes)
        specs = nnx.get_partition_spec(base)  # Tunix's own
        state = nodes.init(tx, jax.device_get(adapters))
        base = nodes.replicate(jax.device_get(base), specs)

        def take(step, rows):
            nonlocal state
            *state, losses = train_step(step, *state, base, nodes.put(rows))
            return losses.addressable_data(0)[0]

        def read_all(step):
            return np.stack([read(DOMAINS[i % 2], i, step) for i in nodes.local])

        trainer.take = take
        trainer.train(map(read_all, range(options.steps)), skip_jit=True)
        average = nodes.to_host(gx.average_model(*state, nodes=nodes))
        is_main = gx.processes.is_main_process()
    nnx.update(model, average)
    losses = [float(trainer.loss_fn(model, **loss_inputs(read(domain)))) for domain in DOMAINS]
    if is_main:
        print(f"loss on English {losses[0]:.3f}, on C {losses[1]:.3f}")
        save(options.folder / "adapter_model.safetensors", average, "base_model.model.model.")
        (options.folder / "adapter_config.json").write_text(json.dumps(LORA))
    return model, losses


if __name__ == "__main__":
    main(parse_arguments(Options, "experiments.examples.lora", None))
