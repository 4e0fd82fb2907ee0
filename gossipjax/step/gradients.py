"""The two halves of a node's step: gradients, also of a large batch in parts, and the update."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gossipjax.collectives import accumulation_dtype, cast_like
from gossipjax.exchanges.model import add, apply_updates
from gossipjax.exchanges.transform import require_like
from gossipjax.nodes.arguments import require_numbers
from gossipjax.topology.schedule import require_int

Gradients = Callable[..., tuple[optax.Updates, Any]]
ExtraArgs = Callable[[Any], dict[str, Any]]
UpdateOfNode = Callable[..., tuple[optax.Params, optax.OptState]]


def check_gradients(gradients: Gradients) -> Gradients:
    """Wraps `gradients` with checks, made when it is traced, whose errors name the mistake.

    `gradients` must return a pair: gradients like the parameters, and `aux` of numbers. It must not
    call a collective over an axis that does not exist, as a step for another program does.
    """

    @functools.wraps(gradients)
    def checked(params: optax.Params, *inputs: Any) -> tuple[optax.Updates, Any]:
        try:
            result = gradients(params, *inputs)
        except NameError as error:
            if "unbound axis name" not in str(error):
                raise
            raise ValueError(
                "a step must have no collective over the axis of another program, got an axis that "
                f"is not here: {error} Remove the lax.pmean of gradients: the gossip exchanges."
            ) from error
        if not isinstance(result, tuple) or len(result) != 2:
            raise ValueError(
                "gradients must return a pair (grads, aux), got "
                f"{type(result).__name__}: jax.grad(loss, has_aux=True) does."
            )
        name = "grads of (grads, aux), which jax.value_and_grad returns in the other order,"
        require_like(params, result[0], name)
        require_numbers(result[1], "aux")
        return result

    return checked


def make_update(tx: optax.GradientTransformationExtraArgs, extra_args: ExtraArgs) -> UpdateOfNode:
    """Makes `update(step, params, opt_state, grads, aux, received=None) -> (params, opt_state)`.

    `received` is what another program has exchanged for this step. Without it, the update itself
    exchanges: it calls `combine` of the algorithm's file, through `exchanges/transform.py`.
    """

    def update(
        step: Any, params: Any, opt_state: Any, grads: Any, aux: Any, received: Any = None
    ) -> tuple[optax.Params, optax.OptState]:
        options = {"step": step, "received": received, **extra_args(aux)}
        updates, opt_state = tx.update(grads, opt_state, params, **options)
        return apply_updates(params, updates), opt_state

    return update


def accumulate_gradients(gradients: Gradients, every: int) -> Gradients:
    """Computes the gradients of a large batch in `every` parts, one after another.

    With `k = every` and a loss that is a mean over examples, each part has `B / k` examples, and

        accumulated(params, batch) = (1/k sum_j grads(params, batch_j), [aux_0, ..., aux_{k-1}])

    is the gradient of the whole batch, in the memory of one part. You can use any chain with
    `accumulated`, because the optimizer and the gossip see one gradient. Sums are float32 at least.

    Args:
      gradients: `gradients(params, *inputs) -> (grads, aux)` of one node, as for `gx.TrainStep`.
      every: k, the number of parts.

    Returns:
      A function like `gradients`. All arrays of the inputs are `[B, ...]`, where k divides B;
      `jax.random.split(key, k)` gives each part a key, `[1]`. The returned `aux` is `[k, ...]`.

    Raises:
      ValueError: if `every` is not an integer >= 1; when traced, if `every` does not divide the
        leading axis of an input, or `gradients` does not return a pair with gradients like
        `params`.

    >>> import jax, jax.numpy as jnp, gossipjax as gx
    >>> def loss(params, batch):
    ...     return jnp.mean((params - batch) ** 2), batch.sum()
    >>> gradients = gx.accumulate_gradients(jax.grad(loss, has_aux=True), every=2)
    >>> [x.tolist() for x in gradients(jnp.float32(0), jnp.array([1.0, 2.0, 3.0, 6.0]))]
    [-6.0, [3.0, 9.0]]
    """
    every = require_int(every, "every of accumulate_gradients", 1)
    checked = check_gradients(gradients)

    def accumulated(params: optax.Params, *inputs: Any) -> tuple[optax.Updates, Any]:
        parts = _split(inputs, every)
        shapes, _ = jax.eval_shape(checked, params, *jax.tree.map(lambda x: x[0], parts))

        def add_part(total: Any, part: Any) -> tuple[Any, Any]:
            grads, aux = checked(params, *part)
            return add(total, grads), aux

        def zeros_to_carry(like: Any) -> jax.Array:
            zeros = jnp.zeros(like.shape, accumulation_dtype(like.dtype))
            # Under check_vma=True a carry must vary over the same axes before and after each part.
            axes = tuple(jax.typeof(like).manual_axis_type.varying)
            return jax.lax.pcast(zeros, axes, to="varying") if axes else zeros

        total, aux = jax.lax.scan(add_part, jax.tree.map(zeros_to_carry, shapes), parts)
        return cast_like(jax.tree.map(lambda t: t / every, total), shapes), aux

    return accumulated


def _split(inputs: Any, every: int) -> Any:
    """Splits each array of the inputs into parts: `[B, ...]` -> `[every, B / every, ...]`."""
    if not jax.tree.leaves(inputs):
        raise ValueError(
            "inputs of accumulated gradients must be given, because they are split into parts, got "
            "none: call gradients(params, batch)."
        )

    def split(path: Any, x: Any) -> jax.Array:
        shape = jnp.shape(x)
        if not shape or shape[0] % every:
            arg, *inside = path  # which input, and where in its tree
            raise ValueError(
                f"input {arg.idx}{jax.tree_util.keystr(tuple(inside))} of accumulated gradients "
                f"must have a leading axis of examples that every = {every} divides, got shape "
                f"{list(shape)}: give batches of a multiple of {every} examples per node."
            )
        return jnp.asarray(x).reshape(every, shape[0] // every, *shape[1:])

    return jax.tree_util.tree_map_with_path(split, inputs)
