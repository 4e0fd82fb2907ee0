"""The base of the example `lora`: a tiny Qwen3 that has read Python, and texts for its nodes."""

# pyright: reportMissingImports=false
import sysconfig
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from safetensors.numpy import save_file
from tunix.models.qwen3 import model as qwen3
from tunix.models.qwen3.params import create_model_from_safe_tensors
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig
from tunix.sft.utils import build_positions_from_mask, make_causal_attn_mask

# Tunix's Qwen3 turns positions by a theta of 1,000,000, whatever its shape says.
SHAPE = qwen3.ModelConfig(2, 256, 64, 192, 4, 16, 2, 1_000_000, 1e-6, use_tied_embedding=True)
NAMES = {".attn.": ".self_attn.", "final_norm": "norm", "embedder.input_embedding": "embed_tokens"}
NAMES |= {".kernel": "", ".w": "", "_lora_a": ".lora_A", "_lora_b": ".lora_B"}
STDLIB = Path(sysconfig.get_path("stdlib"))
FILES = {"Python": STDLIB.glob("*.py"), "English": STDLIB.glob("pydoc_data/topics.py")}
FILES = {name: sorted(files) for name, files in FILES.items()}
FILES["C"] = sorted(Path(np.get_include()).rglob("*.h"))


def read(domain, place=0, step=None):
    """What a node reads in a step, [32, 64] bytes, or what no node ever reads."""
    text = np.frombuffer(b"".join(map(Path.read_bytes, FILES[domain])), np.uint8)
    windows = text[: len(text) // 1024 * 1024].reshape(-1, 16, 64)
    drawn = np.random.default_rng((place, step or 0)).integers(len(windows), size=32)
    return (windows[:64, 0] if step is None else windows[drawn, 1 + step % 15]).astype(np.int32)


def loss_inputs(rows):
    """What Tunix's loss asks for, of rows [B, T] without padding."""
    mask = jnp.ones(rows.shape, bool)
    places = {"positions": build_positions_from_mask(mask)}
    return {
        "input_tokens": rows,
        "input_mask": mask,
        "attention_mask": make_causal_attn_mask(mask),
    } | places


def save(path, state, prefix="model."):
    """Writes parameters as Hugging Face names them, with matrices [out, in]."""
    arrays = {}
    for keys, leaf in nnx.to_flat_state(state):
        name = ".".join(map(str, keys))
        x = np.asarray(leaf[...])
        for old, new in NAMES.items():
            name = name.replace(old, new)
        if "proj" in name:  # heads are two axes
            x = x.reshape(-1, x.shape[-1]) if "o_proj" in name else x.reshape(len(x), -1)
        arrays[f"{prefix}{name}.weight"] = np.ascontiguousarray(x.T if "proj" in name else x)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(arrays, path)


def load_base(folder):
    """Loads the frozen model as Hugging Face saves it, sharded; makes one where there is none."""
    if not folder.exists():
        model = qwen3.Qwen3(SHAPE, rngs=nnx.Rngs(0))
        trainer = PeftTrainer(model, optax.adamw(3e-3), TrainingConfig(eval_every_n_steps=1))
        trainer.with_gen_model_input_fn(loss_inputs)
        trainer.train(read("Python", 0, step) for step in range(200))
        save(folder / "model.safetensors", nnx.state(model, nnx.Param))
    # Without a mesh Tunix puts it on the first device of all processes, which others cannot reach.
    mesh = jax.sharding.Mesh(np.array(jax.local_devices())[:, None], ("fsdp", "tp"))
    return create_model_from_safe_tensors(str(folder), SHAPE, mesh, jnp.float32)
