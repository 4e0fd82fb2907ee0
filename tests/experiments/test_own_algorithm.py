"""An algorithm of the user's, from its file to the table of a comparison."""

import json

from experiments.examples import own_algorithm


def test_an_algorithm_of_15_lines_is_compared_on_16_simulated_nodes(tmp_path):
    out = tmp_path / "out"
    settings = ("--nodes", "16", "--model", "linear", "--epochs", "1", "--placement", "vmap")
    arguments = ["--seed", "0", "--jobs", "1", "--out", str(out)]
    own_algorithm.main(others=(), arguments=arguments, settings=settings)
    (record,) = json.loads((out / "summary.json").read_text())["runs"]
    assert record["row"] == "experiments.examples.own_algorithm:heavy_ball"
    assert record["mean"] > 50
    (summary,) = (out / "cells").glob("*/summary.json")
    (run,) = json.loads(summary.read_text())["runs"]
    assert (run["topology"], run["nodes"]) == ("ring", 16)
    assert len(run["test_accuracy_nodes"]) == 16
    assert (out / "curves.png").stat().st_size > 10_000
