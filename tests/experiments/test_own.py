"""A model and data of the user's, from the page that shows them to the table of a comparison."""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gossipjax as gx
from experiments import own
from experiments.compare import __main__ as compare
from experiments.compare.options import CompareOptions
from experiments.training.methods import MethodOptions, make_method
from experiments.training.sharpness import measure_sharpness

PAGE = Path(__file__).parents[2] / "docs/study.md"


def make_linear(options, **changes):
    x = np.random.default_rng(0).normal(size=(12, 8)).astype(np.float32)
    return own.ArrayTask(
        options,
        init=lambda key: {"w": jax.random.normal(key, (8,)), "b": jnp.zeros(())},
        loss=lambda p, batch: jnp.mean((jnp.tanh(batch @ p["w"] + p["b"]) - 1) ** 2),
        metrics=lambda p, batch: {"loss": batch @ p["w"]},
        **{"train": x, "test": x, **changes},
    )


def test_the_study_of_the_page_is_compared_with_all_that_a_table_holds(tmp_path, monkeypatch):
    (code,) = re.findall(r"```python\n(# my_study\.py\n.*?)```", PAGE.read_text(), re.DOTALL)
    assert code.count("\n") <= 40
    (tmp_path / "my_study.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(compare, "find_devices", lambda jobs: [{}])
    out = tmp_path / "out"
    compare.main(
        [
            *("--task", "my_study:task", "--algorithm", "dpsgd", "local", "--seed", "0"),
            *("--dirichlet-alpha", "0.1", "--out", str(out), "--"),
            *("--nodes", "4", "--epochs", "1", "--placement", "vmap"),
            *("--evaluate-nodes", "--sharpness"),
        ]
    )
    dpsgd, local = json.loads((out / "summary.json").read_text())["runs"]
    assert dpsgd["mean"] > local["mean"] > 10
    assert dpsgd["nodes_worst"] <= dpsgd["nodes_mean"] <= dpsgd["nodes_mean_best"]
    assert dpsgd["consensus_distance"] < local["consensus_distance"]
    assert (dpsgd["gradients_per_node"], dpsgd["spectral_gap"]) == (31, pytest.approx(2 / 3))
    assert dpsgd["sent_bytes"] > local["sent_bytes"] == 0
    assert dpsgd["sharpness"] > 0
    assert local["spectral_gap"] is None
    header = "best | mean of nodes | best mean | worst node | best worst | distance | sharpness"
    assert f"{header} | gap per step | gradients | MB sent per node |" in (
        (out / "table.md").read_text()
    )
    assert (out / "curves.png").stat().st_size > 10_000


def test_sharpness_is_the_largest_eigenvalue_of_the_hessian():
    task = make_linear(own.OwnOptions(nodes=3))
    variables = task.init(0)
    batches = next(task.batches(gx.Nodes(3), 4, 0, 0))

    def loss(flat):
        params = {"w": flat[:8], "b": flat[8]}
        return jnp.mean(jnp.stack([task.loss({"params": params}, b)[0] for b in batches]))

    flat = jnp.append(variables["params"]["w"], variables["params"]["b"])
    values = np.linalg.eigvalsh(np.asarray(jax.hessian(loss)(flat), float))
    assert values[0] < 0  # the largest, and not the largest modulus
    found = measure_sharpness(task, variables, batches)
    np.testing.assert_allclose(found, values[-1], rtol=1e-3)


def test_the_gap_is_of_a_step_and_unknown_where_no_schedule_says_it():
    def gap(name, **options):
        return make_method(name, MethodOptions(nodes=4, **options), gx.allreduce()).spectral_gap

    assert gap("dpsgd@ring") == pytest.approx(2 / 3)
    assert gap("dpsgd@ring", local_steps=2) == pytest.approx(1 - (1 / 3) ** 0.5)
    assert gap("allreduce") == 1
    assert [gap("local"), gap("easgd"), gap("sgp@complete/ring", steps=9)] == [None] * 3


def test_what_a_task_lacks_is_said(tmp_path, monkeypatch):
    (tmp_path / "wrong_task.py").write_text("def task(options):\n    return options\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name, message in (
        ("", "of --task .none. must be one that can be imported, .* give MODULE:FUNCTION"),
        ("no_such_module:task", "must be one that can be imported"),
        ("wrong_task:other", "other of --task wrong_task:other must be a function"),
        ("wrong_task:task", "must return a task, got OwnOptions: experiments.own.ArrayTask"),
    ):
        with pytest.raises(ValueError, match=message):
            own.make_task(own.OwnOptions(task=name))
    with pytest.raises(ValueError, match="got labels=None: give ArrayTask its labels"):
        make_linear(own.OwnOptions(dirichlet_alpha=0.1))
    with pytest.raises(ValueError, match=r"arrays of train must have a row .* \[\(3,\), \(2,\)\]"):
        make_linear(own.OwnOptions(), train=(np.zeros(3), np.zeros(2)))
    with pytest.raises(ValueError, match="--task must be left out with --program"):
        CompareOptions(task="a:b", program="image")
