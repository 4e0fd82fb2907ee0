"""Simulated nodes, measured as their users do it."""

import json
from functools import partial

import jax
import numpy as np
import pytest

from experiments.speed import gossip
from experiments.speed.__main__ import main


def test_gossip_is_compared_with_the_step_without_it_and_with_that_by_hand(tmp_path, capsys):
    out = tmp_path / "out"
    methods = ["sgp", "dpsgd", "1-osgp", "quasi-global", "sgp/int8"]
    arguments = ["--nodes", "4", "--models", "mlp", "--batch-size-per-node", "2", "--turns", "2"]
    main(["gossip", *arguments, "--methods", *methods, "--out", str(out)])
    runs = json.loads((out / "summary.json").read_text())["runs"]
    assert [run["method"] for run in runs] == methods
    for run in runs:
        assert run["ratio_p10"] <= run["ratio"] <= run["ratio_p90"]
        is_by_hand = run["method"] in ("sgp", "dpsgd")
        assert (run["ratio_by_hand"] is not None) == is_by_hand
        assert (run["update_ratio_to_hand"] is not None) == is_by_hand
    assert "over the same without gossip" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "nodes"), [("sgp", 6), ("dpsgd", 4)])
def test_what_is_written_by_hand_is_the_algorithm(name, nodes):
    problem = gossip.Problem("linear", nodes, 2)
    form = gossip.write_by_hand(name, nodes)
    assert form is not None
    method = gossip.make_simulated_method(name, nodes)
    ours, theirs = problem.step(method), problem.step_by_hand(form)
    for number in range(5):
        compare = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
        jax.tree.map(compare, ours(number)[0], theirs(number)[0])
