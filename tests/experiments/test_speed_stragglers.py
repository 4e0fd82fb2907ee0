"""The measurement of slow nodes: its factors and bounds, its options, and a small one."""

import json
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from experiments.program import ProgramError
from experiments.speed.__main__ import main
from experiments.speed.wire import harness, report, stragglers
from experiments.speed.wire.harness import HostFailedError
from experiments.speed.wire.stragglers import (
    BATCH_SIZE_PER_NODE,
    Options,
    add_ratios,
    compute_gradients,
    compute_ideal_ratio,
    compute_loss,
    count_steps_per_second,
    list_metrics,
    make_params,
    simulate_run,
    summarize_run,
)

OPTIONS = Options(nodes=2, steps=2, compute_seconds=0.5)


def make_record(ends, start=10.0, losses=None):
    return {
        "start": start,
        "ends": [start + end for end in ends],
        "losses": losses or [1.0] * len(ends),
        "loss": 0.5,
        "sent": 3,
        "kept": 0,
        "staleness": 1.5,
    }


@pytest.mark.parametrize("nodes", [2, 8])
@pytest.mark.parametrize("factor", [2, 4])
def test_ideals_of_a_constant_slowness(nodes, factor):
    factors = Options(nodes=nodes).draw_factors(f"{factor}x", 5)
    assert compute_ideal_ratio(factors, is_lockstep=True) == pytest.approx(1 / factor)
    expected = (nodes - 1 + 1 / factor) / nodes
    assert compute_ideal_ratio(factors, is_lockstep=False) == pytest.approx(expected)


def test_ideals_of_factors_that_change():
    factors = np.array([[1.0, 3.0], [2.0, 1.0]])
    assert compute_ideal_ratio(factors, is_lockstep=True) == pytest.approx(2 / (3 + 2))
    assert compute_ideal_ratio(factors, is_lockstep=False) == pytest.approx((2 / 3 + 2 / 4) / 2)


def test_rates_are_of_whole_steps():
    """A node that is in the middle of a step when the others end is not idle."""
    fast = make_record([1.0, 2.0, 3.0, 4.0])
    slow = make_record([3.0], start=10.1)
    assert count_steps_per_second([fast, slow], False) == pytest.approx(4 / 4 + 1 / 3.1)
    assert count_steps_per_second([fast, make_record([])], False) == pytest.approx(1)
    assert count_steps_per_second([fast, make_record([2.0] * 4)], True) == pytest.approx(8 / 4)


def test_a_run_is_summarized():
    records = [make_record([2.0]), make_record([0.5, 1.0, 1.5])]
    run = summarize_run("async-sgp", "4x", OPTIONS, records)
    assert run["examples_per_second"] == pytest.approx(BATCH_SIZE_PER_NODE * 2.5)
    assert run["ideal_ratio_to_none"] == 0.625
    limit = 0.625 * 2 * BATCH_SIZE_PER_NODE / 0.5
    assert run["limit_examples_per_second"] == pytest.approx(limit)
    assert run["ratio_to_limit"] == pytest.approx(1)
    assert (run["steps_nodes"], run["steps_min"], run["steps_median"]) == ([1, 3], 1, 2)
    assert (run["seconds"], run["loss"], run["sent"]) == (2.0, 0.5, 6)
    assert summarize_run("sgp", "4x", OPTIONS, records)["ideal_ratio_to_none"] == 0.25


def test_ratios_are_to_the_same_algorithm():
    none = {"algorithm": "sgp", "slowness": "none", "examples_per_second": 8.0}
    slow = {"algorithm": "sgp", "slowness": "2x", "examples_per_second": 4.4}
    other = {"algorithm": "1-osgp", "slowness": "2x", "examples_per_second": 4.0}
    runs = [none | {"ideal_ratio_to_none": 1.0}]
    runs += [run | {"ideal_ratio_to_none": 0.5} for run in (slow, other)]
    add_ratios(runs)
    assert (runs[0]["ratio_to_none"], runs[0]["ratio_to_ideal"]) == (1, 1)
    assert (runs[1]["ratio_to_none"], runs[1]["ratio_to_ideal"]) == pytest.approx((0.55, 1.1))
    assert (runs[2]["ratio_to_none"], runs[2]["ratio_to_ideal"]) == (None, None)


def test_losses_are_in_the_order_in_which_steps_ended():
    slow = make_record([2.0], losses=[4.0])
    fast = make_record([0.5, 1.0, 1.5, 2.5], losses=[3.0, 2.0, 1.0, 9.0])
    lines = list_metrics("async-sgp", "4x", OPTIONS, [slow, fast])
    assert [line["seconds"] for line in lines] == [1.0, 2.0]
    assert [line["loss"] for line in lines] == [2.5, 2.5]
    assert [line["examples"] for line in lines] == [
        2 * BATCH_SIZE_PER_NODE,
        4 * BATCH_SIZE_PER_NODE,
    ]


