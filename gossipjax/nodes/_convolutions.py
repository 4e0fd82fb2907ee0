"""Convolutions of simulated nodes, as fast as by hand.

`vmap` over the kernels of N nodes makes one convolution of N groups. cuDNN runs it at about a tenth
of what a GPU can do, XLA for CPUs at a third. So this module rewrites the traced program, forward
and both gradients. On a GPU it turns such a convolution into slices of the image and one matrix
product whose batch is the groups, on a CPU into one convolution per node. A CPU's compiler takes
about 15 ms for each of these; where a program would get too many, the others become products there,
too. You need not change the model. Programs inside of others that JAX's next rules hide (see
`equations.params_of`) keep their convolutions.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun, jaxprs_in_params
from jax.extend.core.primitives import conv_general_dilated_p

MAX_BYTES = 2**32  # between the slices and the product: beyond it a convolution stays as it is
MAX_SLICES = 64  # of one convolution: they are unrolled in the program
MIN_CPU_FLOPS = 5e6  # of one node: below it, compiling a convolution per node does not pay
MAX_CPU_CONVOLUTIONS = 256  # of single nodes in a program


def vmap_nodes(fn: Callable[..., Any], in_axes: Any, axis_name: str, size: int) -> Any:
    """Returns `fn` under `jax.vmap` over nodes, with convolutions rewritten for GPUs and CPUs."""
    mapped = jax.vmap(fn, in_axes, axis_name=axis_name, axis_size=size)
    if size == 1:
        return mapped

    def run(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(mapped, return_shape=True)(*args)
        leaves = run_rewritten(closed, (size,))(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

    return run


def run_rewritten(closed: Any, sizes: tuple[int, ...]) -> Callable[..., list[Any]]:
    """Returns a traced program as a function, with faster forms of the nodes' convolutions.

    Convolutions with one of `sizes` as their number of groups are rewritten: the number of nodes,
    and under a `vmap` of the user, as over seeds, the number of nodes of all seeds.
    """
    try:
        rewritten = _Rewriter(sizes).rewrite(closed)
    except Exception:  # a program of a form that is not known runs as it is, only slower
        rewritten = closed
    plain = jaxpr_as_fun(rewritten)
    if rewritten is closed:
        return plain
    # A `vmap` around it makes convolutions of more groups, so it rewrites the original program.
    call = jax.custom_batching.custom_vmap(lambda *args: plain(*args))

    @call.def_vmap
    def batch(count: int, batched: list[bool], *args: Any) -> tuple[list[Any], list[bool]]:
        mapped = jax.vmap(jaxpr_as_fun(closed), [0 if b else None for b in batched])
        more_sizes = *sizes, *(count * size for size in sizes)
        outputs = run_rewritten(jax.make_jaxpr(mapped)(*args), more_sizes)(*args)
        return outputs, [True] * len(outputs)

    # JAX has no derivative of a `custom_vmap`: take that of the program.
    differentiable = jax.custom_jvp(lambda *args: call(*args))
    differentiable.defjvp(lambda primals, tangents: jax.jvp(plain, primals, tangents))
    return differentiable


class _Rewriter:
    """Replaces convolutions whose number of groups is in `sizes`, also in programs inside."""

    def __init__(self, sizes: tuple[int, ...]):
        self.sizes = sizes
        # Old and new program by the id of the old one, which is kept so that no other object gets
        # its id. A program that is called twice stays one program.
        self.done: dict[int, tuple[Any, Any]] = {}
        self.cpu_convolutions = 0  # so far, each of one node

    def rewrite(self, jaxpr: Any) -> Any:
        """Rewrites a program; returns the same object if nothing changes."""
        if id(jaxpr) not in self.done:
            open_jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
            if open_jaxpr is not jaxpr:  # up to JAX 0.10 a closed one contains an open one
                fields = {"jaxpr": self.rewrite(open_jaxpr)}
                is_same = fields["jaxpr"] is open_jaxpr
            else:
                fields = {"eqns": [self._rewrite_equation(eqn) for eqn in jaxpr.eqns]}
                is_same = all(map(operator.is_, fields["eqns"], jaxpr.eqns))
            new = jaxpr if is_same else jaxpr.replace(**fields)
            self.done[id(jaxpr)] = (jaxpr, new)
        return self.done[id(jaxpr)][1]

    def _rewrite_equation(self, eqn: Any) -> Any:
        """Rewrites an equation and the programs in it; returns the same object if none changes."""
        if eqn.primitive is conv_general_dilated_p:
            return self._rewrite_convolution(eqn)
        if eqn.primitive.name == "pallas_call":  # contains no program of XLA
            return eqn
        params = {name: self._rewrite_param(value) for name, value in eqn.params.items()}
        is_same = all(map(operator.is_, params.values(), eqn.params.values()))
        return eqn if is_same else eqn.replace(params=params)

    def _rewrite_param(self, value: Any) -> Any:
        """Rewrites a parameter of an equation if it is a program or a tuple of programs."""
        if isinstance(value, ClosedJaxpr | Jaxpr):
            return self.rewrite(value)
        if not isinstance(value, tuple) or not jaxprs_in_params({"": value}):
            return value
        # The branches of a `cond`; the programs of `custom_linear_solve` have names.
        programs = list(map(self._rewrite_param, value))
        if all(map(operator.is_, programs, value)):
            return value
        return type(value)(*programs) if hasattr(value, "_fields") else tuple(programs)

    def _rewrite_convolution(self, eqn: Any) -> Any:
        """Returns a call that computes a convolution in the fastest way on each platform.

        It returns the equation itself if no other way is faster on any platform.
        """
        lhs, rhs = (variable.aval for variable in eqn.invars)
        sizes = _Sizes.of(lhs, rhs, eqn.params)
        # If the groups are a multiple of the nodes, the model itself has groups, as in a depthwise
        # convolution. Leaving them is faster than products (64 channels in 8 groups on an H100: 1.0
        # ms instead of 3.7).
        is_float = jnp.issubdtype(lhs.dtype, jnp.floating)
        if sizes.groups not in self.sizes or not is_float or not sizes.windows:
            return eqn
        ways = {}
        bytes_between = min(sizes.windows, sizes.taps) * lhs.dtype.itemsize
        if sizes.slices <= MAX_SLICES and bytes_between <= MAX_BYTES:
            ways |= dict.fromkeys(("cuda", "rocm"), convolve_by_product)
        if sizes.flops / sizes.groups >= MIN_CPU_FLOPS:
            if self.cpu_convolutions + sizes.groups <= MAX_CPU_CONVOLUTIONS:
                self.cpu_convolutions += sizes.groups
                ways["cpu"] = functools.partial(convolve_by_node, nodes=sizes.groups)
            elif ways:
                ways["cpu"] = convolve_by_product
        if not ways:
            return eqn

        def convolve(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
            default = functools.partial(conv_general_dilated_p.bind, **eqn.params)
            bound = {name: functools.partial(way, params=eqn.params) for name, way in ways.items()}
            return lax.platform_dependent(lhs, rhs, default=default, **bound)

        [call] = jax.make_jaxpr(jax.jit(convolve))(lhs, rhs).eqns
        return call.replace(invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info)


class _Sizes(NamedTuple):
    """The sizes of a convolution of G groups: `[G, B, C, *space]` by `[G, O, C, *kernel]`."""

    groups: int
    batch: int
    channels: int
    features: int
    space: tuple[int, ...]
    kernel: tuple[int, ...]
    out: tuple[int, ...]
    is_strided: bool

    @classmethod
    def of(cls, lhs: Any, rhs: Any, params: dict[str, Any]) -> _Sizes:
        """Returns the sizes of a `conv_general_dilated` of these operands and parameters."""
        numbers = params["dimension_numbers"]
        batch, channels, *space = (lhs.shape[axis] for axis in numbers.lhs_spec)
        features, _, *kernel = (rhs.shape[axis] for axis in numbers.rhs_spec)
        by_feature, by_batch = params["feature_group_count"], params["batch_group_count"]
        groups = max(by_feature, by_batch)
        axes = zip(
            space,
            kernel,
            params["lhs_dilation"],
            params["rhs_dilation"],
            params["padding"],
            params["window_strides"],
            strict=True,
        )
        out = (
            max(0, ((n - 1) * spread + 1 + low + high - (k - 1) * dilation - 1) // stride + 1)
            for n, k, spread, dilation, (low, high), stride in axes
        )
        return cls(
            groups,
            batch // by_batch,
            channels // by_feature,
            features // groups,
            tuple(space),
            tuple(kernel),
            tuple(out),
            any(stride > 1 for stride in params["window_strides"]),
        )

    @property
    def windows(self) -> int:
        """Counts the elements of all windows of the image, which a product after slicing reads."""
        taps = math.prod(self.kernel) * math.prod(self.out)
        return self.groups * self.batch * self.channels * taps

    @property
    def taps(self) -> float:
        """Counts the elements of the products with each tap of the kernel, before their sum."""
        if self.is_strided:
            return math.inf  # most of them would be computed for nothing
        taps = math.prod(self.kernel) * math.prod(self.space)
        return self.groups * self.batch * self.features * taps

    @property
    def slices(self) -> int:
        """The number of slices that `_slide` takes of the image, over all axes."""
        return sum(map(min, self.kernel, self.out))

    @property
    def flops(self) -> int:
        """The floating-point operations of the whole convolution, of all groups."""
        return 2 * self.windows * self.features


def convolve_by_product(lhs: jax.Array, rhs: jax.Array, params: dict[str, Any]) -> jax.Array:
    """Computes `conv_general_dilated`, from its primitive's parameters, by one `dot_general`.

    It works for any number of axes, strides, padding, dilations and groups.
    """
    sizes = _Sizes.of(lhs, rhs, params)
    numbers = params["dimension_numbers"]
    is_by_batch = params["batch_group_count"] > 1
    x = _split_groups(lhs.transpose(numbers.lhs_spec), 0 if is_by_batch else 1, sizes.groups)
    w = _split_groups(rhs.transpose(numbers.rhs_spec), 0, sizes.groups)
    # Channels stand last, as in the images of most models, so slices are contiguous in memory.
    x = jnp.moveaxis(x, 2, -1)  # G B *space C
    w = jnp.moveaxis(w, (2, 1), (-2, -1))  # G *kernel C O
    # Choose the way with fewer elements in between. Slices first if the result is small, as in a
    # forward pass; the product first if the image is small, as in a gradient for the image of a
    # strided convolution, whose slices would be of zeros.
    convolve = _sum_taps if sizes.taps < sizes.windows else _multiply_windows
    y = jnp.moveaxis(convolve(x, w, sizes, params), 0, -2)  # B *out G O
    y = jnp.moveaxis(y.reshape(*y.shape[:-2], -1), -1, 1)
    dtype = params["preferred_element_type"] or lhs.dtype
    return jnp.moveaxis(y, range(y.ndim), numbers.out_spec).astype(dtype)


def convolve_by_node(
    lhs: jax.Array, rhs: jax.Array, params: dict[str, Any], nodes: int
) -> jax.Array:
    """Computes `conv_general_dilated` by one convolution per node, and joins the results."""
    numbers = params["dimension_numbers"]
    kind = "batch_group_count" if params["batch_group_count"] > 1 else "feature_group_count"
    params = params | {kind: params[kind] // nodes}
    lhs_axis = numbers.lhs_spec[0 if kind == "batch_group_count" else 1]
    parts = zip(
        jnp.split(lhs, nodes, lhs_axis), jnp.split(rhs, nodes, numbers.rhs_spec[0]), strict=True
    )
    out = [conv_general_dilated_p.bind(*part, **params) for part in parts]
    return jnp.concatenate(out, numbers.out_spec[1])


def _split_groups(x: jax.Array, axis: int, groups: int) -> jax.Array:
    """Splits an axis into equal groups; their axis becomes the first, the rest stays in place."""
    shape = (*x.shape[:axis], groups, x.shape[axis] // groups, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)


def _multiply(x: jax.Array, w: jax.Array, axes: Any, params: dict[str, Any]) -> jax.Array:
    """Multiplies over `axes` of both, for each group; narrow floats are summed in 32 bits."""
    return lax.dot_general(
        x,
        w,
        (axes, ((0,), (0,))),
        precision=params["precision"],
        preferred_element_type=np.promote_types(x.dtype, np.float32),
    )


def _multiply_windows(
    x: jax.Array, w: jax.Array, sizes: _Sizes, params: dict[str, Any]
) -> jax.Array:
    """Convolves by one product of the kernel with all windows of the image, in slices.

    `x` is `[G, B, *space, C]`, and `w` is `[G, *kernel, C, O]`.
    """
    edges = [
        (low, high, spread - 1)
        for (low, high), spread in zip(params["padding"], params["lhs_dilation"], strict=True)
    ]
    none = (0, 0, 0)
    x = lax.pad(x, jnp.zeros((), x.dtype), [none, none, *edges, none])
    strides, dilations = params["window_strides"], params["rhs_dilation"]
    for i, (taps, out) in enumerate(zip(sizes.kernel, sizes.out, strict=True)):
        x = _slide(x, 2 + 2 * i, taps, out, strides[i], dilations[i])  # G B k0 o0 k1 o1 ... C
    x_axes, w_axes = [*range(2, x.ndim, 2)], [*range(1, w.ndim - 1)]  # taps, then channels
    numbers = params["dimension_numbers"]
    channel_axis = numbers.lhs_spec[1]
    last_image_axis = numbers.lhs_spec[-1]
    if channel_axis < last_image_axis:
        # The product goes over the axes in the order in which they are in memory. In the gradient
        # for the kernel, the axis of examples, which comes first, is used as the axis of channels.
        x_axes, w_axes = x_axes[-1:] + x_axes[:-1], w_axes[-1:] + w_axes[:-1]
    return _multiply(x, w, (x_axes, w_axes), params)


def _slide(x: jax.Array, axis: int, taps: int, out: int, stride: int, dilation: int) -> jax.Array:
    """Returns `x[..., o * stride + k * dilation, ...]`; axes k and o replace `axis`."""

    def take(start: int, count: int, step: int) -> jax.Array:
        return lax.slice_in_dim(x, start, start + (count - 1) * step + 1, step, axis)

    if taps <= out:
        return jnp.stack([take(k * dilation, out, stride) for k in range(taps)], axis)
    # The kernel of a weight's gradient is the whole image, and its result is small.
    return jnp.stack([take(o * stride, taps, dilation) for o in range(out)], axis + 1)


def _sum_taps(x: jax.Array, w: jax.Array, sizes: _Sizes, params: dict[str, Any]) -> jax.Array:
    """Convolves by products of the image with each tap of the kernel, shifted and added."""
    count = len(sizes.kernel)
    y = _multiply(x, w, ((x.ndim - 1,), (w.ndim - 2,)), params)  # G B *space *kernel O
    for i in range(count):
        spread = params["lhs_dilation"][i]
        shifted = []
        for k in range(sizes.kernel[i]):
            low = params["padding"][i][0] - k * params["rhs_dilation"][i]
            high = sizes.out[i] - low - ((sizes.space[i] - 1) * spread + 1)
            # Each pass of the outer loop takes one axis of the kernel away, the first that is left.
            tap = lax.index_in_dim(y, k, 2 + count, keepdims=False)
            edges = [(0, 0, 0)] * tap.ndim
            edges[2 + i] = low, high, spread - 1
            shifted.append(lax.pad(tap, jnp.zeros((), tap.dtype), edges))
        y = functools.reduce(jnp.add, shifted)
    return y
