"""Full fine-tuning of a small Llama by Tunix's trainer, sharded over the devices of one node."""

# pyright: reportMissingImports=false

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from tunix.models.dummy_model_creator import create_dummy_model
from tunix.models.llama3.model import Llama3, ModelConfig
from tunix.sft.metrics_logger import MetricsLoggerOptions
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig, TrainingInput
from tunix.sft.utils import build_positions_from_mask, make_causal_attn_mask
from tunix.utils.mesh import create_mesh

LLAMA = ModelConfig(
    num_layers=2,
    vocab_size=64,
    embed_dim=32,
    hidden_dim=64,
    num_heads=4,
    head_dim=8,
    num_kv_heads=2,
    rope_theta=10_000,
    norm_eps=1e-5,
)


def make_batches(count, size=16, length=16, seed=0):
    """Texts in which a token follows another by a table, but for one in ten."""
    table = np.random.default_rng(0).integers(1, LLAMA.vocab_size, LLAMA.vocab_size)
    rng = np.random.default_rng(seed)
    for _ in range(count):
        tokens = rng.integers(1, LLAMA.vocab_size, (size, length))
        for i in range(1, length):
            follows = rng.random(size) < 0.9
            tokens[:, i] = np.where(follows, table[tokens[:, i - 1]], tokens[:, i])
        tokens = tokens.astype(np.int32)
        yield TrainingInput(input_tokens=tokens, input_mask=tokens != 0)


def gen_model_input(x):
    return {
        "input_tokens": x.input_tokens,
        "input_mask": x.input_mask,
        "positions": build_positions_from_mask(x.input_mask),
        "attention_mask": make_causal_attn_mask(x.input_mask),
    }


def main(folder, steps, every=20, size=2):
    mesh = create_mesh((size, 1), ("fsdp", "tp"), jax.devices()[:size])
    config = TrainingConfig(
        max_steps=steps,
        eval_every_n_steps=every,
        data_sharding_axis=("fsdp",),
        checkpoint_root_directory=f"{folder}/checkpoints",
        checkpointing_options=ocp.CheckpointManagerOptions(save_interval_steps=every),
        metrics_logging_options=MetricsLoggerOptions(log_dir=f"{folder}/metrics"),
    )
    with mesh:
        model = create_dummy_model(Llama3, LLAMA, mesh)
        trainer = PeftTrainer(model, optax.adamw(3e-3), config)
        trainer = trainer.with_gen_model_input_fn(gen_model_input)
        evaluated = list(make_batches(4, seed=1))
        trainer.train(make_batches(steps), evaluated)
    return trainer
