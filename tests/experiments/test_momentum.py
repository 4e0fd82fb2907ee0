"""The momentum of the training programs as one switch: local or quasi-global."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from small import make_small

import gossipjax as gx
from experiments import image
from experiments.training.methods import MOMENTUMS, MethodOptions, make_method
from experiments.training.options import TrainingOptions

RATE = 0.1
NODES = 4


def one_peer(n):
    return gx.topology.one_peer_exponential(n).matrices()


def falling(count):
    return RATE / (1 + count)


RATES = {"quasi-global": falling}
ORACLES = {
    "quasi-global": lambda x, g: oracle.quasi_global(
        one_peer(NODES), x, g, falling, 0.9, 0.9, True
    ),
}


@pytest.mark.parametrize("algorithm", ["sgp", "dpsgd-adapt-then-combine@one_peer_exponential"])
@pytest.mark.parametrize("momentum", MOMENTUMS)
def test_the_method_is_that_of_its_momentum(momentum, algorithm):
    """Round by round the oracle of the momentum, at the rate of the program."""
    options = MethodOptions(NODES, momentum=momentum, rate=RATES[momentum])
    method = make_method(algorithm, options, optax.identity())
    rng = np.random.default_rng(0)
    start = rng.normal(size=(NODES, 3))
    gradients = rng.normal(size=(5, NODES, 3))
    nodes = gx.Nodes(NODES)

    def step(params, state, grads, number):
        updates, state = method.transform.update(grads, state, params, step=number)
        return optax.apply_updates(params, updates), state

    program = nodes.spmd(step, static_argnums=3)
    params = jnp.asarray(start, jnp.float32)
    state = jax.vmap(method.transform.init)(params)
    expected = ORACLES[momentum](start, gradients)
    for number, (g, (z, *_)) in enumerate(zip(gradients, expected, strict=True)):
        params, state = program(params, state, jnp.asarray(g, jnp.float32), number)
        np.testing.assert_allclose(params, z, rtol=0, atol=1e-5)


@pytest.mark.parametrize("momentum", MOMENTUMS)
def test_the_local_half_of_a_step_needs_no_exchange(momentum):
    """On one node it is the whole step."""
    options = MethodOptions(1, momentum=momentum, rate=RATE)
    method = make_method("sgp", options, optax.identity())
    nodes = gx.Nodes(1)

    def step(params, state, grads):
        local = method.local_updates(grads, state, params)
        updates, state = method.transform.update(grads, state, params, step=0)
        return params + updates, state, params + local

    params = jnp.array([[1.0, -2.0]])
    state = jax.vmap(method.transform.init)(params)
    program = nodes.spmd(step)
    for _ in range(3):
        params, state, local = program(params, state, 2 * params)
        np.testing.assert_allclose(params, local, rtol=1e-6)


def test_what_cannot_mix_momentum():
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("1-osgp", {}, "must be sgp or dpsgd-adapt-then-combine, which mix .* got osgp"),
        ("sgp", {"local_steps": 2}, "must exchange at every update"),
        ("sgp@star", {}, "must be doubly stochastic"),
    ]
    for (name, changes, message), momentum in itertools.product(cases, MOMENTUMS):
        options: dict[str, Any] = {"momentum": momentum} | changes
        with pytest.raises(ValueError, match=message):
            make_method(name, MethodOptions(NODES, **options), optax.identity())


def test_quasi_global_momentum_learns(tmp_path, monkeypatch):
    make_small(monkeypatch.setattr)
    with pytest.raises(ValueError, match="--momentum quasi-global must come with --optimizer nest"):
        TrainingOptions(momentum="quasi-global", optimizer="sgd")
    arguments = ["--algorithm", "sgp", "--momentum", "quasi-global", "--model", "linear"]
    arguments += ["--epochs", "4", "--nodes", "4", "--placement", "vmap", "--learning-rate", "0.05"]
    image.main([*arguments, "--out", str(tmp_path)])
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    losses = [float(line.split('"loss": ')[1].split(",")[0]) for line in lines if '"loss"' in line]
    assert losses[-1] < 0.6 * losses[0]
