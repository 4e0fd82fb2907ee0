"""Updates of several steps: the same as with a larger batch, and one exchange for each."""

import dataclasses
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small import make_small

from experiments import image
from experiments.training import placement
from experiments.training.methods import (
    ALGORITHMS,
    MethodOptions,
    make_method,
    parse_name,
    spell_name,
)
from experiments.training.outer import OuterOptions
from experiments.training.placement import place_nodes


@pytest.fixture(autouse=True)
def small(monkeypatch):
    make_small(monkeypatch.setattr)
    monkeypatch.setattr(placement, "request_cpu_devices", lambda count: None)


def train(out, *arguments):
    short = ["--epochs", "2", "--nodes", "4", "--model", "linear", "--log-every", "4"]
    image.main([*short, "--out", str(out), *arguments])
    (run,) = json.loads((out / "summary.json").read_text())["runs"]
    return run, [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("algorithm", "placement"), [("sgp", "vmap"), ("allreduce", "mesh")])
def test_an_update_is_that_of_one_large_batch(tmp_path, algorithm, placement):
    """The batches of two steps are those of one twice as large."""
    options = ("--algorithm", algorithm, "--optimizer", "adam", "--placement", placement)
    options += ("--learning-rate", "0.003", "--local-steps", "2")
    large, _ = train(tmp_path / "large", *options, "--batch-size-per-node", "32")
    parts = ("--batch-size-per-node", "16", "--accumulate", "2")
    small, lines = train(tmp_path / "small", *options, *parts)
    assert (large["steps"], small["steps"]) == (8, 16)
    for field in ("consensus_distance", "test_accuracy_nodes", "test_accuracy_average_model"):
        np.testing.assert_allclose(small[field], large[field], rtol=1e-3, atol=1e-6)
    assert [line["step"] for line in lines if "loss" in line] == [4, 8, 12, 16]


NAMES = [spell_name(name, overlap=2) for name, row in ALGORITHMS.items() if row.exchanges]
CHANGES = {
    "plain": {},
    "quasi-global": {"momentum": "quasi-global"},
    "outer": {"outer": OuterOptions(2, outer_delay=1)},  # around one of them
}


def make_methods(changes):
    """All methods with these changes of the options, given one gradient per update, and two."""
    for name in NAMES[:1] if "outer" in changes else NAMES:
        row = ALGORITHMS[parse_name(name).row]
        if row.mixes_after if "momentum" in changes else row.takes_outer or not changes:
            name = name + "@ring" * ("momentum" in changes)
            options = MethodOptions(4, rate=0.1, **changes)
            both = (options, dataclasses.replace(options, accumulate=2))
            optimizer = optax.sgd(0.1, 0.9)
            optimizer = optax.identity() if "momentum" in changes else optimizer
            yield name, *(make_method(name, each, optimizer) for each in both)


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_every_method_accumulates(changes):
    """The models after six updates are those of the mean gradients."""
    nodes = place_nodes("vmap", 4)
    start = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), jnp.float32)
    targets = jnp.asarray(np.random.default_rng(1).normal(size=(12, 4, 3)), jnp.float32)
    for name, plain, accumulated in make_methods(changes):
        models = []
        for method, goals in (
            (plain, targets.reshape(6, 2, 4, 3).mean(axis=1)),
            (accumulated, targets),
        ):
            tx = method.transform

            def take_steps(z, goals, tx=tx):
                def step(carry, inputs):
                    z, state = carry
                    goal, number = inputs
                    updates, state = tx.update(z - goal, state, z, step=number)
                    return (optax.apply_updates(z, updates), state), None

                numbers = jnp.arange(len(goals))
                return jax.lax.scan(step, (z, tx.init(z)), (goals, numbers))[0][0]

            models.append(nodes.spmd(take_steps)(start, jnp.swapaxes(goals, 0, 1)))
        np.testing.assert_allclose(*models, rtol=1e-4, atol=1e-5, err_msg=name)


def test_going_on_with_another_number_of_steps(tmp_path, capsys):
    """Partial sums and rounds would be those of other updates."""
    options = ("--algorithm", "sgp", "--accumulate")
    train(tmp_path / "two", *options, "2", "--checkpoint-every", "3")
    (checkpoints,) = (tmp_path / "two" / "checkpoints").iterdir()
    longer = ("--epochs", "4", "--init-from", str(checkpoints))
    with pytest.raises(SystemExit) as stop:
        train(tmp_path / "four", *options, "4", *longer)
    assert stop.value.code == 2
    assert "It is of another every of gx.accumulate" in " ".join(capsys.readouterr().err.split())


def count_sent(text):
    """Numbers that a node sends in a program."""
    shapes = re.findall(r"collective_permute.*-> tensor<((?:[0-9]+x)*)f32>", text)
    return sum(math.prod(map(int, shape.split("x")[:-1])) for shape in shapes)


@pytest.mark.parametrize(
    ("algorithm", "sent"),
    [("sgp", [0, 0, 6]), ("1-osgp", [0, 0, 6]), ("dpsgd", [0, 0, 10]), ("allreduce", None)],
)
def test_one_exchange_for_each_update(algorithm, sent):
    """Of a model of 5 numbers and its weight, or the model to both neighbors of a ring."""
    nodes = place_nodes("mesh", 4)
    method = make_method(algorithm, MethodOptions(4, accumulate=3), optax.adam(0.1))
    params, opt_state = nodes.init(method.transform, jnp.zeros(5))

    def update(step, grads, opt_state, params):
        return method.transform.update(grads, opt_state, params, step=step)

    program = jax.jit(nodes.spmd(update, static_argnums=0), static_argnums=0)
    texts = [
        program.lower(step, jnp.ones((4, 5)), opt_state, params).as_text() for step in range(3)
    ]
    if algorithm == "allreduce":
        assert ["all_reduce" in text for text in texts] == [False, False, True]
    else:
        assert list(map(count_sent, texts)) == sent
