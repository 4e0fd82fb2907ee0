"""Updates of several steps: the same as with a larger batch, and one exchange for each."""

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
from experiments.training.methods import MethodOptions, make_method
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


@pytest.mark.parametrize("placement", ["mesh", "vmap"])
@pytest.mark.parametrize("algorithm", ["sgp", "dpsgd", "allreduce"])
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


@pytest.mark.parametrize("algorithm", ["1-osgp", "2-osgp", "easgd", "rand-psgd", "sgp-cwa"])
def test_other_algorithms_accumulate(tmp_path, algorithm):
    run, lines = train(tmp_path, "--algorithm", algorithm, "--accumulate", "2")
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0]
    assert run["steps"] == 8


@pytest.mark.parametrize("algorithm", ["adpsgd", "d1d-psgd"])
def test_older_models_cannot_accumulate(tmp_path, capsys, algorithm):
    with pytest.raises(SystemExit) as stop:
        train(tmp_path, "--algorithm", algorithm, "--accumulate", "2")
    assert stop.value.code == 2
    assert "--accumulate must be 1, got 2" in capsys.readouterr().err


def test_more_than_a_run_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        train(tmp_path, "--accumulate", "9")
    assert stop.value.code == 2
    assert "--accumulate must be at most 8, so that an update takes" in capsys.readouterr().err


def count_sent(text):
    """Numbers that a node sends in a program."""
    shapes = re.findall(r"collective_permute.*-> tensor<((?:[0-9]+x)*)f32>", text)
    return sum(math.prod(map(int, shape.split("x")[:-1])) for shape in shapes)


@pytest.mark.parametrize(
    ("algorithm", "sent"),
    [("sgp", [0, 0, 6]), ("1-osgp", [2, 2, 2]), ("dpsgd", [0, 0, 10]), ("allreduce", None)],
)
def test_one_exchange_for_each_update(algorithm, sent):
    """Of a model of 5 numbers and its weight, or the model to both neighbors of a ring.

    OSGP sends a message in parts, one with each of the steps. AllReduce's exchange is in a branch.
    """
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
        assert len(set(texts)) == 1
        before, _, branch = texts[0].partition("stablehlo.case")
        assert "all_reduce" not in before
        assert "all_reduce" in branch
    else:
        assert list(map(count_sent, texts)) == sent
