"""An algorithm of the user's, from the page that shows it to the table of a comparison."""

import json
import re
from pathlib import Path

from experiments.compare import __main__ as compare

PAGE = Path(__file__).parents[2] / "docs/your_task.md"


def test_an_algorithm_of_15_lines_is_compared_on_16_simulated_nodes(tmp_path, monkeypatch):
    (code,) = re.findall(r"```python\n(import optax\n.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "my_module.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(compare, "find_devices", lambda jobs: [{}])
    out = tmp_path / "out"
    names = ["--algorithm", "my_module:heavy_ball", "--seed", "0", "--dirichlet-alpha", "0.1"]
    settings = ["--nodes", "16", "--model", "linear", "--epochs", "1", "--placement", "vmap"]
    settings += ["--optimizer", "sgd"]
    compare.main([*names, "--out", str(out), "--", *settings])
    (record,) = json.loads((out / "summary.json").read_text())["runs"]
    assert record["row"] == "my_module:heavy_ball"
    assert record["mean"] > 50
    (summary,) = (out / "cells").glob("*/summary.json")
    (run,) = json.loads(summary.read_text())["runs"]
    assert (run["topology"], run["nodes"]) == ("ring", 16)
    assert len(run["test_accuracy_nodes"]) == 16
    assert (out / "curves.png").stat().st_size > 10_000