def test_gradients_are_there_after_the_sleep():
    params = jax.tree.map(jnp.asarray, make_params(features=4, megabytes=0.001))
    assert sum(x.nbytes for x in params.values()) == 1000
    batch = jnp.eye(4), jnp.arange(4)
    compiled = jax.jit(compute_gradients)
    jax.block_until_ready(compiled(params, batch, jnp.float32(0)))
    start = time.monotonic()
    grads, loss = jax.block_until_ready(compiled(params, batch, jnp.float32(0.3)))
    assert time.monotonic() - start >= 0.3
    expected, expected_grads = jax.value_and_grad(compute_loss)(params, batch)
    assert float(loss) == pytest.approx(float(expected))
    for x, y in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)
    assert not grads["padding"].any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes", "1"], "--nodes must be from 2 to 64, got 1"),
        (["--nodes", "65"], "--nodes must be from 2 to 64, got 65"),
        (["--slowness", "none", "-2x"], "as 4x, got '-2x'"),
        (["--slowness", "4x", "4x"], "--slowness must be one or several different values"),
        (["--algorithm", "sgp", "sgp"], "--algorithm must be one or several different values"),
        (["--compute-seconds", "0"], "--compute-seconds must be positive and finite, got 0"),
        (["--compute-seconds", "nan"], "--compute-seconds must be positive and finite, got nan"),
        (["--steps", "0"], "--steps must be an integer >= 1, got 0"),
        (["--megabytes", "-1"], "--megabytes must be finite and >= 0, got -1"),
        (["--bandwidth", "fast"], "--bandwidth must be a rate as tc reads it, got 'fast'"),
        (["--algorithm", "sync"], "no algorithm is named 'sync'"),
        (["--algorithm", "async-x"], "--algorithm must be one of async-sgp"),
        (["--algorithm", "sgp@hypercube", "--nodes", "3"], "hypercube"),
        (["--megabytes", "1e6"], "lower it, or --nodes"),
    ],
)
def test_bad_input(tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        main(["stragglers", *arguments, "--out", str(tmp_path / "out")])
    assert stopped.value.code == 2
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert not (tmp_path / "out").exists()


def test_limits_need_root(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SystemExit):
        main(["stragglers", "--bandwidth", "200mbit", "--out", str(tmp_path / "out")])
    assert "Missing: root" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_without_pyzmq_only_lockstep_is_possible(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(stragglers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main(["stragglers", "--out", str(tmp_path / "out")])
    assert "--algorithm async-sgp must be run with pyzmq" in capsys.readouterr().err
    stragglers.require_algorithms(Options(algorithm=("sgp",)))


def test_another_folder_is_no_measurement(tmp_path):
    (tmp_path / "summary.json").write_text(json.dumps({"runs": [{"algorithm": "sgp"}]}))
    with pytest.raises(ValueError, match="must hold a run of"):
        report.write_report(tmp_path, Console())


def test_what_was_measured_before_a_failure_is_written(tmp_path, monkeypatch):
    def fail_in_the_second_run(members, command, folder, *rest):
        for rank in range(len(members)):
            (folder / f"0-{rank}.json").write_text(json.dumps(make_record([0.5, 1.0])))
        (folder / "1-0.json").write_text(json.dumps(make_record([0.5, 1.0])))
        raise HostFailedError("host 1 ended with 1")

    monkeypatch.setattr(harness, "run_hosts", fail_in_the_second_run)
    options = Options(nodes=2, steps=2, algorithm=("sgp",))
    with pytest.raises(ProgramError):
        stragglers.measure_runs(options, tmp_path, print)
    (run,) = json.loads((tmp_path / "summary.json").read_text())["runs"]
    assert (run["algorithm"], run["slowness"]) == ("sgp", "none")
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_small_measurement(tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["--nodes", "2", "--compute-seconds", "0.02", "--steps", "12"]
    arguments += ["--slowness", "none", "4x", "--algorithm", "1-osgp", "async-sgp"]
    main(["stragglers", *arguments, "--out", str(out)])
    summary = json.loads((out / "summary.json").read_text())
    runs = {(run["algorithm"], run["slowness"]): run for run in summary["runs"]}
    assert len(runs) == 4
    assert runs["1-osgp", "4x"]["steps_nodes"] == [12, 12]
    asynchronous = runs["async-sgp", "4x"]
    assert asynchronous["steps_nodes"][0] < asynchronous["steps_nodes"][1]
    assert sum(asynchronous["steps_nodes"]) >= 24
    assert asynchronous["sent"] > 0
    for run in summary["runs"]:
        assert run["loss"] < 1.5  # log(10) at the start
        assert 0 < run["ratio_to_limit"] < 1.2
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 4 * 12
    assert (out / "loss_over_seconds.png").stat().st_size > 0
    assert "Computation is a sleep of 0.02 s" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("algorithm", "kept"), [("allreduce", 0.25), ("1-osgp", 0.25), ("async-sgp", 0.8125)]
)
def test_one_slow_node(algorithm, kept):
    options = Options(nodes=4, steps=40, compute_seconds=0.1)
    full = 4 * BATCH_SIZE_PER_NODE / 0.1
    assert simulate_run(algorithm, "none", options) == pytest.approx(full, rel=1e-3)
    assert simulate_run(algorithm, "4x", options) == pytest.approx(kept * full, rel=0.02)


def test_a_limited_link_is_in_the_simulation():
    options = Options(4, steps=20, compute_seconds=0.1, megabytes=2.5, bandwidth="200mbit")
    full = 4 * BATCH_SIZE_PER_NODE
    assert simulate_run("sgp", "none", options) == pytest.approx(full / 0.2, rel=1e-3)
    assert simulate_run("sgp@complete/ring", "none", options) is None
