"""Gradients of a batch in parts: the same as with a larger batch."""

import json

import numpy as np
import pytest
from small import make_small

from experiments import image


@pytest.fixture(autouse=True)
def small(monkeypatch):
    make_small(monkeypatch.setattr)


def train(out, *arguments):
    short = ["--epochs", "2", "--nodes", "4", "--model", "linear", "--log-every", "4"]
    image.main([*short, "--out", str(out), *arguments])
    (run,) = json.loads((out / "summary.json").read_text())["runs"]
    return run, [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("algorithm", "placement"), [("sgp", "vmap"), ("allreduce", "mesh")])
def test_an_update_is_that_of_one_large_batch(tmp_path, algorithm, placement):
    """Of as many examples, in the same order."""
    options = ("--algorithm", algorithm, "--optimizer", "adam", "--placement", placement)
    options += ("--learning-rate", "0.003", "--local-steps", "2")
    large, _ = train(tmp_path / "large", *options, "--batch-size-per-node", "32")
    parts = ("--batch-size-per-node", "16", "--accumulate", "2")
    small, lines = train(tmp_path / "small", *options, *parts)
    assert (large["steps"], small["steps"]) == (8, 8)
    for field in ("consensus_distance", "test_accuracy_nodes", "test_accuracy_average_model"):
        np.testing.assert_allclose(small[field], large[field], rtol=1e-3, atol=1e-6)
    assert [line["step"] for line in lines if "loss" in line] == [4, 8]
