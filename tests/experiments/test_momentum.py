"""Quasi-global momentum in the training programs: the method that their options make."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gossipjax as gx
from experiments.training.methods import MethodOptions, make_method
from experiments.training.options import TrainingOptions

NODES = 4


def test_the_local_half_of_a_step_needs_no_exchange():
    """On one node it is the whole step."""
    options = MethodOptions(1, momentum="quasi-global", rate=0.1)
    method = make_method("sgp", options, optax.identity())

    def step(params, state, grads):
        local = method.local_updates(grads, state, params)
        updates, state = method.transform.update(grads, state, params, step=0)
        return params + updates, state, params + local

    params = jnp.array([[1.0, -2.0]])
    state = jax.vmap(method.transform.init)(params)
    program = gx.Nodes(1).spmd(step)
    for _ in range(3):
        params, state, local = program(params, state, 2 * params)
        np.testing.assert_allclose(params, local, rtol=1e-6)


def test_what_cannot_mix_momentum():
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("1-osgp", {}, "must be sgp or dpsgd-adapt-then-combine, which mix .* got osgp"),
        ("sgp", {"local_steps": 2}, "must exchange at every update"),
        ("sgp@star", {}, "must be doubly stochastic"),
    ]
    for name, changes, message in cases:
        options: dict[str, Any] = {"momentum": "quasi-global"} | changes
        with pytest.raises(ValueError, match=message):
            make_method(name, MethodOptions(NODES, **options), optax.identity())
    with pytest.raises(ValueError, match="--momentum quasi-global must come with --optimizer nest"):
        TrainingOptions(momentum="quasi-global", optimizer="sgd")
