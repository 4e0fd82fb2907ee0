"""What the gradients of a training step must return."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gossipjax.last import GRADIENTS, mark

Gradients = Callable[..., tuple[optax.Updates, Any]]


def check_gradients(gradients: Gradients) -> Gradients:
    """`gradients`, whose result is checked when traced."""

    @functools.wraps(gradients)
    def checked(params: optax.Params, *inputs: Any) -> tuple[optax.Updates, Any]:
        result = gradients(params, *inputs)
        if not isinstance(result, tuple) or len(result) != 2:
            raise ValueError(
                "gradients must return a pair (grads, aux), got "
                f"{type(result).__name__}: jax.grad(loss, has_aux=True) does."
            )
        specs = [
            (jax.tree.structure(tree), [jnp.shape(leaf) for leaf in jax.tree.leaves(tree)])
            for tree in (params, result[0])
        ]
        if specs[0] != specs[1]:
            raise ValueError(
                "gradients must return (grads, aux) with grads of the structure and shapes of "
                f"the parameters, {_describe(specs[0])}, got {_describe(specs[1])}: "
                "jax.value_and_grad returns them in the other order."
            )
        return mark(result[0], GRADIENTS), result[1]

    return checked


def _describe(spec: tuple[Any, list[Any]]) -> str:
    structure, shapes = spec
    return f"{str(structure)[:80]} of shapes {[list(shape) for shape in shapes[:4]]}"
