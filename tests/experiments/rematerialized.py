"""A model with and without `remat`, for the tests of the models."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import numpy as np


def require_remat_changes_no_gradient(
    model: nn.Module,
    init: Callable[[nn.Module], Any],
    compute_loss: Callable[[nn.Module, Any], jax.Array],
) -> None:
    """Compares gradients and the names of the parameters; and that something is computed again.

    `init(model)` are its variables, `compute_loss(model, variables)` a loss.
    """
    remat = model.clone(remat=True)

    def gradients(model: nn.Module) -> Callable[[Any], Any]:
        return jax.grad(lambda variables: compute_loss(model, variables))

    variables = jax.jit(lambda: init(model))()
    names = jax.eval_shape(lambda: init(remat))
    assert jax.tree.structure(names) == jax.tree.structure(variables)
    traced = [jax.jit(gradients(each)).trace(variables) for each in (remat, model)]
    assert ["remat" in str(program.jaxpr) for program in traced] == [True, False]
    found, expected = (program.lower().compile()(variables) for program in traced)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected
    )
