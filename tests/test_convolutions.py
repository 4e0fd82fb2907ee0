"""Convolutions of simulated nodes: what takes the place of the grouped ones is right, and taken."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core.primitives import conv_general_dilated_p
from jax.sharding import Mesh

import gossipjax as gx
from gossipjax.nodes._convolutions import vmap_nodes
from gossipjax.nodes.program import all_equations

MODULE = sys.modules[vmap_nodes.__module__]  # `gossipjax.spmd` is the function
N = 4
IMAGES = ("NHWC", "HWIO", "NHWC")
# Shapes of the images and the kernel of a node, and how they are convolved.
KINDS = {
    "same": ((2, 9, 8, 3), (3, 3, 3, 5), {"padding": "SAME"}),
    "strided": ((2, 9, 8, 3), (3, 3, 3, 5), {"window_strides": (2, 2), "padding": "SAME"}),
    "valid": ((2, 11, 8, 3), (4, 3, 3, 5), {"window_strides": (3, 2), "padding": "VALID"}),
    "uneven edges": ((2, 9, 8, 3), (3, 3, 3, 5), {"padding": ((2, 0), (0, 3))}),
    "cut edges": ((2, 9, 8, 3), (3, 3, 3, 5), {"padding": ((-1, 0), (0, -2))}),
    "dilated": ((2, 13, 12, 3), (3, 3, 3, 5), {"padding": "SAME", "rhs_dilation": (2, 3)}),
    "transposed, strided, dilated": (
        (2, 5, 6, 3),
        (3, 3, 3, 5),
        {
            "window_strides": (2, 1),
            "padding": ((2, 1), (2, 2)),
            "lhs_dilation": (3, 2),
            "rhs_dilation": (1, 2),
        },
    ),
    "1 x 1, channels first": (
        (2, 3, 9, 8),
        (5, 3, 1, 1),
        {"padding": "VALID", "dimension_numbers": ("NCHW", "OIHW", "NCHW")},
    ),
    "sequences": (
        (2, 17, 3),
        (3, 3, 4),
        {
            "window_strides": (1,),
            "padding": ((4, 0),),
            "rhs_dilation": (2,),
            "dimension_numbers": ("NWC", "WIO", "NWC"),
        },
    ),
    "volumes": (
        (2, 6, 5, 7, 3),
        (3, 2, 3, 3, 4),
        {
            "window_strides": (1, 2, 1),
            "padding": "SAME",
            "dimension_numbers": ("NDHWC", "DHWIO", "NDHWC"),
        },
    ),
    "a feature": ((2, 9, 8, 1), (3, 3, 1, 1), {"padding": "SAME"}),
}
GROUPED = {"feature_group_count": 2, "padding": "SAME"}


def make_loss(options):
    options = {"window_strides": (1, 1), "dimension_numbers": IMAGES} | options

    def loss(x, w):
        y = lax.conv_general_dilated(x, w, **options).astype(jnp.float32)
        weights = jnp.arange(1.0, y.size + 1).reshape(y.shape) / y.size
        return jnp.sum(jnp.sin(y) * weights)  # whose gradient differs from place to place

    return jax.value_and_grad(loss, (0, 1))


def draw(shape, number, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(number), (N, *shape), dtype)


def find_convolutions(fn, *args):
    eqns = all_equations(jax.make_jaxpr(fn)(*args).eqns)
    return [eqn for eqn in eqns if eqn.primitive is conv_general_dilated_p]


def compile_for(platform, monkeypatch):
    """Takes the branch of another platform, on the one that is here."""

    def choose(*args, default, **ways):
        return ways.get(platform, default)(*args)

    monkeypatch.setattr(lax, "platform_dependent", choose)
    monkeypatch.setattr(MODULE, "MIN_CPU_FLOPS", 0)


@pytest.mark.parametrize("platform", ["cuda", "cpu"])
def test_value_and_both_gradients_are_those_of_lax(platform, monkeypatch):
    compile_for(platform, monkeypatch)
    args = {name: (draw(x, 0), draw(w, 1)) for name, (x, w, _) in KINDS.items()}
    losses = {name: make_loss(options) for name, (_, _, options) in KINDS.items()}

    def run(vmap):
        return {name: vmap(losses[name])(*args[name]) for name in KINDS}

    expected = jax.jit(lambda: run(jax.vmap))()
    actual = jax.jit(lambda: run(lambda fn: vmap_nodes(fn, (0, 0), "nodes", N)))()
    for name in KINDS:
        for a, b in zip(*map(jax.tree.leaves, (actual[name], expected[name])), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * abs(b).max(), err_msg=name)


def test_narrow_floats_are_summed_in_wide_ones(monkeypatch):
    compile_for("cuda", monkeypatch)
    x, w, options = KINDS["strided"]
    args = draw(x, 0, jnp.bfloat16), 0.02 * draw(w, 1, jnp.bfloat16)
    actual = jax.jit(vmap_nodes(make_loss(options), (0, 0), "nodes", N))(*args)
    wide = jax.vmap(make_loss(options))(*(a.astype(jnp.float32) for a in args))
    for a, b in zip(*map(jax.tree.leaves, (actual, wide)), strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b, rtol=0.02, atol=0.02 * abs(b).max())


def test_a_gpu_has_no_grouped_convolution_left_but_a_models_own(monkeypatch):
    compile_for("cuda", monkeypatch)
    for x, w, options in KINDS.values():
        loss = vmap_nodes(make_loss(options), (0, 0), "nodes", N)
        assert not find_convolutions(loss, draw(x, 0), draw(w, 1))
    # Of a model's own groups, a kernel that all nodes share, and what would take too much memory.
    own = vmap_nodes(make_loss(GROUPED), (0, 0), "nodes", N)
    assert len(find_convolutions(own, draw((2, 9, 8, 4), 0), draw((3, 3, 2, 6), 1))) == 3
    x, w, options = KINDS["same"]
    shared = vmap_nodes(make_loss(options), (0, None), "nodes", N)
    assert find_convolutions(shared, draw(x, 0), draw(w, 1)[0])
    monkeypatch.setattr(MODULE, "MAX_BYTES", 1000)
    large = vmap_nodes(make_loss(options), (0, 0), "nodes", N)
    assert len(find_convolutions(large, draw(x, 0), draw(w, 1))) == 3


@pytest.mark.parametrize(
    "nodes", [gx.Nodes(N), gx.Nodes(N, mesh=Mesh(np.array(jax.devices()[:2]), ("nodes",)))]
)
def test_programs_inside_programs_are_rewritten_once(nodes, monkeypatch):
    """Scans, branches and rematerialized parts; a body is one program wherever it is used."""
    compile_for("cuda", monkeypatch)
    kernel = draw((3, 3, 3, 3), 1)
    images = draw((2, 9, 8, 3), 0)

    @jax.jit
    def layer(x, w):
        return jnp.tanh(lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=IMAGES))

    def loss(w, x):
        x, _ = lax.scan(lambda x, _: (layer(x, w), None), x, None, length=2)
        x = lax.cond(x.sum() > 0, lambda x: layer(x, w), lambda x: x, x)
        x = jax.checkpoint(layer)(layer(x, w), w)
        return lax.pmean(jnp.sum(x**2), "nodes")

    step = nodes.spmd(jax.grad(loss))
    expected = jax.vmap(jax.grad(loss), axis_name="nodes")(kernel, images)
    np.testing.assert_allclose(step(kernel, images), expected, atol=1e-4 * abs(expected).max())
    assert not find_convolutions(step._jitted, kernel, images)
