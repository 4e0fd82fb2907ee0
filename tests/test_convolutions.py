"""Convolutions of simulated nodes: what takes the place of the grouped ones is right, and taken."""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core.primitives import conv_general_dilated_p
from modes import make_mesh

import gossipjax as gx
from gossipjax.nodes._convolutions import vmap_nodes
from gossipjax.nodes.equations import all_equations

MODULE = sys.modules[vmap_nodes.__module__]  # `gossipjax.spmd` is the function
N = 4
IMAGES = ("NHWC", "HWIO", "NHWC")
# Shapes of the images and the kernel of a node, and how they are convolved.
KINDS = {
    "same": ((2, 9, 8, 3), (3, 3, 3, 5), {"padding": "SAME"}),
    "strided": ((2, 9, 8, 3), (3, 3, 3, 5), {"window_strides": (2, 2), "padding": "SAME"}),
    "uneven edges": ((2, 9, 8, 3), (3, 3, 3, 5), {"padding": ((2, 0), (0, 3))}),
    "cut edges": ((2, 9, 8, 3), (3, 3, 3, 5), {"padding": ((-1, 0), (0, -2))}),
    "dilated": ((2, 13, 12, 3), (3, 3, 3, 5), {"padding": "SAME", "rhs_dilation": (2, 3)}),
    "transposed, strided, dilated": (
        (2, 5, 6, 3),
        (3, 3, 3, 5),
        {"window_strides": (2, 1), "padding": ((2, 1), (2, 2))}
        | {"lhs_dilation": (3, 2), "rhs_dilation": (1, 2)},
    ),
    "1 x 1, channels first": (
        (2, 3, 9, 8),
        (5, 3, 1, 1),
        {"padding": "VALID", "dimension_numbers": ("NCHW", "OIHW", "NCHW")},
    ),
    "sequences": (
        (2, 17, 3),
        (3, 3, 4),
        {"window_strides": (1,), "padding": ((4, 0),), "rhs_dilation": (2,)}
        | {"dimension_numbers": ("NWC", "WIO", "NWC")},
    ),
    "volumes": (
        (2, 6, 5, 7, 3),
        (3, 2, 3, 3, 4),
        {"window_strides": (1, 2, 1), "padding": "SAME"}
        | {"dimension_numbers": ("NDHWC", "DHWIO", "NDHWC")},
    ),
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


BOTH = pytest.mark.parametrize("nodes", [gx.Nodes(N), gx.Nodes(N, mesh=make_mesh(2))])


@BOTH
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


@jax.custom_jvp
def of_own_jvp(x):
    return jnp.sin(x)


of_own_jvp.defjvp(lambda primals, tangents: (jnp.sin(primals[0]), 2 * tangents[0]))


@jax.custom_vjp
def of_own_vjp(x):
    return jnp.sin(x)


of_own_vjp.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (2 * g,))


def bisect(f, start):
    del start
    return jax.lax.fori_loop(0, 60, lambda _, x: x - 0.2 * f(x), jnp.zeros(()))


# Each primitive of JAX that holds programs; `layer` has a convolution, `x` is `[D]` for it.
HIGHER_ORDER = {
    "custom_linear_solve": lambda layer, x: jnp.linalg.solve(
        jnp.eye(6) + jnp.outer(layer(x), x) / 9, x
    ),
    "custom_root": lambda layer, x: lax.custom_root(
        lambda y: y**3 + y - jnp.sum(layer(x)), jnp.zeros(()), bisect, lambda g, y: y / g(1.0)
    ),
    "expm": lambda layer, x: jax.scipy.linalg.expm(jnp.outer(layer(x), x) / 99),
    "while": lambda layer, x: lax.while_loop(lambda y: y[0] < 9, lambda y: layer(y) + 11, x),
    "scan": lambda layer, x: lax.scan(lambda y, _: (layer(y), y), x, None, length=2),
    "cond": lambda layer, x: lax.cond(x[0] > 0, layer, lambda y: y, x),
    "jit": lambda layer, x: jax.jit(layer)(x),
    "checkpoint": lambda layer, x: jax.checkpoint(layer)(x),
    "custom_jvp": lambda layer, x: jax.jacfwd(lambda y: of_own_jvp(layer(y)))(x),
    "custom_vjp": lambda layer, x: jax.grad(lambda y: of_own_vjp(layer(y)).sum())(x),
    "no derivative": lambda layer, x: of_own_jvp(x) + of_own_vjp(layer(x)),
    "custom_vmap": lambda layer, x: jax.custom_batching.sequential_vmap(jnp.sin)(layer(x)),
    "top_k, sort": lambda layer, x: lax.top_k(jnp.sort(layer(x)), 2),
    "reduce": lambda layer, x: lax.reduce(layer(x), 0.0, lambda a, b: a + b + 1, (0,)),
    "reduce window": lambda layer, x: lax.reduce_window(layer(x), 0.0, lax.add, (2,), (1,), "SAME"),
    "scatter": lambda layer, x: x.at[jnp.array([1, 1])].add(layer(x)[:2]),
    "no results": lambda layer, x: lax.conv_general_dilated(
        x.reshape(1, 1, 2, 3), jnp.ones((1, 1, 3, 1)) * layer(x)[0], (1, 1), "VALID"
    ),
}


