"""All models in bfloat16, and with activations that are computed again in the backward pass."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.models import ResNetCifar
from experiments.models.acoustic import AcousticLSTM, AcousticSize
from experiments.models.decoder import Decoder
from experiments.models.layers import make_dropout_rngs
from experiments.models.seq2seq import Seq2Seq, translate
from experiments.models.transformer import Size

SIZE = Size(layers=1, width=8, heads=2, hidden=12)
FRAMES = jax.random.normal(jax.random.key(1), (2, 3, 6))
TOKENS = jax.random.randint(jax.random.key(2), (2, 8), 0, 11)
SOURCES = jnp.array([[3, 4, 5, 6], [6, 5, 0, 0]])
TARGETS = jnp.array([[3, 4, 2], [5, 6, 2]])
MODELS = {
    "acoustic": (AcousticLSTM(7, AcousticSize(layers=1, cells=8, projection=4)), (FRAMES,)),
    "decoder": (Decoder(11, SIZE, max_length=8), (TOKENS,)),
    "seq2seq": (Seq2Seq(7, SIZE, dropout=0.5), (SOURCES, TARGETS)),
    "resnet": (ResNetCifar(classes=8, depth=8, width=4), (jnp.ones((2, 32, 32, 3)),)),
}


@pytest.mark.parametrize("name", ["acoustic", "decoder", "seq2seq"])
def test_bfloat16(name):
    """Parameters and computation; logits are float32, and near those of float32."""
    model, inputs = MODELS[name]
    variables = jax.jit(model.init)(jax.random.key(0), *inputs)
    low = model.clone(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    shapes = jax.eval_shape(low.init, jax.random.key(0), *inputs)
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {jnp.dtype("bfloat16")}
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), variables)
    logits = jax.jit(low.apply)(rounded, *inputs)
    expected = jax.jit(model.apply)(variables, *inputs)
    assert logits.dtype == jnp.float32
    assert np.abs(logits - expected).mean() < 0.05 * np.abs(expected).mean()
    if name == "seq2seq":
        assert np.isfinite(translate(low, rounded, SOURCES, extra_length=2).scores).all()


@pytest.mark.parametrize("name", MODELS)
def test_remat_changes_no_gradient(name):
    """Nor the names of the parameters; dropout drops the same units again."""
    model, inputs = MODELS[name]
    more: dict[str, Any] = {"mutable": ["batch_stats"]} if name == "resnet" else {}
    if name == "seq2seq":
        more |= {"rngs": make_dropout_rngs(jnp.arange(2))}
    if more:
        more |= {"train": True}

    def compute_loss(model, variables):
        found = model.apply(variables, *inputs, **more)
        return (jnp.sin(found[0] if name == "resnet" else found) ** 2).mean()

    remat = model.clone(remat=True)
    variables = jax.jit(model.init)(jax.random.key(0), *inputs)
    names = jax.eval_shape(remat.init, jax.random.key(0), *inputs)
    assert jax.tree.structure(names) == jax.tree.structure(variables)
    traced = [
        jax.jit(jax.grad(partial(compute_loss, each))).trace(variables) for each in (remat, model)
    ]
    assert ["remat" in str(program.jaxpr) for program in traced] == [True, False]
    compare = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(compare, *(program.lower().compile()(variables) for program in traced))
