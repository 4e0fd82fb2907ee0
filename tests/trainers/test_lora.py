"""Adapters of Tunix and qwix gossip, and peft and Tunix load the average of them."""

# pyright: reportMissingImports=false

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tunix")

import jax
import optax
from flax import nnx
from safetensors.numpy import load_file
from tunix.models.qwen3 import params as qwen3_params

from experiments.examples import lora, tiny_qwen

pytestmark = [
    pytest.mark.trainers,
    pytest.mark.filterwarnings("default"),  # of Tunix and qwix themselves
]
ALGORITHMS = ("sgp", "outer", "asynchronous")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("lora")


@pytest.fixture(scope="module")
def trained(folder):
    """What each way reaches in 30 steps, and last the adapters in the folder."""
    options = [lora.Options(name, folder, steps=30, every=10) for name in ALGORITHMS]
    return {one.algorithm: lora.main(one) for one in options}


def predict(model):
    rows = tiny_qwen.loss_inputs(tiny_qwen.read("C")[:4])
    seen = rows["input_tokens"], rows["positions"], None, rows["attention_mask"]
    return np.asarray(model(*seen)[0])


def test_two_nodes_learn_what_each_reads(folder, trained):
    base = tiny_qwen.load_base(folder / "base")
    trainer = lora.Trainer(base, optax.identity(), lora.TrainingConfig(eval_every_n_steps=1))
    for domain, name in ((0, "English"), (1, "C")):
        before = trainer.loss_fn(base, **tiny_qwen.loss_inputs(tiny_qwen.read(name)))
        for algorithm in ("sgp", "outer"):  # one process is one asynchronous node, of English
            assert trained[algorithm][1][domain] < before
    before = trainer.loss_fn(base, **tiny_qwen.loss_inputs(tiny_qwen.read("English")))
    assert trained["asynchronous"][1][0] < before


def test_the_base_is_as_it_was(folder, trained):
    base = nnx.to_flat_state(nnx.state(tiny_qwen.load_base(folder / "base"), nnx.Param))
    for model, _ in trained.values():
        kept = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
        for path, leaf in base:
            assert (np.asarray(leaf[...]) == np.asarray(kept[path][...])).all()


def test_peft_loads_the_adapters(folder, trained):
    """On the base in transformers, with the logits of the model in JAX."""
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import load_file as load_torch

    shape = tiny_qwen.SHAPE
    config = transformers.Qwen3Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.embed_dim,
        intermediate_size=shape.hidden_dim,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.norm_eps,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": float(shape.rope_theta)},
    )
    theirs = transformers.Qwen3ForCausalLM(config).eval()
    theirs.load_state_dict(load_torch(folder / "base/model.safetensors"), strict=False)
    rows = torch.tensor(tiny_qwen.read("C")[:4].astype(np.int64))
    with torch.no_grad():
        base = theirs(rows).logits.numpy()
        adapted = peft.PeftModel.from_pretrained(theirs, folder).eval()(rows).logits.numpy()
    np.testing.assert_allclose(base, predict(tiny_qwen.load_base(folder / "base")), atol=1e-3)
    np.testing.assert_allclose(adapted, predict(trained["asynchronous"][0]), atol=1e-3)
    assert abs(adapted - base).max() > 0.1


def test_tunix_merges_and_loads_the_adapters(folder, trained):
    """By its own writer of merged models."""
    model, _ = trained["asynchronous"]
    merged = folder / "merged"
    qwen3_params.save_lora_merged_model_as_safetensors(
        f"{folder / 'base'}", f"{merged}", model, lora.LORA["r"], lora.LORA["lora_alpha"]
    )
    np.testing.assert_allclose(predict(tiny_qwen.load_base(merged)), predict(model), atol=1e-3)


def test_names_are_those_of_peft(folder, trained):
    arrays = load_file(folder / "adapter_model.safetensors")
    layer = "base_model.model.model.layers.1"
    shapes = {name.removeprefix(layer): x.shape for name, x in arrays.items() if layer in name}
    assert shapes[".self_attn.o_proj.lora_A.weight"] == (8, 64)
    assert shapes[".self_attn.k_proj.lora_B.weight"] == (32, 8)
    assert shapes[".mlp.down_proj.lora_A.weight"] == (8, 192)
    assert len(arrays) == 2 * 7 * 2


def test_the_page_makes_factors_of_the_mean_product():
    """As good as the SVD of the dense mean, and A where the mean of the A is if they are equal."""
    page = (Path(__file__).parents[2] / "docs/guides/lora.md").read_text()
    [code] = re.findall(r"\n(def best_rank.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {"jnp": jax.numpy}
    exec(code, names)
    draws = np.random.default_rng(0)
    a, b = draws.normal(size=(2, 12, 3)), draws.normal(size=(2, 3, 9))
    u, s, v = np.linalg.svd((a @ b).mean(0))
    new_a, new_b = names["best_rank"](list(a.astype("float32")), list(b.astype("float32")))
    np.testing.assert_allclose(new_a @ new_b, (u[:, :3] * s[:3]) @ v[:3], atol=1e-4)
    start, _ = names["best_rank"]([a[0].astype("float32")] * 2, [np.zeros((3, 9), "float32")] * 2)
    np.testing.assert_allclose(start, a[0], atol=1e-5)


@pytest.mark.parametrize("algorithm", ["sgp", "asynchronous"])
def test_two_processes(algorithm, folder, trained):
    """Both domains are learned, with the base sharded over the devices of a process."""
    kind = (
        ["--asynchronous"] if algorithm == "asynchronous" else ["--local-devices", "2"]
    )  # sharded over two
    program = ["-m", "experiments.examples.lora", "--folder", str(folder)]
    command = [sys.executable, "-m", "gossipjax.launch", "--processes", "2", *kind, "--"]
    command += [sys.executable, *program, "--algorithm", algorithm, "--steps", "30"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("XLA_FLAGS", None)
    done = subprocess.run(
        [*command, "--every", "10"], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stdout.splitlines() if "loss on English" in line]
    assert float(line.split("on C ")[1].split(",")[0]) < 3.4