@BOTH
def test_whatever_holds_programs_runs_as_under_vmap(nodes, monkeypatch):
    """The convolution of each node inside of it, and the kinds of tuples that JAX uses."""
    compile_for("cuda", monkeypatch)

    def run_all(kernel, x):
        def layer(x):
            y = lax.conv_general_dilated(x[None, None], kernel[None, None], (1,), "SAME")
            return jnp.tanh(y[0, 0])

        return {name: fn(layer, x) for name, fn in HIGHER_ORDER.items()}

    kernel, x = draw((3,), 1), draw((6,), 0)
    actual = nodes.spmd(run_all)(kernel, x)
    expected = jax.jit(jax.vmap(run_all))(kernel, x)
    for name in HIGHER_ORDER:
        for a, b in zip(*map(jax.tree.leaves, (actual[name], expected[name])), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=name)


def test_a_program_gets_a_bounded_number_of_convolutions(monkeypatch):
    """A CPU's compiler takes as long for each convolution of a node."""
    monkeypatch.setattr(MODULE, "MIN_CPU_FLOPS", 0)
    monkeypatch.setattr(MODULE, "MAX_CPU_CONVOLUTIONS", 2 * N)
    x, w, options = KINDS["same"]

    def loss(x, *kernels):
        return sum(make_loss(options)(x, w)[0] for w in kernels)

    compile_for("cpu", monkeypatch)
    program = vmap_nodes(loss, (0,) * 6, "nodes", N)
    kernels = [draw(w, k) for k in range(5)]
    assert len(find_convolutions(program, draw(x, 9), *kernels)) == 2 * N
    np.testing.assert_allclose(
        program(draw(x, 9), *kernels), jax.vmap(loss)(draw(x, 9), *kernels), rtol=1e-5
    )


@pytest.mark.parametrize("platform", ["cuda", "cpu"])
@pytest.mark.parametrize("in_axes", [(0, 0), (None, 0), (0, None)], ids=["both", "w", "x"])
def test_seeds_around_nodes_are_rewritten_with_them(in_axes, platform, monkeypatch):
    """A `vmap` of the user, over several models of each node; and derivatives of a program."""
    compile_for(platform, monkeypatch)
    monkeypatch.setattr(MODULE, "MIN_CPU_FLOPS", 0)
    shape, kernel, options = KINDS["strided"]
    loss = make_loss(options)
    arrays = [
        jnp.stack([draw(s, k + 2 * i) for k in range(2)]) for i, s in enumerate((shape, kernel))
    ]
    args = [x if axis == 0 else x[0] for x, axis in zip(arrays, in_axes, strict=True)]
    seeds = jax.vmap(vmap_nodes(loss, (0, 0), "nodes", N), in_axes)
    if in_axes[1] == 0:
        found = {eqn.params["feature_group_count"] for eqn in find_convolutions(seeds, *args)}
        assert found <= ({1} if platform == "cpu" else set())
    expected = jax.vmap(jax.vmap(loss), in_axes)(*args)
    check = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(check, jax.jit(seeds)(*args), expected)
    nodes = vmap_nodes(lambda x, w: loss(x, w)[0], (0, 0), "nodes", N)
    one = [x[0] for x in arrays]
    gradients = jax.grad(lambda *args: nodes(*args).sum(), (0, 1))(*one)
    jax.tree.map(check, gradients, jax.vmap(loss)(*one)[1])
